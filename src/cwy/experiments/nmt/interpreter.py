"""Translate sentences by the network of a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..engine.checkpoint import check_shapes
from ..engine.config import ConfigError
from ..engine.files import Damaged
from ..engine.folder import Folder
from ..engine.task import PRECISIONS, Settings
from .corpus import load
from .decode import decode
from .figure import attention_map
from .model import Translator, data_of
from .recipes import NmtConfig
from .task import Translation
from .text import END, SPECIAL, START, Vocabulary, Words, words

NOTED_WORDS = 10
"""The most unknown words in a note on a sentence."""
LONGEST_WORD = 40
"""The most letters of each of them."""

Say = Callable[[str], object]


class Translated(NamedTuple):
    """Hold a sentence, its translation, and notes on both."""

    source: Words
    target: str
    notes: list[str]


class HeldOut(NamedTuple):
    """Hold the translation of a held-out sentence, and its reference."""

    translation: Translated
    reference: str


class Interpreter:
    """Translate by the network of a run folder, without the data of the run.

    Args:
        path: the run folder. The network is that of the best epoch. A run without one is read from
            its last checkpoint.
        device: where to translate.
        say: prints which checkpoints are damaged.
    """

    def __init__(self, path: Path, device: str, say: Say) -> None:
        folder = Folder(path)
        self.settings = folder.settings()
        task = self.settings.task
        if task != Translation.name:
            raise ConfigError(
                f"{path} is a run of {task}, which translates nothing. "
                "Train one: cwy train nmt/small"
            )
        self.config = cast(NmtConfig, self.settings.config)
        self.model = _model(path, self.settings, folder.read_weights(say)).to(device).eval()

    def translate(self, text: str, beams: int = 1) -> Translated:
        """Return the translation of a sentence, which is empty for a sentence without words."""
        vocabularies = self.model.vocabularies
        longest = self.model.data["longest"]
        sentence = words(text)
        if not sentence:
            return Translated(sentence, "", ["there is no word in it"])
        notes = []
        unknown = [word for word in dict.fromkeys(sentence) if word not in vocabularies.source]
        if unknown:
            shown = ", ".join(word[:LONGEST_WORD] for word in unknown[:NOTED_WORDS])
            if len(unknown) > NOTED_WORDS:
                shown += f" and {len(unknown) - NOTED_WORDS} more"
            notes.append(f"not known: {shown}")
        if len(sentence) > longest:
            notes.append(
                f"{len(sentence)} words, the longest sentence in training had {longest}: "
                "do not rely on it"
            )
        if beams > len(vocabularies.target):
            raise ConfigError(
                f"--beams must be at most {len(vocabularies.target):,}, the words that the network "
                f"knows, got {beams:,}. A few, such as 5, are enough."
            )
        source = self._tensor(vocabularies.source.numbers(sentence))
        limit = 2 * min(len(sentence), longest) + 10
        (target,) = decode(self.model, source, limit, beams)
        return Translated(sentence, vocabularies.target.text(target), notes)

    @torch.no_grad()
    def draw(self, translation: Translated, path: Path) -> bool:
        """Draw the attention of each word of a translation. Return whether the font has them."""
        vocabularies = self.model.vocabularies
        target = tuple(translation.target.split())
        source = self._tensor(vocabularies.source.numbers(translation.source))
        given = self._tensor([START, *vocabularies.target.numbers(target)[:-1]])
        weights = self.model.attention(source, given)
        shown = [_shown(word, vocabularies.source) for word in translation.source]
        return attention_map(
            weights[0].cpu(),
            source=[*shown, SPECIAL[END]],
            target=[*target, SPECIAL[END]],
            path=path,
        )

    def held_out(self, count: int, beams: int = 1) -> Iterator[HeldOut]:
        """Yield the first held-out pairs of the run, in the order of the split."""
        corpus = load(self.config, self.settings.seed)
        if not self.model.data.items() <= corpus.identity.items():
            raise ConfigError(
                "the data have changed since the run, so its held-out pairs are unknown."
            )
        for pair in corpus.held_out[:count]:
            translation = self.translate(" ".join(pair.source), beams)
            yield HeldOut(translation, reference=" ".join(pair.target))

    def _tensor(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor([list(numbers)], device=self.model.score.device)


def _shown(word: str, known: Vocabulary) -> str:
    if word in known:
        return word
    return f"{word} (unknown)"


def _model(path: Path, settings: Settings, weights: dict[str, Tensor]) -> Translator:
    config = cast(NmtConfig, settings.config)
    dtype = PRECISIONS[settings.precision]
    try:
        if "_extra_state" not in weights:
            raise ConfigError("they hold no words")
        model = Translator(settings.method, config, data_of(weights["_extra_state"]), dtype)
    except (ValueError, RuntimeError) as error:
        raise _other_weights(path, error) from None
    check_shapes(path, weights, model)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise _other_weights(path, error) from None
    return model


def _other_weights(path: Path, error: Exception) -> Damaged:
    # torch lists everything that does not fit. The first line is enough.
    reason = str(error).splitlines()[:2][-1].strip().rstrip(".")
    return Damaged(f"the weights in {path} are not those of its settings: {reason}.")

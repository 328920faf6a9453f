"""Translate sentences by the network of a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..engine.config import ConfigError
from ..engine.files import Damaged
from ..engine.run import WEIGHTS, Folder
from ..engine.task import PRECISIONS, Settings
from .corpus import load
from .decode import decode
from .figure import attention_map
from .model import Translator, data_of
from .recipes import NmtConfig
from .task import Translation
from .text import END, SPECIAL, START, Words, words

Say = Callable[[str], object]


class Spoken(NamedTuple):
    """A sentence, its translation, and what should be said of it."""

    source: Words
    target: str
    notes: list[str]


class Interpreter:
    """The translator of a run, from its folder alone: the data are not needed.

    Args:
        path: the run folder. Of a run that has not ended, the last checkpoint is used.
        device: where to translate.
        say: is told of checkpoints that are damaged.
    """

    def __init__(self, path: Path, device: str, say: Say) -> None:
        folder = Folder(path)
        self.settings = folder.settings()
        if self.settings.task != Translation.name:
            raise ConfigError(
                f"{path} is a run of {self.settings.task}, which translates nothing. Train one: cwy train nmt/small"
            )
        self.config = cast(NmtConfig, self.settings.config)
        self.model = _model(path, self.settings, folder.read_weights(say)).to(device).eval()

    def translate(self, text: str, beams: int = 1) -> Spoken:
        """A translation of a sentence; one without words has none."""
        (source, target), longest = self.model.vocabularies, self.model.data["longest"]
        found, notes = words(text), []
        if unknown := [word for word in dict.fromkeys(found) if word not in source]:
            notes.append(f"not known: {', '.join(unknown)}")
        if len(found) > longest:
            notes.append(
                f"{len(found)} words, the longest sentence in training had {longest}: do not rely on it"
            )
        if not found:
            return Spoken(found, "", ["there is no word in it"])
        (said,) = decode(
            self.model,
            self._tensor(source.numbers(found)),
            2 * min(len(found), longest) + 10,
            beams,
        )
        return Spoken(found, target.text(said), notes)

    @torch.no_grad()
    def draw(self, spoken: Spoken, path: Path) -> None:
        """Draws what each word of a translation attended to."""
        source, target = self.model.vocabularies
        said = target.numbers(tuple(spoken.target.split()))
        weights = self.model.attention(
            self._tensor(source.numbers(spoken.source)), self._tensor([START, *said[:-1]])
        )
        heard = [word if word in source else f"{word} (unknown)" for word in spoken.source]
        attention_map(
            weights[0].cpu(), [*heard, SPECIAL[END]], [*spoken.target.split(), SPECIAL[END]], path
        )

    def held_out(self, count: int, beams: int = 1) -> Iterator[tuple[Spoken, str]]:
        """The first held-out pairs of the run, in the order of the split: each with its translation and its reference."""
        corpus = load(self.config, self.settings.seed)
        if not self.model.data.items() <= corpus.identity.items():
            raise ConfigError(
                "the data have changed since the run: what it did not see can't be told any more."
            )
        for source, target in corpus.held_out[:count]:
            yield self.translate(" ".join(source), beams), " ".join(target)

    def _tensor(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor([list(numbers)], device=self.model.score.device)


def _model(path: Path, settings: Settings, weights: dict[str, Tensor]) -> Translator:
    config, dtype = cast(NmtConfig, settings.config), PRECISIONS[settings.precision]
    try:
        if "_extra_state" not in weights:
            raise ConfigError("they hold no words")
        model = Translator(settings.method, config, data_of(weights["_extra_state"]), dtype)
        model.load_state_dict(weights)
    except (ValueError, RuntimeError) as error:
        # Of torch's list of what does not fit, the first.
        reason = str(error).splitlines()[:2][-1].strip().rstrip(".")
        raise Damaged(
            f"the weights in {path} ({WEIGHTS}) are not those of its settings: {reason}."
        ) from None
    return model

"""Translation: read a sentence word by word, and write it in another language."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from ...parametrizations import METHODS
from ..data import DataError
from ..engine.config import ConfigError
from ..engine.task import Batch, Best, Settings
from ..recurrent import BASELINES, RecurrentTask
from .buckets import Bucket, PlannedBatch, count_batches, make_buckets, padded, plan
from .corpus import Pair, load
from .decode import decode
from .model import Translator
from .recipes import RECIPES, NmtConfig
from .text import PAD, START


class Translation(RecurrentTask):
    """Translate sentences from Spanish to English, or between the columns of a file.

    The loss is the cross-entropy of the target's words and its end, each given the words before it.
    Every epoch sees each training pair once, in batches of similar length. The seed draws the
    batches and the split.

    An evaluation gives the loss per word and its perplexity. It also gives the paper's measures:
    the loss over targets padded to the longest of the corpus, and perplexity 2^loss. The last
    evaluation of the test pairs adds BLEU of greedy translations by sacrebleu. The share of the
    states' energy along their principal direction shows how much the states differ. The change of
    the source embeddings is relative to the initial ones.

    A run with validation pairs is evaluated on these. The epoch with the lowest loss is tested.
    """

    name = "nmt"
    Config = NmtConfig
    recipes = RECIPES
    best = Best("validation", "loss", better=operator.lt)
    config: NmtConfig

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        if find_spec("sacrebleu") is None:
            raise DataError('translation needs sacrebleu. To install: pip install "cwy[nmt]"')
        if self.config.gate and settings.method in ("lstm", "gru"):
            raise ConfigError(
                f"gate is a setting of orthogonal methods and of rnn, and {settings.method} has "
                f"gates of its own. Take the recipe nmt/{settings.method}, or set gate=false, "
                "thin_gate=false and gate_encoder=true."
            )
        self.corpus = load(self.config, settings.seed)
        self.train = self._buckets(self.corpus.train, self.config.batch_size)
        self.held_out = self._buckets(self.corpus.held_out, self.config.test_batch_size)
        self._planned_epoch = -1
        self._plan: list[PlannedBatch] = []

    def _buckets(self, pairs: Sequence[Pair], at_least: int) -> list[Bucket]:
        return make_buckets(
            pairs,
            self.corpus.vocabularies,
            width=self.config.bucket,
            at_least=at_least,
            device=self.device,
        )

    @classmethod
    def methods(cls) -> list[str]:
        # Attention is over real states.
        return [name for name in super().methods() if name in BASELINES or METHODS[name].real]

    @property
    def capturable(self) -> bool:
        return super().capturable and not self.config.eager

    @property
    def facts(self) -> dict[str, Any]:
        return self.corpus.facts

    @property
    def epoch(self) -> int:
        return count_batches(self.train, self.config.batch_size)

    @property
    def iterations(self) -> int:
        return self.config.epochs * self.epoch

    def model(self) -> Translator:
        model = Translator(self.settings.method, self.config, self.corpus.identity, self.dtype)
        model = model.to(self.device)
        # A resumed run draws the same ones.
        self._first_embeddings = model.source.weight.detach().clone()
        return model

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.epoch)
        if self._planned_epoch != epoch:
            # On the host, which must know the shape of every batch.
            generator = self.generator("epoch", epoch, device="cpu")
            self._plan = plan(self.train, self.config.batch_size, generator)
            self._planned_epoch = epoch
        number, rows = self._plan[index]
        source = self.train[number].source[rows]
        target = self.train[number].target[rows]
        # With these weights the mean over rows is the mean over words, on any number of processes.
        weight = len(rows) / (target != PAD).sum().to(self.dtype)
        return source, target, weight.expand(len(rows)).contiguous()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        source, target, weight = batch
        return (_costs(model, source, target) * weight).mean(), {}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        found = self._measured(model, self.held_out)
        translator = cast(Translator, model)
        found["principal_share"] = self._principal_share(translator)
        found["embedding_change"] = self._embedding_change(translator)
        return {self._part: found}

    def _principal_share(self, model: Translator) -> float:
        """Return the share of the decoder states' energy along their principal direction.

        The states are those of one batch of held-out pairs. A share near 1 means that all states
        are nearly multiples of one vector.
        """
        bucket = max(self.held_out, key=len)
        source, target = next(bucket.batches(self.config.test_batch_size))
        states = model.states(source, _before(target))[(target != PAD).mT].double()
        energy = states.square().sum()
        if energy == 0 or not energy.isfinite():
            # There is no direction. If states are not finite, the loss ends the run.
            return 0.0
        return float(torch.linalg.eigvalsh(states.mT @ states)[-1] / energy)

    def _embedding_change(self, model: Translator) -> float:
        """Return how far the source embeddings are from the initial ones, relative to their norm.

        Words that no batch had stay where they are.
        """
        first = self._first_embeddings.double()
        change = model.source.weight.double() - first
        return float(change.norm() / first.norm())

    def at_end(self, model: nn.Module) -> dict[str, dict[str, float]]:
        if self.config.validation is not None:
            # Only the best epoch is tested, see conclude.
            return {}
        return {"test": {"bleu": self._bleu(model)}}

    def conclude(self, model: nn.Module) -> tuple[dict[str, dict[str, float]], dict[str, bytes]]:
        if self.config.validation is None or not self.config.final_test:
            return {}, {}
        buckets = self._buckets(self.corpus.test, self.config.test_batch_size)
        found = self._measured(model, buckets)
        found["bleu"] = self._bleu(model)
        return {"test": found}, {}

    def _measured(self, model: nn.Module, buckets: Sequence[Bucket]) -> dict[str, float]:
        """Return the losses over all pairs of some buckets."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        words = torch.zeros((), dtype=torch.int64, device=self.device)
        pairs = 0
        for bucket in buckets:
            for source, target in bucket.batches(self.config.test_batch_size):
                self.heed()
                total += _costs(model, source, target).double().sum()
                words += (target != PAD).sum()
                pairs += len(target)
        loss = float(total / words)
        paper_loss = float(total) / (pairs * self.corpus.longest_target)
        return {
            "loss": loss,
            # Capped, so that a diverging run overflows no float.
            "perplexity": math.exp(min(loss, 500)),
            "paper_loss": paper_loss,
            "paper_perplexity": 2 ** min(paper_loss, 500),
        }

    def _bleu(self, model: nn.Module) -> float:
        """Return BLEU of greedy translations of the test pairs."""
        from sacrebleu import corpus_bleu

        pairs = sorted(self.corpus.test, key=lambda pair: len(pair.source))
        size = self.config.test_batch_size
        translations: list[str] = []
        for first in range(0, len(pairs), size):
            self.heed()
            translations += self._translate(model, pairs[first : first + size])
        # The references keep words that are not in the vocabulary.
        references = [" ".join(pair.target) for pair in pairs]
        # force: the text is split into words on purpose.
        return corpus_bleu(translations, [references], force=True).score

    def _translate(self, model: nn.Module, pairs: Sequence[Pair]) -> list[str]:
        """Return greedy translations of the sources."""
        vocabularies = self.corpus.vocabularies
        rows = [vocabularies.source.numbers(pair.source) for pair in pairs]
        source = padded(rows).to(self.device)
        decoded = decode(cast(Translator, model), source, limit=2 * source.shape[1])
        return [vocabularies.target.text(numbers) for numbers in decoded]

    @property
    def _part(self) -> str:
        if self.config.validation is None:
            return "test"
        return "validation"


def _costs(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each target, summed over its words and end."""
    logits = model(source, _before(target))
    costs = cross_entropy(
        logits.flatten(0, 1), target.mT.flatten(), ignore_index=PAD, reduction="none"
    )
    return costs.view(target.mT.shape).sum(0)


def _before(target: Tensor) -> Tensor:
    """Return the word before each word of the targets."""
    return pad(target[:, :-1], (1, 0), value=START)

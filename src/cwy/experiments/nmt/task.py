"""Translation: a sentence is read word by word, and said in another language."""

from __future__ import annotations

import math
import operator
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from ...parametrizations import METHODS
from ..data import DataError
from ..engine.task import Batch, Settings
from ..recurrent import BASELINES, RecurrentTask
from .buckets import buckets, padded, plan, steps
from .corpus import load
from .decode import decode
from .model import Translator
from .recipes import RECIPES, NmtConfig
from .text import PAD, START


class Translation(RecurrentTask):
    """Pairs of sentences; the loss is the cross-entropy of a target's words and end, with those before given.

    Every epoch sees each training pair once, in batches of like length, drawn by the seed; so is the split. An evaluation
    gives the loss a word and its perplexity, and the paper's measures: every target padded to the longest of the corpus, and
    perplexity 2^loss. The last one gives BLEU of greedy translations, too, by sacrebleu.
    """

    name = "nmt"
    Config = NmtConfig
    recipes = RECIPES
    best = ("validation", "loss", operator.lt)
    config: NmtConfig

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        if find_spec("sacrebleu") is None:
            raise DataError('translation needs sacrebleu. To install: pip install "cwy[nmt]"')
        c = self.config
        self.corpus = load(c, settings.seed)
        words = self.corpus.source, self.corpus.target
        self.train = buckets(self.corpus.train, *words, c.bucket, c.batch_size, device)
        self.held_out = buckets(self.corpus.held_out, *words, c.bucket, c.test_batch_size, device)
        self._plan: tuple[int, list[tuple[int, Tensor]]] = -1, []

    @classmethod
    def methods(cls) -> list[str]:
        # Attention is over real states.
        return [name for name in super().methods() if name in BASELINES or METHODS[name].real]

    @property
    def facts(self) -> dict[str, Any]:
        return self.corpus.facts

    @property
    def epoch(self) -> int:
        return steps(self.train, self.config.batch_size)

    @property
    def iterations(self) -> int:
        return self.config.epochs * self.epoch

    def model(self) -> Translator:
        return Translator(self.settings.method, self.config, self.corpus.identity, self.dtype).to(
            self.device
        )

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.epoch)
        if self._plan[0] != epoch:
            # On the host, which must know the shape of every batch.
            generator = self.generator("epoch", epoch, device="cpu")
            self._plan = epoch, plan(self.train, self.config.batch_size, generator)
        number, rows = self._plan[1][index]
        source, target = (part[rows] for part in self.train[number])
        # The mean over rows, weighted so, is the mean over words, however the rows are shared out.
        weight = len(rows) / (target != PAD).sum().to(self.dtype)
        return source, target, weight.expand(len(rows)).contiguous()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        source, target, weight = batch
        return (_costs(model, source, target) * weight).mean(), {}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        total, words = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for bucket in self.held_out:
            # Without the row that fills up.
            for source, target in zip(
                *(side[:-1].split(self.config.test_batch_size) for side in bucket), strict=True
            ):
                self.heed()
                total += _costs(model, source, target).double().sum()
                words += (target != PAD).sum()
        loss = float(total / words)
        over_all = float(total) / (len(self.corpus.held_out) * self.corpus.longest[1])
        # A perplexity too large to write is one that a run can't go on with anyway.
        papers = {"paper_loss": over_all, "paper_perplexity": 2 ** min(over_all, 500)}
        return {self._part: {"loss": loss, "perplexity": math.exp(min(loss, 500)), **papers}}

    def at_end(self, model: nn.Module) -> dict[str, dict[str, float]]:
        from sacrebleu import corpus_bleu

        pairs, size, said = (
            sorted(self.corpus.held_out, key=lambda pair: len(pair[0])),
            self.config.test_batch_size,
            [],
        )
        for first in range(0, len(pairs), size):
            self.heed()
            source = padded(
                [self.corpus.source.numbers(words) for words, _ in pairs[first : first + size]]
            ).to(self.device)
            said += map(
                self.corpus.target.text,
                decode(cast(Translator, model), source, 2 * source.shape[1]),
            )
        # The references as they are, words that are not known included.
        meant = [" ".join(target) for _, target in pairs]
        # Forced: the text is meant to be cut into words already.
        return {self._part: {"bleu": corpus_bleu(said, [meant], force=True).score}}

    @property
    def _part(self) -> str:
        return "test" if self.config.validation is None else "validation"


def _costs(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of each target, summed over its words and end."""
    given = pad(target[:, :-1], (1, 0), value=START)
    logits = model(source, given)
    costs = cross_entropy(
        logits.flatten(0, 1), target.mT.flatten(), ignore_index=PAD, reduction="none"
    )
    return costs.view(target.mT.shape).sum(0)

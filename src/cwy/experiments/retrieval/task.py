"""Retrieval: a Spanish sentence finds its English translation among 1,000."""

from __future__ import annotations

import operator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data import DataError
from ..engine.task import Batch, Best, Settings, Task
from . import weights
from .encoder import Encoder, adapt, trained_parameters, worst_orthogonality
from .recipes import METHODS, RECIPES, RetrievalConfig
from .sentences import load
from .tokens import Tokens

CHUNK = 250
"""The sentences that an evaluation encodes at once."""


class Retrieval(Task[RetrievalConfig]):
    """Adapt an English sentence encoder so that Spanish sentences find their translations.

    The encoder all-MiniLM-L6-v2 maps both sentences of a pair to unit vectors. The loss is the
    cross-entropy of the right sentence among those of the batch, by cosine similarity, in both
    directions. An evaluation ranks 1,000 held-out English sentences for each Spanish one. It gives
    the fraction that is ranked first (accuracy) and the mean reciprocal rank (mrr).
    """

    name = "retrieval"
    Config = RetrievalConfig
    recipes = RECIPES
    best = Best("validation", "mrr", better=operator.gt)
    config: RetrievalConfig

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        if find_spec("peft") is None:
            raise DataError('retrieval needs peft. To install: pip install "cwy[peft]"')
        self.source = weights.find(self.config.weights)
        file = self.source.folder / "tokenizer.json"
        self.sentences = load(file, self.config.length, self.config.pairs, device)
        self._trained = 0
        self._shuffled_epoch = -1
        self._order = torch.empty(0, dtype=torch.long, device=device)

    @classmethod
    def methods(cls) -> list[str]:
        return list(METHODS)

    @property
    def iterations(self) -> int:
        return self.config.iterations

    @property
    def facts(self) -> dict[str, Any]:
        found = {**self.sentences.facts, **self.source.facts}
        if self._trained:
            found["trained parameters"] = self._trained
        return found

    def model(self) -> Encoder:
        body = weights.load_encoder(self.source, self.dtype)
        body = adapt(body, self.settings.method, self.config.rank)
        model = Encoder(body).to(self.device)
        self._trained = trained_parameters(model)
        return model

    def batch(self, step: int) -> Batch:
        train = self.sentences.train
        size = min(self.config.batch_size, len(train.english))
        epoch, index = divmod(step, len(train.english) // size)
        if self._shuffled_epoch != epoch:
            generator = self.generator("epoch", epoch)
            count = len(train.english)
            self._order = torch.randperm(count, generator=generator, device=self.device)
            self._shuffled_epoch = epoch
        rows = self._order[index * size : (index + 1) * size]
        return train.english[rows], train.spanish[rows]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        english, spanish = batch
        vectors = model(torch.cat([english, spanish]))
        similarity = vectors[len(english) :] @ vectors[: len(english)].mT
        scores = similarity.float() / self.config.temperature
        right = torch.arange(len(english), device=scores.device)
        found = (scores.argmax(-1) == right).to(scores.dtype).mean()
        both = cross_entropy(scores, right) + cross_entropy(scores.mT, right)
        return both / 2, {"accuracy": found}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        return {"validation": self._ranked(model, self.sentences.validation)}

    def at_end(self, model: nn.Module) -> dict[str, dict[str, float]]:
        found = self._ranked(model, self.sentences.test)
        error = worst_orthogonality(model)
        if error is not None:
            found["orthogonality_error"] = error
        return {"test": found}

    def _ranked(self, model: nn.Module, pairs: Tokens) -> dict[str, float]:
        """Return how high the right English sentences rank for the Spanish ones."""
        english = self._encoded(model, pairs.english)
        similarity = self._encoded(model, pairs.spanish) @ english.mT
        right = similarity.diagonal().unsqueeze(-1)
        # A sentence that is as similar as the right one counts as ranked before it.
        rank = (similarity >= right).sum(-1).clamp(min=1).double()
        return {"accuracy": (rank == 1).double().mean().item(), "mrr": (1 / rank).mean().item()}

    def _encoded(self, model: nn.Module, tokens: Tensor) -> Tensor:
        parts = []
        for part in tokens.split(CHUNK):
            self.heed()
            parts.append(model(part).double())
        return torch.cat(parts)

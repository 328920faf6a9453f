"""The adding problem (Hochreiter and Schmidhuber 1997)."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

from ..engine.task import Batch, Best
from ..recurrent import Recurrent, RecurrentTask
from .recipes import RECIPES, AddingConfig

TOLERANCE = 0.04
"""The largest error of an answer that counts as right."""


class Adding(RecurrentTask):
    """Add the two marked numbers among T, one marked in each half.

    The numbers are uniform in [0, 1]. The loss is the mean squared error. The constant answer 1 has
    a loss of 1/6. The accuracy is the fraction of answers within 0.04 of the sum.
    """

    name = "adding"
    Config = AddingConfig
    recipes = RECIPES
    best = Best("test", "loss", better=operator.lt)
    crossings = (1e-2, 1e-3)
    config: AddingConfig

    @property
    def iterations(self) -> int:
        return self.config.iterations

    def model(self) -> Recurrent:
        return self.network(2, 1, last=True)

    def batch(self, step: int) -> Batch:
        return self._draw("train", step)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        numbers, marked = batch
        marks = one_hot(marked, self.config.T).sum(1).to(numbers.dtype)
        x = torch.stack([numbers, marks], -1).transpose(0, 1)
        answer = model(x).squeeze(-1).to(self.dtype)
        target = numbers.gather(1, marked).sum(1)
        right = ((answer - target).abs() <= TOLERANCE).to(self.dtype).mean()
        return mse_loss(answer, target), {"accuracy": right}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        batches = (self._draw("test", i) for i in range(self.config.evaluation_batches))
        return {"test": self.mean(model, batches)}

    def _draw(self, split: str, index: int) -> Batch:
        """Draw the numbers ``(B, T)`` and the places of the two marks ``(B, 2)``."""
        size = self.config.batch_size
        steps = self.config.T
        draw = {"generator": self.generator(split, index), "device": self.device}
        numbers = torch.rand(size, steps, dtype=self.dtype, **draw)
        first = torch.randint(0, steps // 2, (size,), **draw)
        second = torch.randint(steps // 2, steps, (size,), **draw)
        return numbers, torch.stack([first, second], 1)

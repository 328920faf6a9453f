"""The adding problem (Hochreiter and Schmidhuber 1997)."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

from ..engine.task import Batch
from ..recurrent import Recurrent, RecurrentTask
from .recipes import RECIPES, AddingConfig

# As near as an answer must be to count as right.
NEAR = 0.04


class Adding(RecurrentTask):
    """Input: T numbers uniform in [0, 1], two of them marked, one in each half. Answer: the sum of the two.

    The loss is the mean squared error; always to answer 1 has 1/6. The accuracy is the part of the answers within 0.04.
    """

    name = "adding"
    Config = AddingConfig
    recipes = RECIPES
    best = ("test", "loss", operator.lt)
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
        answer = model(torch.stack([numbers, marks], -1).transpose(0, 1)).squeeze(-1).to(self.dtype)
        wanted = numbers.gather(1, marked).sum(1)
        near = ((answer - wanted).abs() <= NEAR).to(self.dtype).mean()
        return mse_loss(answer, wanted), {"accuracy": near}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        return {
            "test": self.mean(
                model, (self._draw("test", i) for i in range(self.config.evaluation_batches))
            )
        }

    def _draw(self, split: str, index: int) -> Batch:
        """Numbers ``(B, T)`` and the places of the two marks ``(B, 2)``."""
        size, steps, half = self.config.batch_size, self.config.T, self.config.T // 2
        draw = {"generator": self.generator(split, index), "device": self.device}
        numbers = torch.rand(size, steps, dtype=self.dtype, **draw)
        places = (
            torch.randint(0, half, (size,), **draw),
            torch.randint(half, steps, (size,), **draw),
        )
        return numbers, torch.stack(places, 1)

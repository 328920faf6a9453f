"""Copying: ten symbols are shown, and must be said again T steps later."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..engine.task import Batch
from ..recurrent import Recurrent, RecurrentTask
from .recipes import RECIPES, CopyingConfig

SYMBOLS, LENGTH = 8, 10
BLANK, CUE = 0, 9


class Copying(RecurrentTask):
    """Input: ten symbols from 1 to 8, T blanks, a cue, nine blanks. Answer: T + 10 blanks, then the ten symbols.

    The loss is the cross-entropy over all T + 20 positions, the accuracy the part of the ten symbols that is recalled.
    Without memory no answer has a loss below 10 ln 8/(T + 20).
    """

    name = "copying"
    Config = CopyingConfig
    recipes = RECIPES
    best = ("test", "loss", operator.lt)
    crossings = (1e-2, 1e-3)
    config: CopyingConfig

    @property
    def iterations(self) -> int:
        return self.config.iterations

    def model(self) -> Recurrent:
        model = self.network(SYMBOLS + 2, SYMBOLS + 1, last=False, symbols=True)
        nn.init.kaiming_normal_(model.readout.weight, nonlinearity="relu")
        nn.init.zeros_(model.readout.bias)
        return model

    def batch(self, step: int) -> Batch:
        return self._draw("train", step)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        symbols = batch[0].mT
        x = symbols.new_full((self.config.T + 2 * LENGTH, symbols.shape[1]), BLANK)
        y = torch.full_like(x, BLANK)
        x[:LENGTH], x[self.config.T + LENGTH], y[-LENGTH:] = symbols, CUE, symbols
        logits = model(x)
        recalled = (logits[-LENGTH:].argmax(-1) == symbols).to(self.dtype).mean()
        return cross_entropy(logits.flatten(0, 1), y.flatten()), {"accuracy": recalled}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        return {
            "test": self.mean(
                model, (self._draw("test", i) for i in range(self.config.evaluation_batches))
            )
        }

    def _draw(self, split: str, index: int) -> Batch:
        shape = (self.config.batch_size, LENGTH)
        return (
            torch.randint(
                1, SYMBOLS + 1, shape, generator=self.generator(split, index), device=self.device
            ),
        )

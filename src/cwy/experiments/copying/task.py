"""Copying: show ten symbols, ask for them T steps later."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..engine.task import Batch, Best
from ..recurrent import Recurrent, RecurrentTask
from .recipes import RECIPES, CopyingConfig

SYMBOLS = 8
LENGTH = 10
BLANK = 0
CUE = 9


class Copying(RecurrentTask):
    """Recall ten symbols from 1 to 8 after T blanks and a cue.

    The input is the ten symbols, T blanks, a cue and nine blanks. The target is T + 10 blanks,
    then the ten symbols. The loss is the cross-entropy over all T + 20 positions. The accuracy is
    the fraction of the ten symbols that is recalled.

    A model without memory has a loss of at least 10 ln 8/(T + 20).
    """

    name = "copying"
    Config = CopyingConfig
    recipes = RECIPES
    best = Best("test", "loss", better=operator.lt)
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
        x[:LENGTH] = symbols
        x[self.config.T + LENGTH] = CUE
        y = torch.full_like(x, BLANK)
        y[-LENGTH:] = symbols
        logits = model(x)
        recalled = (logits[-LENGTH:].argmax(-1) == symbols).to(self.dtype).mean()
        return cross_entropy(logits.flatten(0, 1), y.flatten()), {"accuracy": recalled}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        batches = (self._draw("test", i) for i in range(self.config.evaluation_batches))
        return {"test": self.mean(model, batches)}

    def _draw(self, split: str, index: int) -> Batch:
        """Draw the symbols ``(B, 10)`` of a batch."""
        shape = (self.config.batch_size, LENGTH)
        generator = self.generator(split, index)
        symbols = torch.randint(1, SYMBOLS + 1, shape, generator=generator, device=self.device)
        return (symbols,)

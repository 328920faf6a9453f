"""MNIST as a sequence of pixels: what digit was it?"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from ..data import mnist
from ..engine.config import ConfigError
from ..engine.task import Batch, Settings
from ..recurrent import Recurrent, RecurrentTask
from .recipes import RECIPES, PixelsConfig

SIDE, CLASSES = 28, 10
PERMUTATION = 92916


class Pixels(RecurrentTask):
    """784 pixels, one at a time, row by row; the class is read from the last state.

    The images lie on the device as bytes. Every epoch sees each training image once, in an order drawn by the seed; its last
    batch is smaller than the others.
    """

    name = "mnist"
    Config = PixelsConfig
    recipes = RECIPES
    best = ("test", "accuracy", operator.gt)
    config: PixelsConfig

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        if SIDE % self.config.pool:
            raise ConfigError(f"pool must divide {SIDE}, got {self.config.pool}.")
        images = mnist.load()
        self.images, self.test_images = (
            self._sequences(part) for part in (images.train_images, images.test_images)
        )
        self.labels, self.test_labels = (
            part.to(device) for part in (images.train_labels, images.test_labels)
        )
        self._order = -1, self.labels

    @property
    def epoch(self) -> int:
        return math.ceil(len(self.labels) / self.config.batch_size)

    @property
    def iterations(self) -> int:
        return self.config.epochs * self.epoch

    def model(self) -> Recurrent:
        return self.network(1, CLASSES, last=True)

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.epoch)
        if self._order[0] != epoch:
            count = len(self.labels)
            self._order = (
                epoch,
                torch.randperm(count, generator=self.generator("epoch", epoch), device=self.device),
            )
        size = self.config.batch_size
        rows = self._order[1][index * size : (index + 1) * size]
        return self.images[rows], self.labels[rows]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        logits = model((images.mT.to(self.dtype) / 255).unsqueeze(-1))
        right = (logits.argmax(-1) == labels).to(self.dtype).mean()
        return cross_entropy(logits, labels), {"accuracy": right}

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        size = self.config.test_batch_size
        batches = zip(self.test_images.split(size), self.test_labels.split(size), strict=True)
        return {"test": self.mean(model, batches)}

    def _sequences(self, images: Tensor) -> Tensor:
        """Rows of pixels, pooled, on the device, in the order in which they are shown."""
        images = images.to(self.device)
        if self.config.pool > 1:
            squares = images.view(-1, 1, SIDE, SIDE).float()
            images = avg_pool2d(squares, self.config.pool).round().to(torch.uint8).flatten(1)
        return images


class PermutedPixels(Pixels):
    """The same pixels in an order that is fixed and has no meaning."""

    name = "pmnist"

    def _sequences(self, images: Tensor) -> Tensor:
        import numpy as np

        images = super()._sequences(images)
        order = np.random.RandomState(PERMUTATION).permutation(images.shape[1])
        return images[:, torch.from_numpy(order).to(self.device)]

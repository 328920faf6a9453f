"""MNIST as a sequence of pixels: classify the digit."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from ..data import mnist
from ..engine.config import ConfigError
from ..engine.task import Batch, Best, Settings
from ..recurrent import Recurrent, RecurrentTask
from .recipes import RECIPES, PixelsConfig

SIDE = 28
CLASSES = 10
PERMUTATION_SEED = 92916


class Pixels(RecurrentTask):
    """Read 784 pixels one at a time, row by row, and classify the digit from the last state.

    The images lie on the device as bytes. Every epoch sees each training image once, in an order
    drawn by the seed. The last batch of an epoch is smaller than the others.
    """

    name = "mnist"
    Config = PixelsConfig
    recipes = RECIPES
    best = Best("test", "accuracy", better=operator.gt)
    config: PixelsConfig

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        if SIDE % self.config.pool:
            raise ConfigError(f"pool must divide {SIDE}, got {self.config.pool}.")
        images = mnist.load()
        self.images = self._sequences(images.train_images)
        self.labels = images.train_labels.to(device)
        self.test_images = self._sequences(images.test_images)
        self.test_labels = images.test_labels.to(device)
        self._shuffled_epoch = -1
        self._order = torch.empty(0, dtype=torch.long, device=device)

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
        if self._shuffled_epoch != epoch:
            generator = self.generator("epoch", epoch)
            self._order = torch.randperm(len(self.labels), generator=generator, device=self.device)
            self._shuffled_epoch = epoch
        size = self.config.batch_size
        rows = self._order[index * size : (index + 1) * size]
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
        """Return rows of pixels ``(B, T)`` on the device, pooled, in the order of the task."""
        images = images.to(self.device)
        if self.config.pool > 1:
            squares = images.view(-1, 1, SIDE, SIDE).float()
            images = avg_pool2d(squares, self.config.pool).round().to(torch.uint8).flatten(1)
        return images


class PermutedPixels(Pixels):
    """Read the pixels of MNIST in one random order, the same for all images."""

    name = "pmnist"

    def _sequences(self, images: Tensor) -> Tensor:
        import numpy as np

        images = super()._sequences(images)
        order = np.random.RandomState(PERMUTATION_SEED).permutation(images.shape[1])
        return images[:, torch.from_numpy(order).to(self.device)]

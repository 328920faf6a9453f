"""Moving MNIST: two digits of MNIST that cross each other and bounce off the walls.

The sequences are always the same.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from . import mnist
from .videos import Videos, assemble

SIDE = 64
"""Pixels of a frame, per side."""
DIGIT = 28
"""Pixels of a digit, per side."""
DIGITS = 2
STEPS = 20
COUNTS = {"train": 1000, "validation": 200, "test": 500}
SLOWEST = 3.0
FASTEST = 5.0
"""Pixels per step."""


def load(root: Path | None = None) -> Videos:
    """Return 1000 + 200 + 500 sequences of 20 frames of 64 x 64. Splits share no digits."""
    data = mnist.load(root)
    digits = {
        "train": data.train_images[:55_000],
        "validation": data.train_images[55_000:],
        "test": data.test_images,
    }
    parts = {}
    for seed, (split, count) in enumerate(COUNTS.items()):
        parts[split] = list(make(digits[split], count, seed))
    return assemble(parts)


def make(digits: Tensor, count: int, seed: int) -> Tensor:
    """Return uint8 sequences ``(count, STEPS, SIDE, SIDE)`` of digits ``(D, 784)``."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    room = SIDE - DIGIT
    canvas = torch.zeros(count, STEPS, SIDE, SIDE, dtype=torch.uint8)
    sequence = torch.arange(count)[:, None, None, None]
    step = torch.arange(STEPS)[None, :, None, None]
    for _ in range(DIGITS):
        chosen = torch.randint(len(digits), (count,), generator=random)
        images = digits[chosen].view(count, 1, DIGIT, DIGIT)
        angle = 2 * math.pi * draw(count)
        speed = SLOWEST + (FASTEST - SLOWEST) * draw(count)
        velocity = speed[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
        start = room * draw(count, 2)
        along = start[:, None] + velocity[:, None] * torch.arange(STEPS)[None, :, None]
        # Unfolded at the walls, a path that bounces is straight.
        corner = (room - (along.remainder(2 * room) - room).abs()).round().long()
        rows = corner[..., 0, None, None] + torch.arange(DIGIT)[:, None]
        columns = corner[..., 1, None, None] + torch.arange(DIGIT)
        before = canvas[sequence, step, rows, columns]
        canvas[sequence, step, rows, columns] = before.maximum(images)
    return canvas

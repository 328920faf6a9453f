"""Moving MNIST: two digits that cross each other and bounce off the walls, made from MNIST; always the same ones."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from . import mnist
from .videos import Videos, assemble

SIDE, DIGIT, STEPS, DIGITS = 64, 28, 20, 2
COUNTS = {"train": 1000, "validation": 200, "test": 500}
SPEED = 3.0, 5.0
"""Pixels a step."""


def load(root: Path | None = None) -> Videos:
    """1000 + 200 + 500 sequences of 20 frames of 64 x 64; digits of each split are its own."""
    data = mnist.load(root)
    digits = {
        "train": data.train_images[:55_000],
        "validation": data.train_images[55_000:],
        "test": data.test_images,
    }
    return assemble(
        {
            split: list(make(digits[split], count, seed))
            for seed, (split, count) in enumerate(COUNTS.items())
        }
    )


def make(digits: Tensor, count: int, seed: int) -> Tensor:
    """Sequences ``(count, STEPS, SIDE, SIDE)`` of digits ``(D, 784)``, uint8."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(shape, generator=random, dtype=torch.float64)
    room = SIDE - DIGIT
    canvas = torch.zeros(count, STEPS, SIDE, SIDE, dtype=torch.uint8)
    sequence, step = (
        torch.arange(count)[:, None, None, None],
        torch.arange(STEPS)[None, :, None, None],
    )
    for _ in range(DIGITS):
        images = digits[torch.randint(len(digits), (count,), generator=random)].view(
            count, 1, DIGIT, DIGIT
        )
        angle, speed = 2 * math.pi * draw(count), SPEED[0] + (SPEED[1] - SPEED[0]) * draw(count)
        velocity = speed[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
        along = (
            room * draw(count, 2)[:, None] + velocity[:, None] * torch.arange(STEPS)[None, :, None]
        )
        # Unfolded at the walls, a path that bounces is straight.
        corner = (room - (along.remainder(2 * room) - room).abs()).round().long()
        rows = corner[..., 0, None, None] + torch.arange(DIGIT)[:, None]
        columns = corner[..., 1, None, None] + torch.arange(DIGIT)
        canvas[sequence, step, rows, columns] = canvas[sequence, step, rows, columns].maximum(
            images
        )
    return canvas

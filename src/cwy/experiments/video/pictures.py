"""Predicted frames beside the true ones: a strip that a run keeps, and from strips a picture and an animation."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

STRIP = "frames.png"
COLUMNS = 6
GAP, LABEL = 4, 14
RATE = 120
"""Milliseconds that a frame of the animation stays."""


class Strip(NamedTuple):
    """Frames ``(T, S, S)``, uint8."""

    true: np.ndarray
    predicted: np.ndarray


def strip(true: Tensor, predicted: Tensor) -> bytes:
    """Frames ``(T, S, S)``, uint8, side by side, the predicted ones below, as a PNG."""
    rows = [torch.cat(list(frames), 1) for frames in (true, predicted)]
    return _save([Image.fromarray(torch.cat(rows).numpy())], "PNG", optimize=True)


def read(path: Path) -> Strip:
    """What :func:`strip` made."""
    pixels = np.asarray(Image.open(path).convert("L"))
    side = pixels.shape[0] // 2
    rows = pixels.reshape(2, side, -1, side).swapaxes(1, 2)
    return Strip(*rows)


def picture(strips: Sequence[tuple[str, Strip]]) -> bytes:
    """Some frames of the truth and of each method, a row each, named, as a PNG."""
    rows = _rows(strips)
    steps = min(len(frames) for _, frames in rows)
    chosen = np.linspace(0, steps - 1, min(COLUMNS, steps)).round().astype(int)
    side = rows[0][1].shape[-1]
    image = Image.new("L", (len(chosen) * (side + GAP) - GAP, len(rows) * (side + LABEL)), 255)
    draw = ImageDraw.Draw(image)
    for i, (name, frames) in enumerate(rows):
        draw.text((1, i * (side + LABEL)), name, fill=60)
        for j, t in enumerate(chosen):
            image.paste(Image.fromarray(frames[t]), (j * (side + GAP), i * (side + LABEL) + LABEL))
    return _save([image], "PNG", optimize=True)


def animation(strips: Sequence[tuple[str, Strip]]) -> bytes:
    """The truth and each method, beside each other, in motion, as a GIF."""
    rows = _rows(strips)
    across, side = min(COLUMNS, len(rows)), rows[0][1].shape[-1]
    down = -(-len(rows) // across)
    images = []
    for t in range(min(len(frames) for _, frames in rows)):
        image = Image.new("L", (across * (side + GAP) - GAP, down * (side + LABEL)), 255)
        draw = ImageDraw.Draw(image)
        for i, (name, frames) in enumerate(rows):
            x, y = i % across * (side + GAP), i // across * (side + LABEL)
            draw.text((x + 1, y), name, fill=60)
            image.paste(Image.fromarray(frames[t]), (x, y + LABEL))
        # Fewer greys make a file half as large, and nobody sees it.
        images.append(image.point(lambda value: value & 0xF8))
    return _save(images, "GIF", save_all=True, append_images=images[1:], duration=RATE, loop=0)


def _rows(strips: Sequence[tuple[str, Strip]]) -> list[tuple[str, np.ndarray]]:
    return [("true", strips[0][1].true), *((name, one.predicted) for name, one in strips)]


def _save(images: Sequence[Image.Image], kind: str, **options) -> bytes:
    content = io.BytesIO()
    images[0].save(content, kind, **options)
    return content.getvalue()

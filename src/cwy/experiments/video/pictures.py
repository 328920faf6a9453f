"""Predicted frames next to true ones: strips that runs keep, a picture and an animation."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

STRIP = "frames.png"
COLUMNS = 3
"""Frames of a picture next to each other. Pages show it larger than it is."""
MOVING = 2
"""Moving frames next to each other."""
GAP = 4
LABEL = 20
FONT = 15
FRAME_MS = 120
"""Milliseconds per frame of the animation."""


class Strip(NamedTuple):
    """Hold true and predicted frames ``(T, S, S)``, uint8."""

    true: np.ndarray
    predicted: np.ndarray


class NamedStrip(NamedTuple):
    """Hold the strip of a method."""

    name: str
    strip: Strip


def strip(true: Tensor, predicted: Tensor) -> bytes:
    """Return frames ``(T, S, S)``, uint8, in two rows as a PNG: true above, predicted below."""
    rows = [torch.cat(list(frames), 1) for frames in (true, predicted)]
    return _save([Image.fromarray(torch.cat(rows).numpy())], "PNG", optimize=True)


def read(path: Path) -> Strip:
    """Read a PNG that :func:`strip` made."""
    pixels = np.asarray(Image.open(path).convert("L"))
    side = pixels.shape[0] // 2
    rows = pixels.reshape(2, side, -1, side).swapaxes(1, 2)
    return Strip(*rows)


def picture(strips: Sequence[NamedStrip]) -> bytes:
    """Return some true frames and each method's, in labeled rows, as a WebP."""
    rows = _rows(strips)
    steps = min(len(row.frames) for row in rows)
    chosen = np.linspace(0, steps - 1, min(COLUMNS, steps)).round().astype(int)
    side = rows[0].frames.shape[-1]
    image = Image.new("L", (len(chosen) * (side + GAP) - GAP, len(rows) * (side + LABEL)), 255)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT)
    for i, row in enumerate(rows):
        y = i * (side + LABEL)
        draw.text((1, y), row.name, fill=60, font=font)
        for j, t in enumerate(chosen):
            image.paste(Image.fromarray(row.frames[t]), (j * (side + GAP), y + LABEL))
    return _save([image.convert("RGB")], "WEBP", quality=75)


def animation(strips: Sequence[NamedStrip]) -> bytes:
    """Return the true and each method's frames in motion, next to each other, as a WebP."""
    rows = _rows(strips)
    side = rows[0].frames.shape[-1]
    across = min(MOVING, len(rows))
    down = math.ceil(len(rows) / across)
    font = ImageFont.load_default(FONT)
    images = []
    for t in range(min(len(row.frames) for row in rows)):
        image = Image.new("L", (across * (side + GAP) - GAP, down * (side + LABEL)), 255)
        draw = ImageDraw.Draw(image)
        for i, row in enumerate(rows):
            x = i % across * (side + GAP)
            y = i // across * (side + LABEL)
            draw.text((x + 1, y), row.name, fill=60, font=font)
            image.paste(Image.fromarray(row.frames[t]), (x, y + LABEL))
        images.append(image.convert("RGB"))
    options = {"save_all": True, "append_images": images[1:], "duration": FRAME_MS, "loop": 0}
    return _save(images, "WEBP", quality=70, **options)


class _Row(NamedTuple):
    name: str
    frames: np.ndarray


def _rows(strips: Sequence[NamedStrip]) -> list[_Row]:
    predicted = [_Row(one.name, one.strip.predicted) for one in strips]
    return [_Row("true", strips[0].strip.true), *predicted]


def _save(images: Sequence[Image.Image], kind: str, **options) -> bytes:
    content = io.BytesIO()
    images[0].save(content, kind, **options)
    return content.getvalue()

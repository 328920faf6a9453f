"""MNIST as tensors."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .fetch import DataError, ensure
from .sets import MNIST

UBYTE = 0x08


class Mnist(NamedTuple):
    """Hold images as rows, uint8 ``(60000, 784)`` and ``(10000, 784)``, and int64 labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(root: Path | None = None) -> Mnist:
    """Return MNIST from the data folder. Files are checked by hash, and fetched if missing.

    Args:
        root: the folder that holds ``mnist/``, by default :func:`~.folders.default_root`.
    """
    folder = ensure(MNIST, root)
    train_images, train_labels, test_images, test_labels = (
        folder / file.name for file in MNIST.files
    )
    return Mnist(
        read_idx(train_images, (60000, 28, 28)).flatten(1),
        read_idx(train_labels, (60000,)).long(),
        read_idx(test_images, (10000, 28, 28)).flatten(1),
        read_idx(test_labels, (10000,)).long(),
    )


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Return a gzipped IDX file as a uint8 tensor of this shape. Any other file raises."""
    try:
        content = bytearray(gzip.decompress(path.read_bytes()))
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file: {error}") from error
    # Two zero bytes, the type, the number of dimensions, then each as a big-endian 32-bit integer.
    magic = bytes([0, 0, UBYTE, len(shape)])
    if content[:4] != magic:
        raise DataError(
            f"{path}: starts with {bytes(content[:4]).hex(' ')}, "
            f"not the IDX magic {magic.hex(' ')}."
        )
    header = 4 + 4 * len(shape)
    found = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4))
    if found != shape:
        raise DataError(f"{path}: says its shape is {found}, expected {shape}.")
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path}: holds {len(content) - header} values, "
            f"its shape {shape} needs {math.prod(shape)}."
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).reshape(shape)

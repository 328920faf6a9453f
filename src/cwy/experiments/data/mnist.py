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
    """Images as rows of pixels, uint8 ``(60000, 784)`` and ``(10000, 784)``; labels 0 to 9, int64."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(root: Path | None = None) -> Mnist:
    """MNIST from the data folder, every file checked by its hash; fetched if it is not there.

    Args:
        root: the folder that holds ``mnist/``; by default ``$CWY_DATA``, or ``cwy`` in the user's cache folder.
    """
    folder = ensure(MNIST, root)
    shapes = (60000, 28, 28), (60000,), (10000, 28, 28), (10000,)
    parts = [
        read_idx(folder / file.name, shape) for file, shape in zip(MNIST.files, shapes, strict=True)
    ]
    return Mnist(*(part.flatten(1) if part.dim() == 3 else part.long() for part in parts))


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The bytes of a gzipped IDX file as a uint8 tensor of this shape; any other file is refused."""
    try:
        content = bytearray(gzip.decompress(path.read_bytes()))
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file: {error}") from error
    # Two zero bytes, the type, the number of dimensions, then each as a big-endian 32-bit integer.
    magic = bytes([0, 0, UBYTE, len(shape)])
    if content[:4] != magic:
        raise DataError(
            f"{path}: starts with {bytes(content[:4]).hex(' ')}, not the IDX magic {magic.hex(' ')}."
        )
    header = 4 + 4 * len(shape)
    found = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4))
    if found != shape:
        raise DataError(f"{path}: says its shape is {found}, expected {shape}.")
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path}: holds {len(content) - header} values, its shape {shape} needs {math.prod(shape)}."
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).reshape(shape)

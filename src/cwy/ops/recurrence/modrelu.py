"""Complex modReLU on a GPU as one kernel each way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .. import _nvrtc

SOURCE = Path(__file__).parent / "kernels" / "modrelu.cu"
_THREADS = 256


def serves(z: Tensor) -> bool:
    """Return whether the kernels take such a tensor: a plain one, in single precision."""
    if z.dtype != torch.complex64 or not z.is_cuda or _nvrtc.why_not() or torch.version.hip:
        return False
    if type(z) is not Tensor or torch.compiler.is_compiling():
        return False
    return z.is_contiguous() and 0 < z.numel() < 2**31


def forward(z: Tensor, bias: Tensor | None) -> Tensor:
    """Return the modReLU of z."""
    out = torch.empty_like(z)
    _launch("forward", z, z, bias, out)
    return out


def backward_(dh: Tensor, h: Tensor, z: Tensor, bias: Tensor | None) -> None:
    """Write the gradient of z in place of that of h."""
    _launch("backward", z, dh, h, z, bias)


def _launch(name: str, like: Tensor, *args: Tensor | None) -> None:
    given = [_as_laid_out(arg) for arg in args]
    _prepared(name, like.numel(), like.get_device())(*given, like.shape[-1], like.numel())


def _as_laid_out(tensor: Tensor | None) -> Tensor | None:
    """Return the same numbers as the kernel reads them."""
    if tensor is None:
        return None
    return tensor.resolve_conj().contiguous()


@functools.lru_cache(maxsize=256)
def _prepared(name: str, size: int, device: int) -> Callable[..., None]:
    with torch.cuda.device(device):
        return _nvrtc.kernel(SOURCE, name, {}).prepare((-(-size // _THREADS), 1), _THREADS)

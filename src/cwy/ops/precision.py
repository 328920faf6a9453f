"""Products and inverses that stay in full precision, whatever autocast and the TF32 flags say.

In eager mode the flags are held off around the products (:func:`full_precision`). ``torch.compile`` and
``torch.export`` drop flags set inside a function, so there :func:`matmul` and :func:`triangular_inverse`
become opaque ``torch.library`` ops that hold the flags off when they run.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Which backend's matmul flag rules the products of a device. Other devices have none.
_OWNER = {"cuda": "cuda", "cpu": "mkldnn", "xpu": "mkldnn"}


class _Flag:
    """One backend's float32 flag, held at "ieee" while anybody, in any thread, is inside."""

    def __init__(self, owner: str) -> None:
        self._backend = getattr(torch.backends, owner).matmul
        self._lock, self._inside, self._saved = threading.Lock(), 0, "none"

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._saved = self._backend.fp32_precision
                if self._saved not in ("none", "ieee"):
                    self._backend.fp32_precision = "ieee"
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0 and self._saved not in ("none", "ieee"):
                    self._backend.fp32_precision = self._saved


_FLAGS = {owner: _Flag(owner) for owner in set(_OWNER.values())}


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Holds off autocast and reduced-precision products on a device type. Eager mode only."""
    casting = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    flag = _FLAGS[_OWNER[device]].off() if device in _OWNER else nullcontext()
    with torch.autocast(device, enabled=False) if casting else nullcontext(), flag:
        yield


def in_full_precision(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Runs ``fn`` under :func:`full_precision` of its first tensor's device; under a compiler, as it is."""

    @functools.wraps(fn)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        with full_precision(device):
            return fn(*args, **kwargs)

    return wrapped


def _opaque() -> bool:
    # Transforms see through ATen ops alone: a custom op under torch.func.jvp has a silent zero tangent.
    return torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for equal batch dimensions; under a compiler, the op ``cwy::matmul``."""
    return _matmul(a, b) if _opaque() else torch.matmul(a, b)


def triangular_inverse(s: Tensor) -> Tensor:
    """Inverse of an upper-triangular matrix; under a compiler, the op ``cwy::triangular_inverse``."""
    return _triangular_inverse(s) if _opaque() else _solve(s)


def _solve(s: Tensor) -> Tensor:
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    return torch.linalg.solve_triangular(s, eye.expand_as(s), upper=True)


@torch.library.custom_op("cwy::matmul", mutates_args=())
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    with full_precision(a.device.type):
        return torch.matmul(a, b)


@_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@torch.library.custom_op("cwy::triangular_inverse", mutates_args=())
def _triangular_inverse(s: Tensor) -> Tensor:
    with full_precision(s.device.type):
        return _solve(s).contiguous()


@_triangular_inverse.register_fake
def _(s: Tensor) -> Tensor:
    return s.new_empty(s.shape)


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _save_output(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)


def _matmul_backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad
    return _matmul(grad, b.mH) if need_a else None, _matmul(a.mH, grad) if need_b else None


def _inverse_backward(ctx, grad: Tensor) -> Tensor:
    (t,) = ctx.saved_tensors
    return -_matmul(t.mH, _matmul(grad, t.mH)).triu()


_matmul.register_autograd(_matmul_backward, setup_context=_save_inputs)
_triangular_inverse.register_autograd(_inverse_backward, setup_context=_save_output)

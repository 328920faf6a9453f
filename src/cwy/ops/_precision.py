"""Products and inverses that stay in full precision, whatever autocast and the TF32 flags say.

In eager mode the flags are held off around the products (:func:`full_precision`). ``torch.compile`` and
``torch.export`` drop flags set inside a function, so there :func:`matmul`
becomes an opaque ``torch.library`` op that holds the flags off when it runs.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch import below_autograd, transform_is_active

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Which backend's matmul flag rules the products of a device. Other devices have none.
_OWNER = {"cuda": "cuda", "cpu": "mkldnn", "xpu": "mkldnn"}


class _Flag:
    """One backend's float32 flag, held at "ieee" while anybody, in any thread, is inside.

    Args:
        backend: the module with the flag.
        full: the values that stand for full precision already.
    """

    def __init__(self, backend: Any, full: tuple[str, ...] = ("none", "ieee")) -> None:
        self._backend, self._full = backend, full
        self._lock, self._inside, self._before = threading.Lock(), 0, "none"

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = self._own()
                if self._before != "full":
                    self._backend.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._before != "full":
                self._backend.fp32_precision = self._before

    def _own(self) -> str:
        """What to put back: "full" if nothing is reduced, "none" if the value is inherited, else the value."""
        value = self._backend.fp32_precision
        if value in self._full:
            return "full"
        # The getter resolves inheritance; written back, an inherited value would outlast the setting it came from.
        self._backend.fp32_precision = "none"
        return "none" if self._backend.fp32_precision == value else value


_FLAGS = {owner: _Flag(getattr(torch.backends, owner).matmul) for owner in set(_OWNER.values())}

#: cuDNN's recurrent networks, where no setting means TF32.
CUDNN_RNN = _Flag(torch.backends.cudnn.rnn, full=("ieee",))


def of_convolutions() -> str:
    """How cuDNN's convolutions of float32 numbers may compute: "tf32", which is torch's default, or else in full."""
    return torch.backends.cudnn.conv.fp32_precision  # pyrefly: ignore


def full_precision(device: str) -> AbstractContextManager[None]:
    """Holds off autocast and reduced-precision products on a device type. Eager mode only."""
    casting = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    flag = _FLAGS[_OWNER[device]] if device in _OWNER else nullcontext()
    return _uncast(device, flag) if casting else flag


@contextmanager
def _uncast(device: str, flag: AbstractContextManager[None]) -> Iterator[None]:
    with torch.autocast(device, enabled=False), flag:
        yield


def in_full_precision(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Runs ``fn`` under :func:`full_precision` of its first tensor's device; under a compiler, as it is."""

    @functools.wraps(fn)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        with full_precision(_device(args)):
            return fn(*args, **kwargs)

    return wrapped


def _device(args: tuple[Any, ...]) -> str:
    """The type of the first tensor's device."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device.type
    raise TypeError("in_full_precision: expected a tensor among the arguments.")


def opaque() -> bool:
    """Whether to use an opaque op: under a compiler, but not under a transform, which sees through ATen ops alone."""
    return torch.compiler.is_compiling() and not transform_is_active()


# torch.library.custom_op would drop forward-mode tangents without a word, so the autograd kernels are ours.
_library = torch.library.Library("cwy", "FRAGMENT")


def define(
    schema: str, compute: Callable, fake: Callable, autograd: Callable | None = None
) -> Callable[..., Any]:
    """Registers ``cwy::name``: a kernel for every device, a fake one for compilers, and its derivatives, if it has any."""
    name = schema.split("(")[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, in_full_precision(compute), "CompositeExplicitAutograd")
    if autograd is not None:
        _library.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"cwy::{name}", fake, lib=_library)
    return getattr(torch.ops.cwy, name)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for equal batch dimensions; under a compiler, the op ``cwy::matmul``."""
    return matmul_op(a, b) if opaque() else torch.matmul(a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for equal batch dimensions in a backward pass.

    A backward pass that autograd records is differentiated outside of :func:`full_precision`. The op holds it there, too.
    """
    recorded = torch.is_grad_enabled() and not transform_is_active()
    return matmul_op(a, b) if recorded else a @ b


class _Matmul(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        with below_autograd():
            return torch.ops.cwy.matmul(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad
        return matmul_op(grad, b.mH) if need_a else None, matmul_op(a.mH, grad) if need_b else None

    @staticmethod
    def jvp(ctx, da, db):
        a, b = ctx.saved_tensors
        return matmul_op(da, b) + matmul_op(a, db)


matmul_op = define(
    "matmul(Tensor a, Tensor b) -> Tensor",
    lambda a, b: torch.matmul(a, b).contiguous(),
    lambda a, b: a.new_empty((*a.shape[:-1], b.shape[-1])),
    lambda a, b: _Matmul.apply(a, b),
)

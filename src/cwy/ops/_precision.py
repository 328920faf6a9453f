"""Full precision for products, whatever autocast and the TF32 flags are set to.

In eager mode :func:`full_precision` holds the flags off around the products. ``torch.compile`` and
``torch.export`` drop flags set inside a function. There the products go through ops of
``_linalg.py``, which hold the flags off when they run.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The torch backend whose matmul flag controls the products of a device. Other devices have no flag.
_OWNER = {"cuda": "cuda", "cpu": "mkldnn", "xpu": "mkldnn"}


class _Flag:
    """Hold one backend's float32 flag at "ieee" while any thread is inside.

    Args:
        backend: the module with the flag.
        full: the values that mean full precision already.
    """

    def __init__(self, backend: Any, full: tuple[str, ...] = ("none", "ieee")) -> None:
        self._backend = backend
        self._full = full
        self._lock = threading.Lock()
        self._inside = 0
        self._before = "none"

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
        """Return the value to restore.

        It is "full" if nothing is reduced, and "none" if the value is inherited.
        """
        value = self._backend.fp32_precision
        if value in self._full:
            return "full"
        # The getter resolves inheritance. An inherited value that is written back would outlast
        # the setting it came from.
        self._backend.fp32_precision = "none"
        if self._backend.fp32_precision == value:
            return "none"
        return value


_FLAGS = {owner: _Flag(getattr(torch.backends, owner).matmul) for owner in set(_OWNER.values())}

#: cuDNN's recurrent networks, which use TF32 unless the flag is set.
CUDNN_RNN = _Flag(torch.backends.cudnn.rnn, full=("ieee",))


def of_convolutions() -> str:
    """Return the float32 precision of cuDNN's convolutions. "tf32" is torch's default."""
    return torch.backends.cudnn.conv.fp32_precision  # pyrefly: ignore


def without_tf32(device: str) -> AbstractContextManager[None]:
    """Hold off reduced precision of float32 products on a device type. Eager mode only."""
    if device in _OWNER:
        return _FLAGS[_OWNER[device]]
    return nullcontext()


def active_autocast(device: str) -> torch.dtype | None:
    """Return the dtype of autocast on a device type, or None where it is off."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def full_precision(device: str) -> AbstractContextManager[None]:
    """Hold off autocast and reduced-precision products on a device type. Eager mode only."""
    flag = without_tf32(device)
    if active_autocast(device) is not None:
        return _without_autocast(device, flag)
    return flag


@contextmanager
def _without_autocast(device: str, flag: AbstractContextManager[None]) -> Iterator[None]:
    with torch.autocast(device, enabled=False), flag:
        yield


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that autocast gives a factor of a product, that of x without autocast."""
    # Autocast leaves float64 as it is.
    if x.dtype != torch.float32:
        return x.dtype
    return active_autocast(x.device.type) or x.dtype


def in_full_precision(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``fn`` under :func:`full_precision` of its first tensor's device.

    Under a compiler ``fn`` runs as it is.
    """

    @functools.wraps(fn)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        with full_precision(_device(args)):
            return fn(*args, **kwargs)

    return wrapped


def _device(args: tuple[Any, ...]) -> str:
    """Return the type of the first tensor's device. A tuple that begins with a tensor has one."""
    for arg in args:
        if isinstance(arg, tuple) and arg:
            arg = arg[0]
        if isinstance(arg, Tensor):
            return arg.device.type
    raise TypeError("in_full_precision: expected a tensor among the arguments.")

"""Choose the implementation that serves an op. This is the only file that knows backends."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .._torch import (
    dispatch_mode_count,
    forward_mode_is_active,
    has_storage,
    transform_is_active,
)


def _never(*what: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """Describe one implementation of an op.

    Attributes:
        name: what ``backend=`` takes.
        module: its functions.
        about: what it is for.
        why_not: the reason why it can't serve a request, or None.
        why_pass: the reason why "auto" passes it over though it can serve, or None.
    """

    name: str
    module: ModuleType
    about: str
    why_not: Callable[..., str | None] = _never
    why_pass: Callable[..., str | None] = _never


_BACKENDS: dict[str, list[Backend]] = {}


def provide(op: str, *backends: Backend) -> None:
    """Register the backends of an op, in the order in which "auto" tries them."""
    _BACKENDS[op] = list(backends)


def backends(op: str | None = None) -> dict[str, list[Backend]]:
    """Return the backends of every op, or of one."""
    if op is None:
        return dict(_BACKENDS)
    return {op: _BACKENDS[op]}


def why_only_aten(*tensors: Tensor | None) -> str | None:
    """Return the reason why an analytic backward pass can't serve here, or None."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "a compiler or exporter is tracing, which takes ATen ops"
    return why_only_autograd(*tensors)


def why_only_autograd(*tensors: Tensor | None) -> str | None:
    """Return the reason why torch itself must differentiate, or None."""
    if transform_is_active():
        return "a torch.func transform is active, which differentiates ATen ops"
    if any(t is not None and unpack_dual(t).tangent is not None for t in tensors):
        return "an argument carries a forward-mode tangent"
    return None


_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Return whether tensors are plain and nothing but autograd sees what is done with them.

    It is the short answer for most calls. Where it is no, the functions above give the reason.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if transform_is_active() or dispatch_mode_count() > 0 or forward_mode_is_active():
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.is_nested or not has_storage(x)):
            return False
    return True


_PLANNED: dict[Hashable, Callable[..., Any]] = {}
_MOST_PLANNED = 4096


def planned(signature: Hashable) -> Callable[..., Any] | None:
    """Return the call that serves a signature, or None if it is not known yet.

    It repeats no check and no choice, which took as long as a launch.
    """
    return _PLANNED.get(signature)


def keep_plan(signature: Hashable, call: Callable[..., Any]) -> None:
    """Keep a call for all further tensors of one signature."""
    if len(_PLANNED) >= _MOST_PLANNED:
        _PLANNED.clear()
    _PLANNED[signature] = call


def forget_plans() -> None:
    """Forget all calls: a backend was loaded again, perhaps with other constants."""
    _PLANNED.clear()


def choose(op: str, backend: str, *what: Any) -> ModuleType:
    """Return the module that serves ``op`` for a request.

    A backend named by the caller serves or raises.
    """
    candidates = _BACKENDS[op]
    if backend == "auto":
        return _first(op, candidates, what)
    for candidate in candidates:
        if candidate.name == backend:
            reason = candidate.why_not(*what)
            if reason is None:
                return candidate.module
            raise ValueError(
                f'cannot use backend "{backend}" for {op}: {reason}. '
                'Leave backend="auto", or see `cwy info`.'
            )
    names = ", ".join(f'"{candidate.name}"' for candidate in candidates)
    raise ValueError(f'{op} has no backend "{backend}": choose "auto" or one of {names}.')


def _first(op: str, candidates: list[Backend], what: tuple[Any, ...]) -> ModuleType:
    """Return the first module that can serve and is not passed over."""
    for candidate in candidates:
        if candidate.why_not(*what) is None and candidate.why_pass(*what) is None:
            return candidate.module
    reasons = "; ".join(
        f"{candidate.name}: {candidate.why_not(*what) or candidate.why_pass(*what)}"
        for candidate in candidates
    )
    raise ValueError(f"no backend of {op} can serve this ({reasons}).")

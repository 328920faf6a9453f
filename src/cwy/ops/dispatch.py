"""Which implementation serves an op: the only file that knows backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .._torch import transform_is_active


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Attributes:
        name: what ``backend=`` takes.
        module: what serves.
        about: what it is for.
        why_not: why it can't serve what is asked, or None if it can.
        why_pass: why "auto" passes it over though it can, or None if it does not.
    """

    name: str
    module: ModuleType
    about: str
    why_not: Callable[..., str | None] = lambda *what: None
    why_pass: Callable[..., str | None] = lambda *what: None


_BACKENDS: dict[str, list[Backend]] = {}


def provide(op: str, *backends: Backend) -> None:
    """Registers the backends of an op, in the order in which "auto" tries them."""
    _BACKENDS[op] = list(backends)


def backends(op: str | None = None) -> dict[str, list[Backend]]:
    """The backends of every op, or of one."""
    return dict(_BACKENDS) if op is None else {op: _BACKENDS[op]}


def why_only_aten(*tensors: Tensor | None) -> str | None:
    """Why a backward written by hand can't serve here, or None if it can."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "a compiler or exporter is tracing, which takes ATen ops"
    return why_only_autograd(*tensors)


def why_only_autograd(*tensors: Tensor | None) -> str | None:
    """Why torch itself must differentiate, or None if a derivative of ours will do."""
    if transform_is_active():
        return "a torch.func transform is active, which differentiates ATen ops"
    if any(t is not None and unpack_dual(t).tangent is not None for t in tensors):
        return "an argument carries a forward-mode tangent"
    return None


def choose(op: str, backend: str, *what: Any) -> ModuleType:
    """The module that serves ``op`` for what is asked; a backend named by the caller serves or raises."""
    candidates = _BACKENDS[op]
    if backend == "auto":
        for candidate in candidates:
            if candidate.why_not(*what) is None and candidate.why_pass(*what) is None:
                return candidate.module
        reasons = "; ".join(
            f"{c.name}: {c.why_not(*what) or c.why_pass(*what)}" for c in candidates
        )
        raise ValueError(f"no backend of {op} can serve this ({reasons}).")
    for candidate in candidates:
        if candidate.name == backend:
            reason = candidate.why_not(*what)
            if reason is None:
                return candidate.module
            raise ValueError(
                f'cannot use backend "{backend}" for {op}: {reason}. Leave backend="auto", or see `cwy info`.'
            )
    names = ", ".join(f'"{c.name}"' for c in candidates)
    raise ValueError(f'{op} has no backend "{backend}": choose "auto" or one of {names}.')

"""Entries: what is timed, and the case that an entry makes of one size, dtype and device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Group = Literal["ours", "peer", "floor"]


class Skipped(Exception):
    """Skip an entry that does not take part. The message has the reason."""


class Foreign(Protocol):
    """Hold the passes of a case in another library, which runs them asynchronously.

    Attributes:
        memory: bytes that forward and backward take beyond the inputs.
        repetitions: how often :meth:`repeated` runs both passes. 0 if it cannot.
    """

    memory: int
    repetitions: int

    def receive(self, cotangent: Tensor) -> None:
        """Take the gradient of the result, before the first backward pass."""
        ...

    def forward(self) -> Any:
        """Begin a forward pass."""
        ...

    def both(self) -> Any:
        """Begin a forward and a backward pass."""
        ...

    def repeated(self) -> Any:
        """Begin several of both as one program, one after the other."""
        ...

    def wait(self, result: Any) -> Any:
        """Wait until a result is ready, and return it."""
        ...

    def tensors(self, result: Any) -> tuple[Tensor, ...]:
        """Return a result as tensors."""
        ...


@dataclass(frozen=True)
class Case:
    """Hold one computation, ready to run.

    Attributes:
        call: ``call(*inputs)`` is what is on the clock.
        inputs: tensors of the dtype under test, to be differentiated.
        truth: the same function, for inputs in float64 or complex128.
        orthogonality: how far a result is from what orthogonality promises, None if it promises
            nothing.
        foreign: the passes that are timed instead of ``call``, if they run outside of torch.
    """

    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    truth: Callable[..., Tensor]
    orthogonality: Callable[[Tensor], float] | None
    foreign: Foreign | None = None


@dataclass(frozen=True)
class Entry:
    """Describe an implementation at one size.

    Attributes:
        name: as rows and tables show it.
        about: exactly what is timed.
        make: ``make(dtype, device)`` builds the case, off the clock, from torch's random state.
        group: "ours", "peer", or "floor" (a plain product, for scale).
        method: of the registry, if the entry is one of ours.
        package: the package it needs, by the name it is imported by.
        differentiable: whether it is used with a backward pass. If not, only the forward pass is
            checked and timed.
        nonlinearity: that it belongs to, where a benchmark has several.
        gate: the dtype whose tolerance the result is judged by, where it is not the result's own.
        within: a context, such as a precision, in which forward and backward run.
        why_not: ``why_not(dtype, device)`` returns why it cannot take part, None if it can.
    """

    name: str
    about: str
    make: Callable[[torch.dtype, torch.device], Case]
    group: Group = "peer"
    method: str = ""
    package: str = "torch"
    differentiable: bool = True
    nonlinearity: str = ""
    gate: torch.dtype | None = None
    within: Callable[[], AbstractContextManager] = nullcontext
    why_not: Callable[[torch.dtype, torch.device], str | None] = lambda dtype, device: None


def gaussian(*shape: int, std: float = 1.0, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw independent normal entries."""
    return torch.randn(*shape, dtype=dtype, device=device) * std

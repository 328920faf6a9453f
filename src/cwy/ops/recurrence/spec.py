"""What is asked of a rollout: its choices, the question to a backend, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .nonlinearities import NONLINEARITIES

MEMORY = ("store", "checkpoint", "reversible")
"""What is kept for the backward pass: every state, some of them, or sign bits."""
OUTPUT = ("all", "last")
"""Which states are returned."""

Activation = str | Callable[[Tensor], Tensor]
"""The name of a nonlinearity, or a function."""


class Request(NamedTuple):
    """Hold what a backend must know to decide whether it can serve a rollout.

    Attributes:
        n: units of a state.
        batch: sequences.
        steps: steps of the longest sequence.
        dtype: of all computation.
        device: its type, for example "cuda".
        nonlinearity: its name, "callable" for a function.
        reflections: L of a transition in low-rank form, None if Q is formed.
        memory: one of :data:`MEMORY`.
        equal_lengths: whether all sequences have as many steps.
        transformed: why torch itself must differentiate, or None.
        compiling: whether a compiler or exporter is tracing.
        index: number of the device, None for the current one.
    """

    n: int
    batch: int
    steps: int
    dtype: torch.dtype
    device: str
    nonlinearity: str
    reflections: int | None = None
    memory: str = "store"
    equal_lengths: bool = True
    transformed: str | None = None
    compiling: bool = False
    index: int | None = None


class StepSizes(NamedTuple):
    """Hold how many rows each step has.

    Attributes:
        sizes: rows of each step. If ``steps`` is given, rows of one step.
        steps: number of equal steps, or None.
    """

    sizes: list[int]
    steps: int | None


@dataclass(frozen=True)
class RolloutSpec:
    """Describe how a recurrence runs, apart from its tensors.

    Attributes:
        nonlinearity: its name, or a function.
        sizes: rows of each step. If ``steps`` is given, rows of one step.
        steps: number of equal steps, or None.
        memory: one of :data:`MEMORY`, or "nothing" if there is no backward pass.
        last: whether only the last states are wanted.
        rounded: the dtype of the states that are returned, None if it is that of the computation.
    """

    nonlinearity: Activation
    sizes: list[int]
    steps: int | None = None
    memory: str = "store"
    last: bool = False
    rounded: torch.dtype | None = None

    @property
    def every_size(self) -> list[int]:
        """Return the rows of every step."""
        if self.steps is None:
            return self.sizes
        return self.sizes * self.steps

    @property
    def step_count(self) -> int:
        """Return the number of steps."""
        if self.steps is None:
            return len(self.sizes)
        return self.steps

    @property
    def row_count(self) -> int:
        """Return the rows of all steps."""
        if self.steps is None:
            return sum(self.sizes)
        return self.sizes[0] * self.steps

    def without_backward(self) -> RolloutSpec:
        """Return the same for a call that is not differentiated."""
        return replace(self, memory="nothing")


def equal_steps(x: Tensor) -> StepSizes:
    """Return the sizes of the steps of ``x (T, B, ...)``.

    A list of T numbers would be a new program for each T. A compiler gets T as one number.
    """
    if torch.compiler.is_compiling():
        return StepSizes([x.shape[1]], x.shape[0])
    return StepSizes([x.shape[1]] * x.shape[0], None)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which states of a dtype are computed.

    Half precision would lose the norm of the states within hundreds of steps.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


def rounded_to(wanted: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which results are rounded, None if they are computed in it."""
    if computed_in(wanted) == wanted:
        return None
    return wanted


def name_of(nonlinearity: Activation) -> str:
    """Return the name of a nonlinearity, "callable" for a function."""
    if isinstance(nonlinearity, str):
        return nonlinearity
    return "callable"


def exports_as_scan(backend: str) -> bool:
    """Return whether an exporter is tracing the definition, which is then torch's ``scan``."""
    return backend == "reference" and torch.compiler.is_exporting()


def check_choices(call: str, nonlinearity: Activation, output: str, memory: str) -> None:
    """Raise unless the three exist and fit together."""
    if not callable(nonlinearity) and nonlinearity not in NONLINEARITIES:
        known = ", ".join(NONLINEARITIES)
        raise ValueError(
            f"{call}: unknown nonlinearity {nonlinearity!r}. Known: {known}, or a function."
        )
    if output not in OUTPUT:
        raise ValueError(f"{call}: output must be 'all' or 'last', got {output!r}.")
    if memory not in MEMORY:
        known = ", ".join(map(repr, MEMORY))
        raise ValueError(f"{call}: memory must be one of {known}, got {memory!r}.")
    if memory != "store" and callable(nonlinearity):
        raise ValueError(
            f"{call}: a callable nonlinearity supports only memory='store', "
            f"because autograd must keep every state, got memory={memory!r}."
        )
    if memory == "reversible":
        reason = NONLINEARITIES[str(nonlinearity)].irreversible
        if reason is not None:
            raise ValueError(
                f"{call}: memory='reversible' is not for this nonlinearity: {reason}. "
                "Use memory='checkpoint'."
            )

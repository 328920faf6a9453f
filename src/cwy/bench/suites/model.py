"""The benchmark ``model``: training steps of layers and of recurrences, as users write them.

A step of a stack is the forward pass, the backward pass and a step of AdamW. The learning rate is
0, so that each step computes the same, and its loss can be compared with float64. For one layer,
and for a recurrence, it is the forward and the backward pass.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ... import many
from ..._torch import allow_compilations
from ...api import orthogonal
from ...nn import OrthogonalRNN
from ...ops._linalg import double
from ..harness.entry import Case, Entry, Group, gaussian
from . import Size, Suite

COMPILED = 128
"""The least N whose programs are compiled. For smaller ones compilation is all that takes time."""
PROGRAMS = 256
"""The most compiled stacks of one process."""
WARM_UP = 3
"""Calls before any is timed: compilers record and capture in them."""


@dataclass(frozen=True)
class Stack:
    """Describe a stack of layers.

    Attributes:
        units: N.
        reflections: L, or None for all.
        depth: the number of layers.
        batch: the number of rows of the input.
    """

    units: int
    reflections: int | None
    depth: int
    batch: int

    @property
    def model(self) -> nn.Module:
        """Return a new stack with free weights."""
        layers = []
        for _ in range(self.depth):
            layers += [nn.Linear(self.units, self.units), nn.GELU()]
        return nn.Sequential(*layers)

    def input(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw the input."""
        return gaussian(self.batch, self.units, dtype=dtype, device=device)

    @property
    def optimizes(self) -> bool:
        """Return whether a step of the optimizer is timed."""
        return self.depth > 1

    @property
    def about(self) -> str:
        """Describe what is timed, before the kind of weight."""
        if self.optimizes:
            return "a training step with"
        return "the forward and the backward pass with"


@dataclass(frozen=True)
class Recurrence:
    """Describe a recurrent layer with ReLU.

    Attributes:
        units: N.
        reflections: L.
        features: the size of an input.
        batch: the number of sequences.
        steps: T.
    """

    units: int
    reflections: int
    features: int
    batch: int
    steps: int

    def input(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw the input."""
        return gaussian(self.steps, self.batch, self.features, dtype=dtype, device=device)

    @property
    def optimizes(self) -> bool:
        """Return whether a step of the optimizer is timed."""
        return False

    @property
    def about(self) -> str:
        """Describe what is timed, before the kind of layer."""
        return "the forward and the backward pass of"


class _States(nn.Module):
    """Return the states of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@dataclass(frozen=True)
class Mode:
    """Describe how a step runs.

    Attributes:
        name: as entries show it.
        about: exactly what is done.
        compile: the mode of ``torch.compile``, or None for eager mode.
        autocast: the dtype of autocast, or None.
    """

    name: str
    about: str
    compile: str | None = None
    autocast: torch.dtype | None = None


MODES = (
    Mode("eager", "eager mode"),
    Mode("compiled", "torch.compile(model)", compile="default"),
    Mode(
        "reduce-overhead",
        "torch.compile(model, mode='reduce-overhead')",
        compile="reduce-overhead",
    ),
    Mode("autocast", "eager mode under autocast to bfloat16", autocast=torch.bfloat16),
)


Make = Callable[[Any, torch.dtype, torch.device], nn.Module]
"""A function that returns a new model of a :class:`Stack` or a :class:`Recurrence`."""


def _stacked(constrain: Callable[[nn.Module, Stack], None]) -> Make:
    """Return what makes a stack and constrains its layers in place."""

    def make(stack: Stack, dtype: torch.dtype, device: torch.device) -> nn.Module:
        model = stack.model.to(device=device, dtype=dtype)
        constrain(model, stack)
        return model

    return make


def _free(model: nn.Module, stack: Stack) -> None:
    """Leave the weights free."""


def _single(model: nn.Module, stack: Stack) -> None:
    for layer in _linear(model):
        orthogonal(layer, reflections=stack.reflections)


def _together(model: nn.Module, stack: Stack) -> None:
    many.constrain(model, nn.Linear, reflections=stack.reflections)


def _torchs(orthogonal_map: str) -> Callable[[nn.Module, Stack], None]:
    def constrain(model: nn.Module, stack: Stack) -> None:
        for layer in _linear(model):
            parametrizations.orthogonal(layer, orthogonal_map=orthogonal_map)

    return constrain


def _geotorch(model: nn.Module, stack: Stack) -> None:
    import geotorch  # pyrefly: ignore[missing-import]

    for layer in _linear(model):
        geotorch.orthogonal(layer, "weight")


def _linear(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in model if isinstance(layer, nn.Linear)]  # pyrefly: ignore


def _recurrent(layer: Callable[[Recurrence], nn.Module]) -> Make:
    """Return what makes a recurrent layer that returns its states."""

    def make(given: Recurrence, dtype: torch.dtype, device: torch.device) -> nn.Module:
        return _States(layer(given)).to(device=device, dtype=dtype)

    return make


def _free_recurrence(given: Recurrence) -> nn.Module:
    return nn.RNN(given.features, given.units, nonlinearity="relu")


def _our_recurrence(given: Recurrence) -> nn.Module:
    return OrthogonalRNN(
        given.features, given.units, nonlinearity="relu", reflections=given.reflections
    )


@dataclass(frozen=True)
class Kind:
    """Describe a kind of weight or of recurrent layer.

    Attributes:
        name: as entries show it.
        about: exactly what constrains the weights, or what the layer is.
        make: makes a model.
        group, package: as of an entry.
        any_reflections: whether it takes fewer reflections than units.
    """

    name: str
    about: str
    make: Make
    group: Group = "peer"
    package: str = "torch"
    any_reflections: bool = False


KINDS = (
    Kind("free", "free weights", _stacked(_free), group="floor", any_reflections=True),
    Kind(
        "cwy",
        "cwy.orthogonal on each layer",
        _stacked(_single),
        group="ours",
        package="cwy",
        any_reflections=True,
    ),
    Kind(
        "cwy together",
        "cwy.constrain",
        _stacked(_together),
        group="ours",
        package="cwy",
        any_reflections=True,
    ),
    Kind(
        "torch cayley",
        "torch's orthogonal, orthogonal_map='cayley'",
        _stacked(_torchs("cayley")),
    ),
    Kind("torch matrix_exp", "torch's orthogonal, 'matrix_exp'", _stacked(_torchs("matrix_exp"))),
    Kind("geotorch", "geotorch.orthogonal", _stacked(_geotorch), package="geotorch"),
)
RECURRENT_KINDS = (
    Kind("free", "torch.nn.RNN with ReLU", _recurrent(_free_recurrence), group="floor"),
    Kind(
        "cwy", "OrthogonalRNN with ReLU", _recurrent(_our_recurrence), group="ours", package="cwy"
    ),
)


def baseline(size: Size, device: str) -> str:
    """Name the entry that the others are compared with."""
    if len(size) == 5:
        return "cwy"
    return "cwy together"


def entries(size: Size) -> list[Entry]:
    """List every kind of weight in every mode."""
    if len(size) == 5:
        given = Recurrence(*size)
        return [_entry(given, kind, mode) for kind in RECURRENT_KINDS for mode in MODES]
    stack = _stack(size)
    found = []
    for kind in KINDS:
        if stack.reflections is not None and not kind.any_reflections:
            continue
        found += [_entry(stack, kind, mode) for mode in MODES]
    return found


def _stack(size: Size) -> Stack:
    if len(size) == 3:
        units, depth, batch = size
        return Stack(units, None, depth, batch)
    units, reflections, depth, batch = size
    return Stack(units, reflections, depth, batch)


def _entry(given: Stack | Recurrence, kind: Kind, mode: Mode) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        model = kind.make(given, dtype, device)
        return _case(given, model, mode, dtype, device)

    return Entry(
        _name(kind.name, mode),
        f"{given.about} {kind.about}: {mode.about}",
        make,
        group=kind.group,
        package=kind.package,
        differentiable=False,
        gate=mode.autocast,
        why_not=functools.partial(_why_not, given, mode),
    )


def _name(kind: str, mode: Mode) -> str:
    if mode.name == "eager":
        return kind
    return f"{kind} ({mode.name})"


def _why_not(
    given: Stack | Recurrence, mode: Mode, dtype: torch.dtype, device: torch.device
) -> str | None:
    if mode.compile is not None and given.units < COMPILED:
        return f"models below N = {COMPILED} are not compiled"
    if mode.name == "reduce-overhead" and device.type != "cuda":
        return "it is for GPUs"
    return None


def _case(
    given: Stack | Recurrence,
    model: nn.Module,
    mode: Mode,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    exact = copy.deepcopy(model).double()
    x = given.input(dtype, device)
    step = _Step(model, mode, device, optimizes=given.optimizes)
    for _ in range(WARM_UP):
        step(x)

    def truth(x: Tensor) -> Tensor:
        result = exact(double(x))
        if given.optimizes:
            return result.square().mean()
        return result

    return Case(step, (x,), truth, None)


class _Step:
    """Take a training step, and return its loss, or the output if there is no optimizer."""

    def __init__(
        self, model: nn.Module, mode: Mode, device: torch.device, *, optimizes: bool
    ) -> None:
        self._run: Callable[[Tensor], Tensor] = model
        if mode.compile is not None:
            allow_compilations(PROGRAMS)
            self._run = torch.compile(model, fullgraph=True, mode=mode.compile)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        self._optimizes = optimizes
        self._gradient: Tensor | None = None
        self._mode = mode
        self._device = device

    def _within(self) -> AbstractContextManager:
        if self._mode.autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._mode.autocast)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            with self._within():
                result = self._run(x.detach())
                if self._optimizes:
                    result = result.square().mean()
            self._differentiate(result)
        # A captured program overwrites its outputs in the next step.
        return result.detach().clone()

    def _differentiate(self, result: Tensor) -> None:
        if not self._optimizes:
            if self._gradient is None:
                self._gradient = torch.ones_like(result)
            result.backward(self._gradient)
        else:
            result.backward()
            self._optimizer.step()
        self._optimizer.zero_grad()


SUITE = Suite(entries, baseline)

"""The benchmark ``adapters``: a step of a frozen stack of layers with adapters, as PEFT runs them.

A step is the forward pass and the backward pass, without the optimizer. A layer is
``x + gelu(linear(x))``. On a GPU the base is in bfloat16, the adapter in float32, and the step runs
under autocast. On a CPU all is in the dtype of the benchmark.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ...api import orthogonality_error
from ..harness.entry import Case, Entry, Group, gaussian
from . import Size, Suite

ROWS = 64
"""The rows of the result that are compared with float64."""
AWAY = 0.02
"""The standard deviation of the noise that moves adapters away from their start."""
BLOCK = 32
"""The block size of OFT and BOFT."""
INSTALL = 'pip install "cwy[peft]"'


@dataclass(frozen=True)
class Stack:
    """Describe a stack of adapted layers.

    Attributes:
        units: N.
        rank: r.
        depth: the number of layers.
        tokens: the number of rows of the input.
    """

    units: int
    rank: int
    depth: int
    tokens: int


class _Layer(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.linear = nn.Linear(units, units, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(x))


def _frozen(model: nn.Module, stack: Stack) -> nn.Module:
    return model.requires_grad_(False)


def _lora(model: nn.Module, stack: Stack) -> nn.Module:
    from peft import LoraConfig

    return _adapted(model, LoraConfig(r=stack.rank, lora_alpha=stack.rank, **_TARGETS))


def _oft(model: nn.Module, stack: Stack) -> nn.Module:
    from peft import OFTConfig

    # r = 0 says that the block size is given.
    return _adapted(model, OFTConfig(r=0, oft_block_size=min(BLOCK, stack.units), **_TARGETS))


def _boft(model: nn.Module, stack: Stack) -> nn.Module:
    from peft import BOFTConfig

    block = min(BLOCK, stack.units)
    return _adapted(model, BOFTConfig(boft_block_size=block, boft_n_butterfly_factor=1, **_TARGETS))


def _hra(model: nn.Module, stack: Stack) -> nn.Module:
    from peft import HRAConfig

    return _adapted(model, HRAConfig(r=stack.rank, **_TARGETS))


def _installed(model: nn.Module, stack: Stack) -> nn.Module:
    from ...peft import install

    with install():
        return _hra(model, stack)


def _householder(model: nn.Module, stack: Stack) -> nn.Module:
    from ...peft import HouseholderConfig

    return _adapted(model, HouseholderConfig(r=stack.rank, **_TARGETS))


def _two_sided(model: nn.Module, stack: Stack) -> nn.Module:
    from ...peft import HouseholderConfig

    rank = _half(stack.rank)
    return _adapted(model, HouseholderConfig(r=rank, sides="both", **_TARGETS))


def _half(rank: int) -> int:
    """Return the even number next to half of a rank."""
    return max(2, rank // 2 // 2 * 2)


_TARGETS: dict[str, Any] = {"target_modules": ["linear"]}


def _adapted(model: nn.Module, config: Any) -> nn.Module:
    from peft import get_peft_model

    return get_peft_model(model, config)


def _matrix(layer: Any) -> Tensor | None:
    """Return the orthogonal matrix of an adapter, or None if it has none."""
    from ...ops import cwy_matrix

    if hasattr(layer, "householder_in"):
        return cwy_matrix(layer.householder_in["default"].detach())
    if hasattr(layer, "hra_u"):
        return layer.get_delta_weight("default").detach()
    if hasattr(layer, "oft_R"):
        return layer.get_delta_weight("default").detach()
    if hasattr(layer, "boft_R"):
        return layer.get_delta_weight("default")[0].detach()
    return None


@dataclass(frozen=True)
class Kind:
    """Describe a kind of adapter.

    Attributes:
        name: as entries show it.
        about: exactly what adapts the layers.
        adapt: returns the adapted model.
        group, package: as of an entry.
    """

    name: str
    about: str
    adapt: Callable[[nn.Module, Stack], nn.Module]
    group: Group = "peer"
    package: str = "peft"


KINDS = (
    Kind("frozen", "no adapter", _frozen, group="floor", package="torch"),
    Kind("cwy, one side", "HouseholderConfig(r=r)", _householder, "ours", "cwy"),
    Kind("cwy, both sides", "HouseholderConfig(r=r/2, sides='both')", _two_sided, "ours", "cwy"),
    Kind("cwy, HRA", "HRAConfig(r=r) after cwy.peft.install()", _installed, "ours", "cwy"),
    Kind("LoRA", "LoraConfig(r=r)", _lora),
    Kind("OFT", f"OFTConfig(oft_block_size={BLOCK})", _oft),
    Kind("BOFT", f"BOFTConfig(boft_block_size={BLOCK})", _boft),
    Kind("HRA", "HRAConfig(r=r)", _hra),
)


def baseline(size: Size, device: str) -> str:
    """Name the entry that the others are compared with."""
    return "cwy, one side"


def entries(size: Size) -> list[Entry]:
    """List every kind of adapter."""
    units, rank, depth, tokens = size
    stack = Stack(units, rank, depth, tokens)
    return [_entry(stack, kind) for kind in KINDS]


def _entry(stack: Stack, kind: Kind) -> Entry:
    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        if kind.group != "floor" and not find_spec("peft"):
            return f"peft is not installed: {INSTALL}"
        if kind.group == "ours" and stack.rank % 2:
            return "its vectors come in pairs, so r must be even"
        return None

    return Entry(
        kind.name,
        f"a step without the optimizer: {kind.about}",
        functools.partial(_case, stack, kind),
        group=kind.group,
        package=kind.package,
        differentiable=False,
        gate=torch.bfloat16,
        why_not=why_not,
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Hold back what PEFT and the packages that it looks for print."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _case(stack: Stack, kind: Kind, dtype: torch.dtype, device: torch.device) -> Case:
    if device.type == "cuda" and dtype == torch.float32:
        dtype = torch.bfloat16
    layers = [_Layer(stack.units) for _ in range(stack.depth)]
    plain = nn.Sequential(*layers).to(device=device, dtype=dtype)
    with _quietly():
        model = kind.adapt(plain, stack)
        exact = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter += AWAY * torch.randn_like(parameter)
    exact.load_state_dict(model.state_dict())
    exact.double()
    x = gaussian(stack.tokens, stack.units, dtype=dtype, device=device)

    def truth(x: Tensor) -> Tensor:
        with _quietly():
            return exact(x[:ROWS])

    q = _matrix(layers[0].linear)
    orthogonality = None
    if q is not None:
        error = orthogonality_error(q)
        orthogonality = lambda out: error
    step = _Step(model, trained, dtype)
    with _quietly():
        step(x)
    return Case(step, (x,), truth, orthogonality)


class _Step:
    """Take a forward and a backward pass, and return the first rows of the result."""

    def __init__(self, model: nn.Module, trained: list[nn.Parameter], dtype: torch.dtype) -> None:
        self._model = model
        self._trained = trained
        self._dtype = dtype

    def _within(self, x: Tensor) -> AbstractContextManager:
        if x.device.type == "cuda" and self._dtype in (torch.float16, torch.bfloat16):
            return torch.autocast("cuda", self._dtype)
        return nullcontext()

    def __call__(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            with self._within(x):
                y = self._model(x)
            y.backward(torch.ones_like(y))
        for parameter in self._trained:
            parameter.grad = None
        return y.detach()[:ROWS].clone()


SUITE = Suite(entries, baseline)

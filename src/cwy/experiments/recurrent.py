"""The network of the sequence tasks: an input map, a recurrence by any method, a linear read-out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..nn import OrthogonalRNN
from ..ops.recurrence.nonlinearities import NONLINEARITIES
from ..parametrizations import METHODS, move_bases
from .engine.config import Config, ConfigError
from .engine.task import Settings, Task

BASELINES: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@dataclass(frozen=True)
class RecurrentConfig(Config):
    """Settings of a recurrent network.

    Attributes:
        hidden_size: N.
        reflections: L of the methods by reflections; None is N.
        init: initial transition, as in :func:`cwy.orthogonal`; None for the baselines, which start as torch starts them.
        nonlinearity: of :class:`cwy.nn.OrthogonalRNN`; gru and lstm have their own.
        base_every: K of "dtriv", the steps after which its base moves; None is ∞.
    """

    hidden_size: int = field(default=190, metadata={"most": 10**6})
    reflections: int | None = None
    init: str | None = None
    nonlinearity: str = field(default="modrelu", metadata={"choices": tuple(NONLINEARITIES)})
    base_every: int | None = None


def start(method: str, init: str, nonlinearity: str = "modrelu") -> dict[str, Any]:
    """How a method starts in a recipe: the baselines as torch starts them, the unitary methods at random with modReLU."""
    if method in BASELINES:
        return {"init": None, "nonlinearity": "tanh"}
    if not METHODS[method].real:
        return {"init": "random", "nonlinearity": "modrelu"}
    return {"init": init, "nonlinearity": nonlinearity}


def raw_length(method: str) -> str | None:
    """Return the option ``length`` by which the vectors of a method start as in the paper and in the committed records."""
    takes_length = "length" in signature(METHODS[method].build).parameters
    return "raw" if takes_length else None


class Recurrent(nn.Module):
    r"""$h_t = f(Q h_{t-1} + W x_t)$, $y_t = R h_t + c$.

    W is Kaiming normal and has no bias; that of modReLU is uniform in ±0.01. A complex state is read out as its real and
    imaginary parts.

    Args:
        method, config, dtype: of the recurrence.
        inputs, outputs: features of x and y.
        last: whether y is wanted after the last step alone.
        symbols: whether x holds numbers of symbols, each of which stands for a unit vector.

    Returns:
        From ``x (T, B)`` of symbols or ``(T, B, inputs)``: ``y (T, B, outputs)``, or ``(B, outputs)`` for the last.
    """

    def __init__(
        self,
        method: str,
        config: RecurrentConfig,
        inputs: int,
        outputs: int,
        *,
        last: bool,
        symbols: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.last = last
        if method in BASELINES:
            self.core = _baseline(method, config, inputs, dtype)
            features = config.hidden_size
        else:
            self.core = OrthogonalRNN(
                inputs, config.hidden_size, nonlinearity=config.nonlinearity, dtype=dtype, method=method,
                reflections=config.reflections, init=config.init, output="last" if last else "all",
                length=raw_length(method),
            )  # fmt: skip
            weight = cast(Tensor, self.core.weight_ih_l0)
            nn.init.kaiming_normal_(weight, nonlinearity="relu")
            features = config.hidden_size * (2 if weight.is_complex() else 1)
        self.readout = nn.Linear(features, outputs, dtype=dtype)
        self.register_buffer(
            "units", torch.eye(inputs, dtype=dtype) if symbols else None, persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        # Rows of the identity, so that the input map is a product: the gradient of a lookup, where one symbol is nearly
        # all of the input, is a sum of one thread on a GPU.
        states, _ = self.core(x if self.units is None else cast(Tensor, self.units)[x])
        if self.last and isinstance(self.core, nn.RNNBase):
            states = states[-1]
        return self.readout(
            torch.view_as_real(states).flatten(-2) if states.is_complex() else states
        )


def _baseline(method: str, config: RecurrentConfig, inputs: int, dtype: torch.dtype) -> nn.RNNBase:
    check_baseline(method, config)
    if method != "rnn":
        return BASELINES[method](inputs, config.hidden_size, dtype=dtype)
    return nn.RNN(inputs, config.hidden_size, nonlinearity=config.nonlinearity, dtype=dtype)


def check_baseline(method: str, config: RecurrentConfig) -> None:
    """Raises where a setting is not for this network of torch."""
    for name in ("reflections", "init", "base_every"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name} is a setting of orthogonal methods, and {method} is none. Leave it out."
            )
    if method == "rnn" and config.nonlinearity not in ("tanh", "relu"):
        raise ConfigError(
            f"nonlinearity must be 'tanh' or 'relu' for rnn, got {config.nonlinearity!r}."
        )


class RecurrentTask(Task[RecurrentConfig]):
    """A task for :class:`Recurrent`: any square method, or a baseline."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        if self.config.base_every is not None and settings.method != "dtriv":
            raise ConfigError(
                f"base_every is a setting of dtriv, and the method is {settings.method}. Leave it out."
            )

    @classmethod
    def methods(cls) -> list[str]:
        return [*(name for name, method in METHODS.items() if method.kind != "tall"), *BASELINES]

    @property
    def unused(self) -> set[str]:
        method, unused = self.settings.method, super().unused
        if method in BASELINES:
            return unused | {
                "reflections",
                "init",
                "base_every",
                *(["nonlinearity"] if method != "rnn" else []),
            }
        if "reflections" not in signature(METHODS[method].build).parameters:
            unused.add("reflections")
        return unused if method == "dtriv" else unused | {"base_every"}

    @property
    def capturable(self) -> bool:
        return super().capturable and self.config.base_every is None

    def network(self, inputs: int, outputs: int, *, last: bool, symbols: bool = False) -> Recurrent:
        """The network of this run. It is drawn on the CPU, so that its start does not depend on the device."""
        network = Recurrent(
            self.settings.method, self.config, inputs, outputs, last=last, symbols=symbols, dtype=self.dtype
        )  # fmt: skip
        return network.to(self.device)

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self.config.base_every is not None and step % self.config.base_every == 0:
            for moved in move_bases(model):
                # What the optimiser remembers was measured from the old base.
                optimizer.state.pop(moved, None)

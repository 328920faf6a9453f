"""The network of the sequence tasks: an input map, a recurrence, a linear readout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import init as inits
from ..nn import OrthogonalRNN
from ..ops.recurrence.nonlinearities import NONLINEARITIES
from ..parametrizations import METHODS, move_bases
from .engine.config import Config, ConfigError, choose
from .engine.task import Settings, Task

BASELINES: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@dataclass(frozen=True)
class RecurrentConfig(Config):
    """Hold the settings of a recurrent network.

    Attributes:
        hidden_size: N.
        reflections: L of the methods by reflections. None is N.
        init: initial transition, as in :func:`cwy.orthogonal`. None is torch's start, for the
            baselines. "rnn" also takes a name of a matrix, such as "haar".
        nonlinearity: of :class:`cwy.nn.OrthogonalRNN`. gru and lstm have their own.
        base_every: K of "dtriv", the steps after which its base moves. None is ∞.
    """

    hidden_size: int = field(default=190, metadata={"most": 10**6})
    reflections: int | None = None
    init: str | None = None
    nonlinearity: str = field(default="modrelu", metadata={"choices": tuple(NONLINEARITIES)})
    base_every: int | None = None


def start(method: str, init: str, nonlinearity: str = "modrelu") -> dict[str, Any]:
    """Return the settings ``init`` and ``nonlinearity`` of a method in a recipe.

    Baselines start as torch starts them. Unitary methods start at random, with modReLU.
    """
    if method in BASELINES:
        return {"init": None, "nonlinearity": "tanh"}
    if not METHODS[method].real:
        return {"init": "random", "nonlinearity": "modrelu"}
    return {"init": init, "nonlinearity": nonlinearity}


def raw_length(method: str) -> str | None:
    """Return the option ``length`` with which a method starts as in the paper and the records."""
    if "length" not in signature(METHODS[method].build).parameters:
        return None
    return "raw"


class Recurrent(nn.Module):
    r"""Compute $h_t = f(Q h_{t-1} + W x_t)$ and $y_t = R h_t + c$.

    W is Kaiming normal and has no bias. The bias of modReLU is uniform in ±0.01.
    The readout sees the real and imaginary parts of a complex state.

    Args:
        method, config, dtype: of the recurrence.
        inputs, outputs: features of x and y.
        last: whether to return y only after the last step.
        symbols: whether x holds indices of symbols, which become unit vectors.

    Returns:
        ``y (T, B, outputs)`` of ``x (T, B)``, symbols, or ``x (T, B, inputs)``. ``(B, outputs)`` if
        only the last is wanted.
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
        features = config.hidden_size
        if method in BASELINES:
            self.core = _baseline(method, config, inputs, dtype)
        else:
            self.core = _orthogonal(method, config, inputs, last, dtype)
            if cast(Tensor, self.core.weight_ih_l0).is_complex():
                features = 2 * config.hidden_size
        self.readout = nn.Linear(features, outputs, dtype=dtype)
        units = None
        if symbols:
            units = torch.eye(inputs, dtype=dtype)
        self.register_buffer("units", units, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.units is not None:
            # Rows of the identity make the input map a matrix product. The gradient of a lookup
            # is slow on a GPU: one thread sums over the most frequent symbol.
            x = cast(Tensor, self.units)[x]
        states, _ = self.core(x)
        if self.last and isinstance(self.core, nn.RNNBase):
            states = states[-1]
        if states.is_complex():
            states = torch.view_as_real(states).flatten(-2)
        return self.readout(states)


def _orthogonal(
    method: str, config: RecurrentConfig, inputs: int, last: bool, dtype: torch.dtype
) -> OrthogonalRNN:
    output = "all"
    if last:
        output = "last"
    core = OrthogonalRNN(
        inputs,
        config.hidden_size,
        nonlinearity=config.nonlinearity,
        dtype=dtype,
        method=method,
        reflections=config.reflections,
        init=config.init,
        output=output,
        length=raw_length(method),
    )
    nn.init.kaiming_normal_(cast(Tensor, core.weight_ih_l0), nonlinearity="relu")
    return core


def _baseline(method: str, config: RecurrentConfig, inputs: int, dtype: torch.dtype) -> nn.RNNBase:
    check_baseline(method, config)
    if method != "rnn":
        return BASELINES[method](inputs, config.hidden_size, dtype=dtype)
    core = nn.RNN(inputs, config.hidden_size, nonlinearity=config.nonlinearity, dtype=dtype)
    start_free(cast(Tensor, core.weight_hh_l0), config)
    return core


@torch.no_grad()
def start_free(weight: Tensor, config: RecurrentConfig) -> None:
    """Give the free transition of "rnn" the start that the setting ``init`` names, if any."""
    if config.init is not None:
        weight.copy_(inits.MATRICES[config.init](config.hidden_size, dtype=weight.dtype))


def check_baseline(method: str, config: RecurrentConfig) -> None:
    """Raise if a setting does not apply to this baseline."""
    for name in ("reflections", "base_every"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name} is a setting of orthogonal methods, which {method} is not. "
                f"Set {name}=none."
            )
    if config.init is not None:
        if method != "rnn":
            raise ConfigError(
                f"init is a setting of orthogonal methods and of rnn, and {method} starts as torch "
                "starts it. Set init=none."
            )
        choose("init of rnn", config.init, inits.MATRICES)
    if method == "rnn" and config.nonlinearity not in ("tanh", "relu"):
        raise ConfigError(
            f"nonlinearity must be 'tanh' or 'relu' for rnn, got {config.nonlinearity!r}."
        )
    if method != "rnn" and config.nonlinearity != "tanh":
        raise ConfigError(
            f"nonlinearity must be 'tanh' for {method}, which has no other, got "
            f"{config.nonlinearity!r}."
        )


def _has_reflections(method: str) -> bool:
    """Return whether a method has a number of reflections."""
    if method in BASELINES:
        return False
    return "reflections" in signature(METHODS[method].build).parameters


class RecurrentTask(Task[RecurrentConfig]):
    """Train :class:`Recurrent` by any square method, or a baseline."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        method = settings.method
        if self.config.base_every is not None and method != "dtriv":
            raise ConfigError(
                f"base_every is a setting of dtriv, and the method is {method}. "
                "Set base_every=none."
            )
        if self.config.reflections is not None and not _has_reflections(method):
            raise ConfigError(
                f"reflections is a setting of methods such as cwy, and {method} has none. "
                "Set reflections=none."
            )

    @classmethod
    def methods(cls) -> list[str]:
        square = [name for name, method in METHODS.items() if method.kind != "tall"]
        return [*square, *BASELINES]

    @property
    def unused(self) -> set[str]:
        method = self.settings.method
        unused = super().unused
        if method != "dtriv":
            unused.add("base_every")
        if method in BASELINES and method != "rnn":
            unused.update(("init", "nonlinearity"))
        if not _has_reflections(method):
            unused.add("reflections")
        return unused

    @property
    def capturable(self) -> bool:
        return super().capturable and self.config.base_every is None

    def network(self, inputs: int, outputs: int, *, last: bool, symbols: bool = False) -> Recurrent:
        """Return the network of this run, drawn on the CPU.

        The initial weights therefore do not depend on the device.
        """
        network = Recurrent(
            self.settings.method,
            self.config,
            inputs,
            outputs,
            last=last,
            symbols=symbols,
            dtype=self.dtype,
        )
        return network.to(self.device)

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self.config.base_every is not None and step % self.config.base_every == 0:
            for moved in move_bases(model):
                # The optimizer's state was measured from the old base.
                optimizer.state.pop(moved, None)

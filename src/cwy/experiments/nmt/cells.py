"""Recurrences of the translator: an encoder over all words, and single steps of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..._torch import fused_gru_cell, fused_lstm_cell
from ...nn import OrthogonalRNN, OrthogonalRNNCell
from ...ops._precision import full_precision
from ...ops.recurrence.nonlinearities import NONLINEARITIES
from ..recurrent import BASELINES, check_baseline, raw_length
from .mix import Mix
from .recipes import NmtConfig
from .shared import Shared

CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "rnn": nn.RNNCell,
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}
SATURATED = 1e4
"""An input that opens or closes a gate exactly."""

State = tuple[Tensor, ...]
"""h ``(B, N)``, and c for an LSTM."""


class Encoder(nn.Module):
    """Read padded sentences by a recurrent network.

    Padding influences neither the states up to a sentence's end nor the state at the end.

    Returns:
        The states ``(T, B, N)`` of ``x (T, B, inputs)``, and the state at the end of each sentence.
        ``real (B, T)`` is true up to that end.
    """

    def __init__(self, method: str, config: NmtConfig, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.core = _encoder_core(method, config, inputs, dtype)

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, State]:
        if isinstance(self.core, GatedCell):
            states = _rolled(step(self.core), x)
            return states, (_at_end(states, real),)
        if isinstance(self.core, nn.LSTM):
            x = torch.cat([x, ~real.mT.unsqueeze(-1)], -1)
            states, (_, c) = self.core(x)
            return states, (_at_end(states, real), c.squeeze(0))
        states, _ = self.core(x)
        return states, (_at_end(states, real),)


def _at_end(states: Tensor, real: Tensor) -> Tensor:
    """Return the states ``(B, N)`` at the ends of the sentences."""
    end = (real.sum(1) - 1).view(1, -1, 1).expand(1, -1, states.shape[-1])
    return states.gather(0, end).squeeze(0)


def _encoder_core(method: str, config: NmtConfig, inputs: int, dtype: torch.dtype) -> nn.Module:
    """Return the network that reads sentences, with its input map scaled."""
    n = config.hidden_size
    if config.gate and config.gate_encoder:
        return cell(method, config, inputs, dtype)
    if method not in BASELINES:
        core = OrthogonalRNN(inputs, n, **_orthogonal_options(method, config, dtype))
        _scale(core.weight_ih_l0, config)
        return core
    check_baseline(method, config)
    if method == "lstm":
        return _padded_lstm(config, inputs, dtype)
    core = BASELINES[method](inputs, n, dtype=dtype, **_baseline_options(method, config))
    _scale(core.weight_ih_l0, config)
    return core


def _padded_lstm(config: NmtConfig, inputs: int, dtype: torch.dtype) -> nn.LSTM:
    """Return an LSTM with one more input, which is 1 for padding and then keeps the cell.

    It closes the input gate and opens the forget gate. Both gates are saturated, so that no
    gradient ever moves its column of the weights.
    """
    n = config.hidden_size
    core = nn.LSTM(inputs + 1, n, bias=config.input_bias, dtype=dtype)
    _scale(core.weight_ih_l0, config)
    gates = torch.tensor([-SATURATED, SATURATED, 0, 0], dtype=dtype)
    with torch.no_grad():
        cast(Tensor, core.weight_ih_l0)[:, -1].copy_(gates.repeat_interleave(n))
    return core


@torch.no_grad()
def _scale(weight: Any, config: NmtConfig) -> None:
    """Multiply an initial input map by the setting ``input_scale``."""
    weight.mul_(config.input_scale)


class GatedCell(nn.Module):
    r"""Mix the old state and that of an orthogonal cell by a gate.

    $$ z_t = \sigma(W_z x_t + U_z h_{t-1} + b_z), \quad
       h_t = (1 - z_t) \odot h_{t-1} + z_t \odot f(Q h_{t-1} + W x_t + b). $$

    Without a matrix of its own, the gate has $U_z = \mathrm{diag}(d)\, Q$. One product then serves
    the cell and its gate.

    Args:
        core: the orthogonal cell.
        inputs: features of x.
        bias: whether the gate has one.
        matrix: whether $U_z$ is a matrix of its own.
        dtype: of the gate.
    """

    def __init__(
        self, core: OrthogonalRNNCell, inputs: int, bias: bool, matrix: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        n = core.hidden_size
        self.core = core
        self.gate = nn.Linear(inputs, n, bias=bias, dtype=dtype)
        self.gate_state: nn.Linear | None = None
        self.gate_factors: nn.Parameter | None = None
        if matrix:
            self.gate_state = nn.Linear(n, n, bias=False, dtype=dtype)
        else:
            self.gate_factors = nn.Parameter(torch.zeros(n, dtype=dtype))


class Step(NamedTuple):
    """Advance a cell whose weights were read once: ``state = advance(W x, R h, state)``.

    Attributes:
        weight: W ``(K, inputs)``.
        bias: ``(K,)``, to be added to W x, or None.
        transition: R ``(K, N)``.
        advance: the rest of the step.
    """

    weight: Tensor
    bias: Tensor | None
    transition: Tensor
    advance: Callable[[Tensor, Tensor, State], State]


def cell(method: str, config: NmtConfig, inputs: int, dtype: torch.dtype) -> nn.Module:
    """Return the decoder's cell, with parameters named as in torch."""
    if method not in BASELINES:
        options = _orthogonal_options(method, config, dtype)
        core = OrthogonalRNNCell(inputs, config.hidden_size, **options)
        _scale(core.weight_ih, config)
        if config.gate:
            return GatedCell(core, inputs, config.input_bias, config.gate_matrix, dtype)
        return core
    check_baseline(method, config)
    options = _baseline_options(method, config)
    plain = CELLS[method](inputs, config.hidden_size, dtype=dtype, **options)
    _scale(plain.weight_ih, config)
    return plain


def step(core: nn.Module) -> Step:
    """Read the weights of a cell for all steps of a sentence. Q is formed once, here."""
    if isinstance(core, GatedCell):
        return _gated_step(core)
    if isinstance(core, OrthogonalRNNCell):
        return _orthogonal_step(core)
    weight = cast(Tensor, core.weight_ih)
    transition = cast(Tensor, core.weight_hh)
    # None without biases.
    bias_ih = cast(Tensor | None, core.bias_ih)
    bias_hh = cast(Tensor | None, core.bias_hh)
    if isinstance(core, nn.GRUCell):
        advance = partial(_gru, bias_ih=bias_ih, bias_hh=bias_hh)
        return Step(weight, None, transition, advance)
    if isinstance(core, nn.LSTMCell):
        advance = partial(_lstm, bias_ih=bias_ih, bias_hh=bias_hh)
        return Step(weight, None, transition, advance)
    f = {"tanh": torch.tanh, "relu": torch.relu}[cast(nn.RNNCell, core).nonlinearity]
    bias = None
    if bias_ih is not None and bias_hh is not None:
        bias = bias_ih + bias_hh
    return Step(weight, bias, transition, lambda x, r, state: (f(x + r),))


def _orthogonal_step(core: OrthogonalRNNCell) -> Step:
    f = NONLINEARITIES[cast(str, core.nonlinearity)]
    bias = getattr(core, "bias_ih", None)
    threshold = None
    if f.threshold:
        threshold = bias
        bias = None
    return Step(
        core.weight_ih,
        bias,
        core.weight_hh,
        lambda x, r, state: (f.define(x + r, threshold),),
    )


def _gated_step(core: GatedCell) -> Step:
    """Stack the cell on its gate, so that one product with x serves both.

    So does one product with h. Without a matrix, the gate reads that of the cell.
    """
    plain = _orthogonal_step(core.core)
    bias = None
    if core.gate.bias is not None:
        cell_bias = plain.bias
        if cell_bias is None:
            # The cell's bias is the threshold of its nonlinearity.
            cell_bias = torch.zeros_like(core.gate.bias)
        bias = torch.cat([cell_bias, core.gate.bias])

    transition = plain.transition
    if core.gate_state is not None:
        transition = torch.cat([plain.transition, core.gate_state.weight])

    mix = None
    if core.gate_factors is not None:
        mix = Mix(core.gate_factors, cast(str, core.core.nonlinearity))

    def advance(x: Tensor, r: Tensor, state: State) -> State:
        (h,) = state
        if mix is not None and mix.serves(h):
            return (mix(x, r, h),)
        x_new, x_gate = x.chunk(2, -1)
        if core.gate_factors is not None:
            r_new = r
            r_gate = core.gate_factors * r
        else:
            r_new, r_gate = r.chunk(2, -1)
        (new,) = plain.advance(x_new, r_new, state)
        return (torch.lerp(h, new, torch.sigmoid(x_gate + r_gate)),)

    weight = torch.cat([plain.weight, core.gate.weight])
    return Step(weight, bias, transition, advance)


def _rolled(core: Step, x: Tensor) -> Tensor:
    """Return the states ``(T, B, N)`` of a cell over ``x (T, B, inputs)``, from zero."""
    inputs = nn.functional.linear(x, core.weight, core.bias).to(x.dtype)
    times = Shared(core.transition.mT)
    h = x.new_zeros(x.shape[1], core.transition.shape[-1])
    states = []
    for row in inputs:
        (h,) = core.advance(row, times(h).to(x.dtype), (h,))
        states.append(h)
    return torch.stack(states)


def _gru(
    x: Tensor, r: Tensor, state: State, bias_ih: Tensor | None, bias_hh: Tensor | None
) -> State:
    (h,) = state
    if x.is_cuda:
        # Autocast would round the state.
        with full_precision("cuda"):
            return (fused_gru_cell(x, r, h, bias_ih, bias_hh)[0],)
    if bias_ih is not None and bias_hh is not None:
        x = x + bias_ih
        r = r + bias_hh
    x_reset, x_update, x_new = x.chunk(3, -1)
    h_reset, h_update, h_new = r.chunk(3, -1)
    reset = torch.sigmoid(x_reset + h_reset)
    update = torch.sigmoid(x_update + h_update)
    return (torch.lerp(torch.tanh(x_new + reset * h_new), h, update),)


def _lstm(
    x: Tensor, r: Tensor, state: State, bias_ih: Tensor | None, bias_hh: Tensor | None
) -> State:
    _, c = state
    if x.is_cuda:
        with full_precision("cuda"):
            return fused_lstm_cell(x, r, c, bias_ih, bias_hh)[:2]
    total = x + r
    if bias_ih is not None and bias_hh is not None:
        total = total + (bias_ih + bias_hh)
    i, f, g, o = total.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _baseline_options(method: str, config: NmtConfig) -> dict[str, Any]:
    """Return the options of a baseline. Only "rnn" takes a nonlinearity."""
    options: dict[str, Any] = {"bias": config.input_bias}
    if method == "rnn":
        options["nonlinearity"] = config.nonlinearity
    return options


def _orthogonal_options(method: str, config: NmtConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "nonlinearity": config.nonlinearity,
        "bias": config.input_bias,
        "dtype": dtype,
        "method": method,
        "reflections": config.reflections,
        "init": config.init,
        "length": raw_length(method),
    }

"""Recurrences of the translator: an encoder over all words, and single steps of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..._torch import fused_gru_cell, fused_lstm_cell
from ...nn import OrthogonalRNN, OrthogonalRNNCell
from ...ops.recurrence.nonlinearities import NONLINEARITIES
from ..recurrent import BASELINES, RecurrentConfig, check_baseline, raw_length

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

    def __init__(
        self, method: str, config: RecurrentConfig, inputs: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        n = config.hidden_size
        self.core: nn.Module
        if method not in BASELINES:
            options = _orthogonal_options(method, config, dtype)
            self.core = OrthogonalRNN(inputs, n, **options)
            return
        check_baseline(method, config)
        if method == "lstm":
            self.core = _padded_lstm(inputs, n, dtype)
        else:
            options = _baseline_options(method, config)
            self.core = BASELINES[method](inputs, n, dtype=dtype, **options)

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, State]:
        is_lstm = isinstance(self.core, nn.LSTM)
        if is_lstm:
            x = torch.cat([x, ~real.mT.unsqueeze(-1)], -1)
        states, last = self.core(x)
        end = (real.sum(1) - 1).view(1, -1, 1).expand(1, -1, states.shape[-1])
        h = states.gather(0, end).squeeze(0)
        if is_lstm:
            _, c = last
            return states, (h, c.squeeze(0))
        return states, (h,)


def _padded_lstm(inputs: int, n: int, dtype: torch.dtype) -> nn.LSTM:
    """Return an LSTM with one more input, which is 1 for padding and then keeps the cell.

    It closes the input gate and opens the forget gate. Both gates are saturated, so that no
    gradient ever moves its column of the weights.
    """
    core = nn.LSTM(inputs + 1, n, dtype=dtype)
    gates = torch.tensor([-SATURATED, SATURATED, 0, 0], dtype=dtype)
    with torch.no_grad():
        cast(Tensor, core.weight_ih_l0)[:, -1].copy_(gates.repeat_interleave(n))
    return core


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


def cell(method: str, config: RecurrentConfig, inputs: int, dtype: torch.dtype) -> nn.Module:
    """Return the decoder's cell, with parameters named as in torch."""
    if method not in BASELINES:
        options = _orthogonal_options(method, config, dtype)
        return OrthogonalRNNCell(inputs, config.hidden_size, **options)
    options = _baseline_options(method, config)
    return CELLS[method](inputs, config.hidden_size, dtype=dtype, **options)


def step(core: nn.Module) -> Step:
    """Read the weights of a cell for all steps of a sentence. Q is formed once, here."""
    weight = cast(Tensor, core.weight_ih)
    transition = cast(Tensor, core.weight_hh)
    bias_ih = cast(Tensor, core.bias_ih)
    if isinstance(core, OrthogonalRNNCell):
        return _orthogonal_step(core, weight, bias_ih, transition)
    bias_hh = cast(Tensor, core.bias_hh)
    if isinstance(core, nn.GRUCell):

        def advance(x: Tensor, r: Tensor, state: State) -> State:
            return _gru(x, r, state, bias_ih, bias_hh)

        return Step(weight, None, transition, advance)
    if isinstance(core, nn.LSTMCell):

        def advance(x: Tensor, r: Tensor, state: State) -> State:
            return _lstm(x, r, state, bias_ih, bias_hh)

        return Step(weight, None, transition, advance)
    f = {"tanh": torch.tanh, "relu": torch.relu}[cast(nn.RNNCell, core).nonlinearity]
    return Step(weight, bias_ih + bias_hh, transition, lambda x, r, state: (f(x + r),))


def _orthogonal_step(
    core: OrthogonalRNNCell, weight: Tensor, bias: Tensor, transition: Tensor
) -> Step:
    f = NONLINEARITIES[cast(str, core.nonlinearity)]
    if f.threshold:
        # The bias is the nonlinearity's threshold.
        return Step(weight, None, transition, lambda x, r, state: (f.define(x + r, bias),))
    return Step(weight, bias, transition, lambda x, r, state: (f.define(x + r, None),))


def _gru(x: Tensor, r: Tensor, state: State, bias_ih: Tensor, bias_hh: Tensor) -> State:
    (h,) = state
    if x.is_cuda:
        return (fused_gru_cell(x, r, h, bias_ih, bias_hh)[0],)
    x_reset, x_update, x_new = (x + bias_ih).chunk(3, -1)
    h_reset, h_update, h_new = (r + bias_hh).chunk(3, -1)
    reset = torch.sigmoid(x_reset + h_reset)
    update = torch.sigmoid(x_update + h_update)
    return (torch.lerp(torch.tanh(x_new + reset * h_new), h, update),)


def _lstm(x: Tensor, r: Tensor, state: State, bias_ih: Tensor, bias_hh: Tensor) -> State:
    _, c = state
    if x.is_cuda:
        return fused_lstm_cell(x, r, c, bias_ih, bias_hh)[:2]
    i, f, g, o = (x + r + (bias_ih + bias_hh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _baseline_options(method: str, config: RecurrentConfig) -> dict[str, Any]:
    """Return the options of a baseline. Only "rnn" takes a nonlinearity."""
    if method == "rnn":
        return {"nonlinearity": config.nonlinearity}
    return {}


def _orthogonal_options(method: str, config: RecurrentConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "nonlinearity": config.nonlinearity,
        "dtype": dtype,
        "method": method,
        "reflections": config.reflections,
        "init": config.init,
        "length": raw_length(method),
    }

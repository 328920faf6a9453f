"""Encoder and decoder of any method: a network over all words at once, and one step for where attention feeds back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...nn import OrthogonalRNN, OrthogonalRNNCell
from ...ops.recurrence.nonlinearities import NONLINEARITIES
from ..recurrent import BASELINES, RecurrentConfig, check_baseline, raw_length

CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "rnn": nn.RNNCell,
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}
SHUT = 1e4  # what closes a gate, or opens it, to the last bit

State = tuple[Tensor, ...]
"""h ``(B, N)``; of an LSTM, h and c."""


class Encoder(nn.Module):
    """A recurrent network that reads padded sentences.

    Returns:
        From ``x (T, B, inputs)`` and ``real (B, T)``, true up to each sentence's end: the states ``(T, B, N)``, and the
        state at each end. What is beyond an end has no influence on that, nor on the states before.
    """

    def __init__(
        self, method: str, config: RecurrentConfig, inputs: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        n = config.hidden_size
        if method not in BASELINES:
            self.core: nn.Module = OrthogonalRNN(inputs, n, **_options(method, config, dtype))
            return
        check_baseline(method, config)
        kind = {"nonlinearity": config.nonlinearity} if method == "rnn" else {}
        # An LSTM has one more input: 1 beyond the end, it shuts the input gate and opens the forget gate, so that the
        # cell is kept. Both gates are saturated, so that no gradient ever moves that column.
        self.core = BASELINES[method](inputs + (method == "lstm"), n, dtype=dtype, **kind)
        if method == "lstm":
            with torch.no_grad():
                column = cast(Tensor, self.core.weight_ih_l0)[:, -1]
                column.copy_(torch.tensor([-SHUT, SHUT, 0, 0], dtype=dtype).repeat_interleave(n))

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, State]:
        gated = isinstance(self.core, nn.LSTM)
        states, last = self.core(torch.cat([x, ~real.mT.unsqueeze(-1)], -1) if gated else x)
        end = (real.sum(1) - 1).view(1, -1, 1).expand(1, -1, states.shape[-1])
        h = states.gather(0, end).squeeze(0)
        return states, (h, last[1].squeeze(0)) if gated else (h,)


class Step(NamedTuple):
    """A cell, its weights read once: ``state = advance(W x, R h, state)``.

    Attributes:
        weight: W ``(K, inputs)``.
        bias: ``(K,)``, to be added to W x; or None.
        transition: R ``(K, N)``.
        advance: the rest of the step.
    """

    weight: Tensor
    bias: Tensor | None
    transition: Tensor
    advance: Callable[[Tensor, Tensor, State], State]


def cell(method: str, config: RecurrentConfig, inputs: int, dtype: torch.dtype) -> nn.Module:
    """The decoder's cell: its parameters, as torch names them."""
    if method not in BASELINES:
        return OrthogonalRNNCell(inputs, config.hidden_size, **_options(method, config, dtype))
    kind = {"nonlinearity": config.nonlinearity} if method == "rnn" else {}
    return CELLS[method](inputs, config.hidden_size, dtype=dtype, **kind)


def step(core: nn.Module) -> Step:
    """A cell, ready for all steps of a sentence: Q is formed here, once."""
    weight, transition, bias = (
        cast(Tensor, getattr(core, name)) for name in ("weight_ih", "weight_hh", "bias_ih")
    )
    if isinstance(core, OrthogonalRNNCell):
        f = NONLINEARITIES[cast(str, core.nonlinearity)]
        threshold = bias if f.threshold else None
        return Step(
            weight,
            None if f.threshold else bias,
            transition,
            lambda x, r, state: (f.define(x + r, threshold),),
        )
    more = cast(Tensor, core.bias_hh)
    if isinstance(core, nn.GRUCell):
        return Step(weight, None, transition, lambda x, r, state: _gru(x, r, state, bias, more))
    if isinstance(core, nn.LSTMCell):
        return Step(weight, None, transition, lambda x, r, state: _lstm(x, r, state, bias, more))
    f = torch.tanh if cast(nn.RNNCell, core).nonlinearity == "tanh" else torch.relu
    return Step(weight, bias + more, transition, lambda x, r, state: (f(x + r),))


def _gru(x: Tensor, r: Tensor, state: State, bias: Tensor, more: Tensor) -> State:
    if x.is_cuda:
        return (torch.ops.aten._thnn_fused_gru_cell(x, r, state[0], bias, more)[0],)
    (x_reset, x_update, x_new), (h_reset, h_update, h_new) = (
        (x + bias).chunk(3, -1),
        (r + more).chunk(3, -1),
    )
    reset, update = torch.sigmoid(x_reset + h_reset), torch.sigmoid(x_update + h_update)
    return (torch.lerp(torch.tanh(x_new + reset * h_new), state[0], update),)


def _lstm(x: Tensor, r: Tensor, state: State, bias: Tensor, more: Tensor) -> State:
    if x.is_cuda:
        return torch.ops.aten._thnn_fused_lstm_cell(x, r, state[1], bias, more)[:2]
    i, f, g, o = (x + r + (bias + more)).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _options(method: str, config: RecurrentConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "nonlinearity": config.nonlinearity,
        "dtype": dtype,
        "method": method,
        "reflections": config.reflections,
        "init": config.init,
        "length": raw_length(method),
    }

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
            states = _rolled(step(self.core, x.shape[-1]), x)
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
        return cell(method, config, inputs, inputs, dtype)
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

    In a thin gate $U_z = \mathrm{diag}(d)\, Q$, so that one product serves the cell and its gate.
    Of $x_t$ it reads only the word.

    Args:
        core: the orthogonal cell.
        inputs: features of x.
        words: the last features of x, which are those of a word.
        bias: whether the gate has one.
        thin: whether the gate is thin.
        dtype: of the gate.
    """

    def __init__(
        self,
        core: OrthogonalRNNCell,
        inputs: int,
        words: int,
        *,
        bias: bool,
        thin: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        n = core.hidden_size
        self.core = core
        self.gate_state: nn.Linear | None = None
        self.gate_factors: nn.Parameter | None = None
        if thin:
            self.gate = nn.Linear(words, n, bias=bias, dtype=dtype)
            self.gate_factors = nn.Parameter(torch.zeros(n, dtype=dtype))
        else:
            self.gate = nn.Linear(inputs, n, bias=bias, dtype=dtype)
            self.gate_state = nn.Linear(n, n, bias=False, dtype=dtype)


Advance = Callable[[Tensor, Tensor | None, Tensor, State], State]
"""``state = advance(x, context, r, state)``, with x of a word, and r = R h."""


class Step(NamedTuple):
    """Advance a cell whose weights were read once.

    Attributes:
        words: the map of words to x, ``(K, E)``.
        bias: ``(K,)``, to be added to x, or None.
        context: the map of contexts, ``(C, N)``, empty in an encoder.
        transition: R, ``(*, N)``.
        advance: the rest of the step.
    """

    words: Tensor
    bias: Tensor | None
    context: Tensor
    transition: Tensor
    advance: Advance


def cell(method: str, config: NmtConfig, inputs: int, words: int, dtype: torch.dtype) -> nn.Module:
    """Return a cell, with parameters named as in torch.

    The last of its inputs are those of a word.
    """
    if method not in BASELINES:
        options = _orthogonal_options(method, config, dtype)
        core = OrthogonalRNNCell(inputs, config.hidden_size, **options)
        _scale(core.weight_ih, config)
        if config.gate:
            return GatedCell(
                core, inputs, words, bias=config.input_bias, thin=config.thin_gate, dtype=dtype
            )
        return core
    check_baseline(method, config)
    options = _baseline_options(method, config)
    plain = CELLS[method](inputs, config.hidden_size, dtype=dtype, **options)
    _scale(plain.weight_ih, config)
    return plain


def step(core: nn.Module, words: int) -> Step:
    """Read the weights of a cell for all steps of a sentence. Q is formed once, here.

    The last inputs of the cell are those of a word.
    """
    if isinstance(core, GatedCell):
        return _gated_step(core, words)
    if isinstance(core, OrthogonalRNNCell):
        return _orthogonal_step(core, words)
    transition = cast(Tensor, core.weight_hh)
    # None without biases.
    bias_ih = cast(Tensor | None, core.bias_ih)
    bias_hh = cast(Tensor | None, core.bias_hh)
    bias = None
    if isinstance(core, nn.GRUCell):
        advance = _summed(partial(_gru, bias_ih=bias_ih, bias_hh=bias_hh))
    elif isinstance(core, nn.LSTMCell):
        advance = _summed(partial(_lstm, bias_ih=bias_ih, bias_hh=bias_hh))
    else:
        f = {"tanh": torch.tanh, "relu": torch.relu}[cast(nn.RNNCell, core).nonlinearity]
        advance = _plain(f)
        if bias_ih is not None and bias_hh is not None:
            bias = bias_ih + bias_hh
    weight = cast(Tensor, core.weight_ih)
    return Step(weight[:, -words:], bias, weight[:, :-words], transition, advance)


def _summed(advance: Callable[[Tensor, Tensor, State], State]) -> Advance:
    """Return the rest of a step that reads the sum of x and the context."""

    def summed(x: Tensor, context: Tensor | None, r: Tensor, state: State) -> State:
        if context is not None:
            x = x + context
        return advance(x, r, state)

    return summed


def _plain(f: Callable[[Tensor], Tensor]) -> Advance:
    """Return the rest of a step $h = f(x + r)$."""
    return _summed(lambda x, r, state: (f(x + r),))


def _orthogonal_step(core: OrthogonalRNNCell, words: int) -> Step:
    f = NONLINEARITIES[cast(str, core.nonlinearity)]
    bias = getattr(core, "bias_ih", None)
    threshold = None
    if f.threshold:
        threshold = bias
        bias = None
    advance = _plain(lambda z: f.define(z, threshold))
    weight = core.weight_ih
    return Step(weight[:, -words:], bias, weight[:, :-words], core.weight_hh, advance)


def _gated_step(core: GatedCell, words: int) -> Step:
    """Stack the cell on its gate, so that one product with the word serves both."""
    plain = _orthogonal_step(core.core, words)
    gate = core.gate.weight
    bias = None
    if core.gate.bias is not None:
        cell_bias = plain.bias
        if cell_bias is None:
            # The cell's bias is the threshold of its nonlinearity.
            cell_bias = torch.zeros_like(core.gate.bias)
        bias = torch.cat([cell_bias, core.gate.bias])
    stacked = plain._replace(words=torch.cat([plain.words, gate[:, -words:]]), bias=bias)
    if core.gate_factors is not None:
        mix = Mix(core.gate_factors, cast(str, core.core.nonlinearity))
        return stacked._replace(advance=partial(_thin, plain.advance, mix))
    state = cast(nn.Linear, core.gate_state).weight
    return stacked._replace(
        context=torch.cat([plain.context, gate[:, :-words]]),
        transition=torch.cat([plain.transition, state]),
        advance=_summed(partial(_gated, plain.advance)),
    )


def _gated(inner: Advance, x: Tensor, r: Tensor, state: State) -> State:
    (h,) = state
    x_new, x_gate = x.chunk(2, -1)
    r_new, r_gate = r.chunk(2, -1)
    (new,) = inner(x_new, None, r_new, state)
    return (torch.lerp(h, new, torch.sigmoid(x_gate + r_gate)),)


def _thin(
    inner: Advance, mix: Mix, x: Tensor, context: Tensor | None, r: Tensor, state: State
) -> State:
    (h,) = state
    if mix.serves(h):
        return (mix(x, context, r, h),)
    x_new, x_gate = x.chunk(2, -1)
    (new,) = inner(x_new, context, r, state)
    return (torch.lerp(h, new, torch.sigmoid(x_gate + mix.factors * r)),)


def _rolled(core: Step, x: Tensor) -> Tensor:
    """Return the states ``(T, B, N)`` of a cell over ``x (T, B, inputs)``, from zero."""
    inputs = nn.functional.linear(x, core.words, core.bias).to(x.dtype)
    times = Shared(core.transition.mT)
    h = x.new_zeros(x.shape[1], core.transition.shape[-1])
    states = []
    for row in inputs:
        (h,) = core.advance(row, None, times(h).to(x.dtype), (h,))
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

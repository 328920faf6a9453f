"""Recurrences of the translator: an encoder over all words, and single steps of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ...nn import OrthogonalRNN, OrthogonalRNNCell
from ...ops._precision import autocast_dtype
from ...ops.recurrence.nonlinearities import NONLINEARITIES
from ..recurrent import BASELINES, check_baseline, raw_length, start_free
from . import fused
from .pointwise import Gated, Gru, Lstm, Plain, Pointwise, State, Thin
from .recipes import NmtConfig
from .repeated_product import RepeatedProduct

TORCH_CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "rnn": nn.RNNCell,
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}
SATURATED = 1e4
"""An input that opens or closes a gate exactly."""
ALIGNED = 8
"""The fastest products in half precision need sides that are multiples of it."""


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
            states = _rolled(read_weights(self.core, x.shape[-1]), x)
            return states, (_at_end(states, real),)
        if isinstance(self.core, nn.LSTM):
            is_padding = (~real).mT.unsqueeze(-1).to(x.dtype)
            added = pad(is_padding, (0, self.core.input_size - x.shape[-1] - 1))
            states, (_, c) = self.core(torch.cat([x, added], -1))
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
    start_free(cast(Tensor, core.weight_hh_l0), config)
    _scale(core.weight_ih_l0, config)
    return core


def _padded_lstm(config: NmtConfig, inputs: int, dtype: torch.dtype) -> nn.LSTM:
    """Return an LSTM with more inputs. The first of them is 1 for padding, and keeps the cell.

    It closes the input gate and opens the forget gate. Both gates are saturated, so that no
    gradient ever moves its column of the weights. The other added inputs are zero, for the speed of
    products in half precision.
    """
    n = config.hidden_size
    added = ALIGNED - inputs % ALIGNED
    core = nn.LSTM(inputs + added, n, bias=config.input_bias, dtype=dtype)
    _scale(core.weight_ih_l0, config)
    gates = torch.tensor([-SATURATED, SATURATED, 0, 0], dtype=dtype)
    columns = cast(Tensor, core.weight_ih_l0)[:, inputs:]
    with torch.no_grad():
        columns.zero_()
        columns[:, 0] = gates.repeat_interleave(n)
    return core


@torch.no_grad()
def _scale(weight: Any, config: NmtConfig) -> None:
    """Multiply an initial input map by the setting ``input_scale``."""
    weight.mul_(config.input_scale)


class GatedCell(nn.Module):
    r"""Mix the old state and that of a cell by a gate.

    $$ z_t = \sigma(W_z x_t + U_z h_{t-1} + b_z), \quad
       h_t = (1 - z_t) \odot h_{t-1} + z_t \odot f(Q h_{t-1} + W x_t + b). $$

    In a thin gate $U_z = \mathrm{diag}(d)\, Q$, so that one product serves the cell and its gate.
    Of $x_t$ it reads only the word.

    Args:
        core: an orthogonal cell, or torch's, whose Q is free.
        inputs: features of x.
        word_features: the last features of x, which are those of a word.
        bias: whether the gate has one.
        thin: whether the gate is thin.
        dtype: of the gate.
    """

    def __init__(
        self,
        core: OrthogonalRNNCell | nn.RNNCell,
        inputs: int,
        word_features: int,
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
            self.gate = nn.Linear(word_features, n, bias=bias, dtype=dtype)
            self.gate_factors = nn.Parameter(torch.zeros(n, dtype=dtype))
        else:
            self.gate = nn.Linear(inputs, n, bias=bias, dtype=dtype)
            self.gate_state = nn.Linear(n, n, bias=False, dtype=dtype)


class CellWeights(NamedTuple):
    """Hold the weights of a cell, read once for all steps.

    Attributes:
        word_map: that of words to x, ``(K, E)``.
        bias: ``(K,)``, to be added to x, or None.
        context_map: that of contexts, ``(C, N)``, empty in an encoder.
        transition: R, ``(*, N)``.
        pointwise: the rest of the step.
    """

    word_map: Tensor
    bias: Tensor | None
    context_map: Tensor
    transition: Tensor
    pointwise: Pointwise

    def map_words(self, embedded: Tensor) -> Tensor:
        """Return what words give the cell, ``(*, K)``. Under autocast the bias is not rounded."""
        if autocast_dtype(self.word_map) == self.word_map.dtype:
            return linear(embedded, self.word_map, self.bias)
        mapped = linear(embedded, self.word_map)
        if self.bias is None:
            return mapped.to(embedded.dtype)
        return mapped + self.bias


def cell(
    method: str, config: NmtConfig, inputs: int, word_features: int, dtype: torch.dtype
) -> nn.Module:
    """Return a cell, with parameters named as in torch.

    The last of its inputs are the features of a word.
    """
    plain = _plain_cell(method, config, inputs, dtype)
    if not config.gate:
        return plain
    return GatedCell(
        cast(OrthogonalRNNCell | nn.RNNCell, plain),
        inputs,
        word_features,
        bias=config.input_bias,
        thin=config.thin_gate,
        dtype=dtype,
    )


def _plain_cell(method: str, config: NmtConfig, inputs: int, dtype: torch.dtype) -> nn.Module:
    """Return a cell without the setting ``gate``, with its input map scaled."""
    if method not in BASELINES:
        options = _orthogonal_options(method, config, dtype)
        core = OrthogonalRNNCell(inputs, config.hidden_size, **options)
    else:
        check_baseline(method, config)
        options = _baseline_options(method, config)
        core = TORCH_CELLS[method](inputs, config.hidden_size, dtype=dtype, **options)
        start_free(core.weight_hh, config)
    _scale(core.weight_ih, config)
    return core


def read_weights(core: nn.Module, word_features: int) -> CellWeights:
    """Read the weights of a cell for all steps of a sentence. Q is formed once, here.

    The last inputs of the cell are the features of a word.
    """
    if isinstance(core, GatedCell):
        return _gated_weights(core, word_features)
    if isinstance(core, OrthogonalRNNCell):
        return _orthogonal_weights(core, word_features)
    # None without biases.
    bias = cast(Tensor | None, core.bias_ih)
    bias_hh = cast(Tensor | None, core.bias_hh)
    if isinstance(core, nn.GRUCell):
        n = core.hidden_size
        pointwise = Gru()
        if bias_hh is not None:
            # The reset gate multiplies the last part.
            pointwise = Gru(vector=bias_hh[2 * n :])
            bias_hh = pad(bias_hh[: 2 * n], (0, n))
    elif isinstance(core, nn.LSTMCell):
        pointwise = Lstm()
    else:
        pointwise = Plain(cast(nn.RNNCell, core).nonlinearity)
    if bias is not None and bias_hh is not None:
        bias = bias + bias_hh
    weight = cast(Tensor, core.weight_ih)
    return CellWeights(
        word_map=weight[:, -word_features:],
        bias=bias,
        context_map=weight[:, :-word_features],
        transition=cast(Tensor, core.weight_hh),
        pointwise=pointwise,
    )


def _orthogonal_weights(core: OrthogonalRNNCell, word_features: int) -> CellWeights:
    name = cast(str, core.nonlinearity)
    bias = getattr(core, "bias_ih", None)
    threshold = None
    if NONLINEARITIES[name].threshold:
        threshold = bias
        bias = None
    weight = core.weight_ih
    return CellWeights(
        word_map=weight[:, -word_features:],
        bias=bias,
        context_map=weight[:, :-word_features],
        transition=core.weight_hh,
        pointwise=Plain(name, threshold),
    )


def _gated_weights(core: GatedCell, word_features: int) -> CellWeights:
    """Stack the cell on its gate, so that one product with the word serves both."""
    plain = read_weights(core.core, word_features)
    name = plain.pointwise.nonlinearity
    threshold = plain.pointwise.threshold
    gate = core.gate.weight
    bias = None
    if core.gate.bias is not None:
        cell_bias = plain.bias
        if cell_bias is None:
            # The cell's bias is the threshold of its nonlinearity.
            cell_bias = torch.zeros_like(core.gate.bias)
        bias = torch.cat([cell_bias, core.gate.bias])
    word_map = torch.cat([plain.word_map, gate[:, -word_features:]])
    stacked = plain._replace(word_map=word_map, bias=bias)
    if core.gate_factors is not None:
        return stacked._replace(pointwise=Thin(name, threshold, core.gate_factors))
    state = cast(nn.Linear, core.gate_state).weight
    return stacked._replace(
        context_map=torch.cat([plain.context_map, gate[:, :-word_features]]),
        transition=torch.cat([plain.transition, state]),
        pointwise=Gated(name, threshold),
    )


def _rolled(weights: CellWeights, embedded: Tensor) -> Tensor:
    """Return the states ``(T, B, N)`` of a cell over ``embedded (T, B, inputs)``, from zero."""
    x = weights.map_words(embedded)
    h = embedded.new_zeros(embedded.shape[1], weights.transition.shape[-1])
    transition = weights.transition.to(autocast_dtype(weights.transition))
    if fused.serves(x, transition):
        states, _ = fused.roll(x, transition, weights.pointwise, (h,))
        return states
    times = RepeatedProduct(transition.mT)
    states = []
    for row in x:
        (h,) = weights.pointwise.advance(row, None, times(h).to(h.dtype), (h,))
        states.append(h)
    return torch.stack(states)


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

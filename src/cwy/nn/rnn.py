"""torch.nn.RNN with an orthogonal transition."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from .. import ops
from ..api import orthogonal
from ..ops import dispatch
from ..ops.recurrence.functions import check_choices, factors_are_cheaper
from ..ops.recurrence.nonlinearities import NONLINEARITIES
from ..parametrizations import CWY, METHODS
from ..parametrizations.marks import on_manifold
from .inputs import check_counts, check_input, check_switches, name_of
from .leaving import leaves
from .settings import Settings

Activation = str | Callable[[Tensor], Tensor]


def _complex_only(method: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the weights: methods that are unitary alone have complex ones."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return dtype if METHODS[method].real or dtype.is_complex else dtype.to_complex()


class _Recurrent(Settings):
    """Weights of one or more recurrent layers, named as torch names them, with orthogonal transitions."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        nonlinearity: Activation,
        method: str,
        reflections: int | None,
        init: str | Tensor | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        length: float | str | None,
    ) -> None:
        super().__init__()
        check_counts(type(self).__name__, input_size=input_size, hidden_size=hidden_size)
        check_switches(type(self).__name__, bias=bias)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.nonlinearity, self.method = nonlinearity, method
        self._options: dict[str, Any] = {
            "method": method,
            "reflections": reflections,
            "init": init,
            "length": length,
        }
        self._like: dict[str, Any] = {"device": device, "dtype": _complex_only(method, dtype)}
        if isinstance(nonlinearity, str) and nonlinearity in NONLINEARITIES:
            known = [name for name, f in NONLINEARITIES.items() if f.complex]
            if self._like["dtype"].is_complex and nonlinearity not in known:
                raise ValueError(
                    f"{type(self).__name__}: nonlinearity {nonlinearity!r} has no complex form, and the weights are "
                    f"{self._like['dtype']}. Use one of {', '.join(map(repr, known))}."
                )

    @property
    def _threshold(self) -> bool:
        return self.nonlinearity == "modrelu"

    def _add(self, suffix: str, input_size: int) -> None:
        """One layer, one direction: its input map, orthogonal transition and bias, drawn as torch draws them."""
        n = self.hidden_size
        bound = 1 / math.sqrt(n)
        weight = nn.Parameter(torch.empty(n, input_size, **self._like))
        with torch.no_grad():
            view = torch.view_as_real(weight) if weight.is_complex() else weight
            view.uniform_(-bound, bound)
        self.register_parameter(f"weight_ih{suffix}", weight)
        self.register_parameter(f"weight_hh{suffix}", nn.Parameter(torch.zeros(n, n, **self._like)))
        if self.bias:
            # The threshold of modReLU is real for complex states too.
            dtype = self._like["dtype"]
            bias = torch.empty(
                n, device=self._like["device"], dtype=dtype.to_real() if self._threshold else dtype
            )
            edge = 0.01 if self._threshold else bound
            with torch.no_grad():
                (torch.view_as_real(bias) if bias.is_complex() else bias).uniform_(-edge, edge)
            self.register_parameter(f"bias_ih{suffix}", nn.Parameter(bias))
        orthogonal(self, f"weight_hh{suffix}", **self._options)

    def _assign(self, name: str, q: Tensor) -> None:
        """Gives a transition this value; raises if it is not orthogonal."""
        chart = on_manifold(self).get(name)
        if chart is None:
            setattr(self, name, q)
        else:
            getattr(self, name).copy_(chart(chart.right_inverse(q)))

    def _transition(self, suffix: str, rows: int) -> tuple[Tensor | ops.WY, Tensor | None]:
        """Q, formed once for all steps; or its factors and signs where few reflections make them cheaper."""
        name = f"weight_hh{suffix}"
        if parametrize.is_parametrized(self, name):
            chain = cast(
                parametrize.ParametrizationList, cast(nn.ModuleDict, self.parametrizations)[name]
            )
            chart = chain[0]
            if isinstance(chart, CWY) and len(chain) == 1:
                v, *phase = (
                    [chain.original]
                    if chain.is_tensor
                    else [getattr(chain, f"original{i}") for i in range(chain.ntensors)]
                )
                # Rounded to half precision, Q would lose the norm of its states: the factors are float32.
                narrow = v.dtype in (torch.float16, torch.bfloat16)
                if narrow or factors_are_cheaper(
                    chart.n, chart.reflections, rows, v.device.type, v.dtype, v.device.index
                ):
                    return ops.wy_factors(v), chart.diagonal(tuple(phase))
        return getattr(self, name), None

    def _check_torch(self) -> None:
        """Raise unless torch has a network like this."""
        real = not cast(Tensor, next(self.parameters())).is_complex()
        if self.nonlinearity not in ("tanh", "relu") or not real:
            raise ValueError(
                f"{name_of(self)}.to_torch: torch has real networks with tanh and relu only, and this one has "
                f"nonlinearity={self.nonlinearity!r}, dtype={next(self.parameters()).dtype}. "
                "To deploy it, call cwy.bake and torch.export or torch.onnx.export."
            )


class OrthogonalRNN(_Recurrent):
    r"""``torch.nn.RNN`` with an orthogonal (for complex weights, unitary) transition: $h_t = f(Q h_{t-1} + W x_t + b)$.

    Takes what ``torch.nn.RNN`` takes, in the same order, and returns what it returns.

    Args:
        input_size, hidden_size, num_layers: as in torch.
        nonlinearity: "tanh", "relu", "leaky_relu", "abs", "modrelu", "identity"; or a function, on the slow path.
        bias: one a layer (torch has two that are added). For "modrelu" it is the threshold.
        batch_first, dropout, bidirectional, device, dtype: as in torch. A complex dtype makes states complex.
        method: a square method of :data:`cwy.METHODS`. Those that are unitary alone make weights and states complex.
        reflections: L of the methods by reflections; with few, states are multiplied by factors, Q never formed.
        init, length: initial value of the transition and norm of its vectors, as in :func:`cwy.orthogonal`.
        memory: "store", "checkpoint" or "reversible": what is kept for the backward, see :func:`~cwy.ops.rollout`.
        output: "all" states of the last layer, or only the "last", without storing the others' outputs.
        backend: of :func:`~cwy.ops.rollout`.

    Attributes:
        weight_ih_l0, weight_hh_l0, bias_ih_l0: ``(N, input_size)``, Q itself ``(N, N)``, ``(N,)``; further layers ``_l1``, the
            backward direction ``_l0_reverse``. ``rnn.weight_hh_l0 = Q`` assigns an orthogonal matrix.

    Example:
        >>> rnn = OrthogonalRNN(10, 20, nonlinearity="modrelu")
        >>> output, h = rnn(torch.randn(5, 3, 10))
        >>> output.shape, h.shape, orthogonality_error(rnn.weight_hh_l0) < 1e-5
        (torch.Size([5, 3, 20]), torch.Size([1, 3, 20]), True)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Activation = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: str = "cwy",
        reflections: int | None = None,
        init: str | Tensor | None = None,
        length: float | str | None = None,
        memory: str = "store",
        output: str = "all",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            bias,
            nonlinearity,
            method,
            reflections,
            init,
            device,
            dtype,
            length,
        )
        check_counts("OrthogonalRNN", num_layers=num_layers)
        check_switches("OrthogonalRNN", batch_first=batch_first, bidirectional=bidirectional)
        number = isinstance(dropout, numbers.Real) and not isinstance(dropout, bool)
        if not number or not 0 <= dropout <= 1:
            raise ValueError(f"OrthogonalRNN: dropout must be a probability, got {dropout!r}.")
        check_choices("OrthogonalRNN", nonlinearity, output, memory)
        names = ["auto", *(b.name for b in dispatch.backends("rollout")["rollout"])]
        if backend not in names:
            raise ValueError(
                f"OrthogonalRNN: backend must be one of {', '.join(map(repr, names))}, got {backend!r}."
            )
        self.num_layers, self.batch_first, self.dropout, self.bidirectional = (
            num_layers,
            batch_first,
            dropout,
            bidirectional,
        )
        self.memory, self.output, self.backend = memory, output, backend
        for layer in range(num_layers):
            for suffix in self._suffixes(layer):
                self._add(
                    suffix, input_size if layer == 0 else hidden_size * (2 if bidirectional else 1)
                )

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"] if self.bidirectional else [f"_l{layer}"]

    @classmethod
    def from_torch(cls, rnn: nn.RNN, **options) -> OrthogonalRNN:
        """The same network as a ``torch.nn.RNN`` whose transitions are orthogonal already; raises if one is not.

        Args:
            rnn: its weights are copied.
            options: the keywords of this class; ``reflections`` must reach the transitions.
        """
        kind = type(rnn).__mro__[1] if parametrize.is_parametrized(rnn) else type(rnn)
        if kind is not nn.RNN:
            raise TypeError(
                f"OrthogonalRNN.from_torch: expected a torch.nn.RNN, got {type(rnn).__name__}."
            )
        if rnn.proj_size:
            raise ValueError("OrthogonalRNN.from_torch: projections (proj_size) are not supported.")
        like = cast(Tensor, rnn.weight_ih_l0)
        ours = cls(
            rnn.input_size, rnn.hidden_size, rnn.num_layers, rnn.nonlinearity, rnn.bias, rnn.batch_first, rnn.dropout,
            rnn.bidirectional, like.device, like.dtype, **options,
        )  # fmt: skip
        with torch.no_grad():
            for layer in range(rnn.num_layers):
                for suffix in ours._suffixes(layer):
                    getattr(ours, f"weight_ih{suffix}").copy_(getattr(rnn, f"weight_ih{suffix}"))
                    ours._assign(f"weight_hh{suffix}", getattr(rnn, f"weight_hh{suffix}").detach())
                    if rnn.bias:
                        bias = getattr(rnn, f"bias_ih{suffix}") + getattr(rnn, f"bias_hh{suffix}")
                        getattr(ours, f"bias_ih{suffix}").copy_(bias)
        return ours.train(rnn.training)

    @torch.no_grad()
    def to_torch(self) -> nn.RNN:
        """Return the same network as a ``torch.nn.RNN``: for "tanh" and "relu", with real weights.

        Its weights are copies, its transitions ordinary parameters, and its second bias is zero. It returns all states.
        """
        self._check_torch()
        like = cast(Tensor, self.weight_ih_l0)
        theirs = nn.RNN(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            cast(str, self.nonlinearity),
            self.bias,
            self.batch_first,
            self.dropout,
            self.bidirectional,
            device=like.device,
            dtype=like.dtype,
        )
        for layer in range(self.num_layers):
            for suffix in self._suffixes(layer):
                _copy(self, theirs, suffix)
        return theirs.train(self.training)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction: the input map, the transition Q and the bias, if there is one."""
        names = ["weight_ih", "weight_hh", "bias_ih"] if self.bias else ["weight_ih", "weight_hh"]
        suffixes = [suffix for layer in range(self.num_layers) for suffix in self._suffixes(layer)]
        return [[getattr(self, name + suffix) for name in names] for suffix in suffixes]

    def flatten_parameters(self) -> None:
        """Nothing to do; torch's layers have it, and what trains them calls it."""

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        packed = input if isinstance(input, PackedSequence) else None
        data = cast(Tensor, input) if packed is None else packed.data
        if data.shape[-1] != self.input_size:
            raise ValueError(
                f"OrthogonalRNN: expected input of {self.input_size} features, got shape {tuple(data.shape)}."
            )
        x = packed.data if packed is not None else self._time_first(cast(Tensor, input))
        check_input(self, data, cast(Tensor, self.weight_ih_l0), x.shape[0])
        unbatched = packed is None and cast(Tensor, input).dim() == 2
        batch = int(packed.batch_sizes[0]) if packed is not None else x.shape[1]
        h0 = self._first_states(hx, unbatched, batch, x)
        if packed is not None and packed.sorted_indices is not None:
            h0 = h0[:, packed.sorted_indices]
        last = []
        for layer in range(self.num_layers):
            top = layer == self.num_layers - 1
            if layer and self.dropout and self.training:
                x = nn.functional.dropout(x, self.dropout)
            outputs = []
            for suffix in self._suffixes(layer):
                states, h = self._direction(
                    x, h0[len(last)], suffix, packed, self.output if top else "all"
                )
                outputs.append(h if states is None else states)
                last.append(h)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        hn = torch.stack(last)
        order = None if packed is None else packed.unsorted_indices
        if order is not None:
            hn = hn[:, order]
        if unbatched:
            hn = hn.squeeze(1)
        if self.output == "last":
            x = x if order is None else x[order]
            return x.squeeze(0) if unbatched else x, hn
        if packed is not None:
            return PackedSequence(
                x, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
            ), hn
        if unbatched:
            return x.squeeze(1), hn
        return x.transpose(0, 1) if self.batch_first else x, hn

    def _time_first(self, x: Tensor) -> Tensor:
        if x.dim() not in (2, 3):
            raise ValueError(
                f"OrthogonalRNN: expected input of 2 (unbatched) or 3 dimensions, got shape {tuple(x.shape)}."
            )
        if x.dim() == 2:
            return x.unsqueeze(1)
        return x.transpose(0, 1) if self.batch_first else x

    def _first_states(self, hx: Tensor | None, unbatched: bool, batch: int, x: Tensor) -> Tensor:
        shape = (self.num_layers * (2 if self.bidirectional else 1), batch, self.hidden_size)
        dtype = cast(Tensor, self.weight_ih_l0).dtype
        if hx is None:
            return torch.zeros(shape, dtype=dtype, device=x.device)
        if hx.is_complex() and not dtype.is_complex:
            raise ValueError(
                f"OrthogonalRNN: hx is {hx.dtype}, but the layer's states are {dtype}."
            )
        given = hx.unsqueeze(1) if unbatched and hx.dim() == 2 else hx
        if given.shape != shape:
            expected = (shape[0], shape[2]) if unbatched else shape
            raise ValueError(
                f"OrthogonalRNN: expected hx of shape {expected}, got {tuple(hx.shape)}."
            )
        return given.to(dtype)

    def _direction(
        self, x: Tensor, h0: Tensor, suffix: str, packed: PackedSequence | None, output: str
    ) -> tuple[Tensor | None, Tensor]:
        """One layer in one direction: states like x (None if only the last is wanted), and the last state."""
        weight, bias = getattr(self, f"weight_ih{suffix}"), getattr(self, f"bias_ih{suffix}", None)
        reverse = suffix.endswith("_reverse")
        turn = (
            _reversal(packed.batch_sizes).to(x.device) if reverse and packed is not None else None
        )
        if reverse:
            x = x.flip(0) if turn is None else x[turn]
        if x.dtype != weight.dtype and weight.is_complex():
            x = x.to(weight.dtype)
        leaving = leaves(self, f"weight_hh{suffix}")
        backend = "reference" if leaving else self.backend
        memory = "store" if leaving else self.memory
        inner = None if memory == "store" else weight
        if inner is None:
            # One product over all steps, the bias with it where it is not a threshold.
            x = nn.functional.linear(x, weight, None if self._threshold else bias)
            bias = bias if self._threshold else None
        transition, signs = self._transition(
            suffix, x.shape[0] if packed is not None else x.shape[0] * x.shape[1]
        )
        states, last = ops.rollout(
            x if packed is None else PackedSequence(x, packed.batch_sizes), h0, transition, bias, self.nonlinearity,
            signs=signs, weight=inner, output=output, memory=memory, backend=backend,
        )  # fmt: skip
        states = states.data if isinstance(states, PackedSequence) else states
        if weight.dtype in (torch.float16, torch.bfloat16):
            states, last = (
                None if states is None else states.to(weight.dtype),
                last.to(weight.dtype),
            )
        if reverse and states is not None:
            states = states.flip(0) if turn is None else states[turn]
        return states, last


def _copy(ours: nn.Module, theirs: nn.Module, suffix: str) -> None:
    """Copy a layer's weights to torch's, which has two biases that it adds."""
    for name in ("weight_ih", "weight_hh", "bias_ih"):
        value = getattr(ours, name + suffix, None)
        if value is not None:
            getattr(theirs, name + suffix).copy_(value)
    bias = getattr(theirs, f"bias_hh{suffix}", None)
    if bias is not None:
        bias.zero_()


def _reversal(sizes: Tensor) -> Tensor:
    """Where each row of a packed sequence lies when every sequence is turned round within its own length."""
    steps = torch.arange(len(sizes))
    starts = sizes.cumsum(0) - sizes
    lengths = (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)
    step = steps.repeat_interleave(sizes)
    row = torch.arange(int(sizes.sum())) - starts[step]
    return starts[lengths[row] - 1 - step] + row


class OrthogonalRNNCell(_Recurrent):
    r"""``torch.nn.RNNCell`` with an orthogonal transition: one step $h' = f(Qh + Wx + b)$.

    Args:
        input_size, hidden_size, bias, nonlinearity, device, dtype: as in torch; ``nonlinearity`` as in :class:`OrthogonalRNN`.
        method, reflections, init, length: as in :class:`OrthogonalRNN`.

    Example:
        >>> cell = OrthogonalRNNCell(10, 20)
        >>> cell(torch.randn(3, 10)).shape
        torch.Size([3, 20])
    """

    weight_ih: Tensor
    weight_hh: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Activation = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: str = "cwy",
        reflections: int | None = None,
        init: str | Tensor | None = None,
        length: float | str | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            bias,
            nonlinearity,
            method,
            reflections,
            init,
            device,
            dtype,
            length,
        )
        check_choices("OrthogonalRNNCell", nonlinearity, "all", "store")
        self._add("", input_size)

    @torch.no_grad()
    def to_torch(self) -> nn.RNNCell:
        """Return the same cell as a ``torch.nn.RNNCell``, as :meth:`OrthogonalRNN.to_torch` does."""
        self._check_torch()
        like = {"device": self.weight_ih.device, "dtype": self.weight_ih.dtype}
        theirs = nn.RNNCell(
            self.input_size, self.hidden_size, self.bias, cast(str, self.nonlinearity), **like
        )
        _copy(self, theirs, "")
        return theirs.train(self.training)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"OrthogonalRNNCell: expected input (*, {self.input_size}), got shape {tuple(input.shape)}."
            )
        weight, transition, bias = self.weight_ih, self.weight_hh, getattr(self, "bias_ih", None)
        check_input(self, input, weight)
        x = input.to(weight.dtype) if weight.is_complex() else input
        z = nn.functional.linear(x, weight, None if self._threshold else bias)
        if hx is not None:
            if hx.shape != (*input.shape[:-1], self.hidden_size):
                expected = (*input.shape[:-1], self.hidden_size)
                raise ValueError(
                    f"OrthogonalRNNCell: expected hx of shape {expected}, got {tuple(hx.shape)}."
                )
            if hx.is_complex() and not z.is_complex():
                raise ValueError(
                    f"OrthogonalRNNCell: hx is {hx.dtype}, but the cell's states are {z.dtype}."
                )
            z = z + hx.to(z.dtype) @ transition.mT
        if callable(self.nonlinearity):
            return self.nonlinearity(z)
        return NONLINEARITIES[self.nonlinearity].define(z, bias)

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

from .._torch import originals, unparametrized_class
from ..api import orthogonal
from ..ops.recurrence.factors import Reflections
from ..ops.recurrence.layer import whole_layer
from ..ops.recurrence.nonlinearities import NONLINEARITIES
from ..ops.recurrence.rollout import run
from ..ops.recurrence.spec import check_choices
from ..parametrizations import CWY, METHODS
from ..parametrizations.chain import own_chain
from ..parametrizations.marks import on_manifold
from .inputs import check_backend, check_counts, check_input, check_switches, name_of
from .leaving import leaves
from .settings import Settings

Activation = str | Callable[[Tensor], Tensor]


def _dtype_for(method: str, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the weights. It is complex for methods that are only unitary."""
    if dtype is None:
        dtype = torch.get_default_dtype()
    if METHODS[method].real or dtype.is_complex:
        return dtype
    return dtype.to_complex()


class _Recurrent(Settings):
    """Hold the weights of recurrent layers, named as torch names them.

    The transitions are orthogonal.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
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
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        self.nonlinearity = nonlinearity
        self.method = method
        self._options: dict[str, Any] = {
            "method": method,
            "reflections": reflections,
            "init": init,
            "length": length,
        }
        self._like: dict[str, Any] = {"device": device, "dtype": _dtype_for(method, dtype)}
        if isinstance(nonlinearity, str) and nonlinearity in NONLINEARITIES:
            known = [name for name, f in NONLINEARITIES.items() if f.complex]
            if self._like["dtype"].is_complex and nonlinearity not in known:
                raise ValueError(
                    f"{type(self).__name__}: nonlinearity {nonlinearity!r} has no complex form, "
                    f"and the weights are {self._like['dtype']}. "
                    f"Use one of {', '.join(map(repr, known))}."
                )

    @property
    def _threshold(self) -> bool:
        """Return whether the bias is the threshold of the nonlinearity."""
        return self.nonlinearity == "modrelu"

    def _add(self, suffix: str, input_size: int) -> None:
        """Add a layer in one direction: input map, orthogonal transition and bias.

        The input map and the bias are drawn as torch draws them.
        """
        n = self.hidden_size
        bound = 1 / math.sqrt(n)
        weight = _uniform(bound, n, input_size, **self._like)
        self.register_parameter(f"weight_ih{suffix}", weight)
        self.register_parameter(f"weight_hh{suffix}", nn.Parameter(torch.zeros(n, n, **self._like)))
        if self.bias:
            like = self._like
            if self._threshold:
                # The threshold of modReLU is real for complex states too.
                like = {**like, "dtype": like["dtype"].to_real()}
                bound = 0.01
            self.register_parameter(f"bias_ih{suffix}", _uniform(bound, n, **like))
        orthogonal(self, f"weight_hh{suffix}", **self._options)

    def _assign(self, name: str, q: Tensor) -> None:
        """Give a transition this value, or raise if it is not orthogonal."""
        chart = on_manifold(self).get(name)
        if chart is None:
            setattr(self, name, q)
        else:
            getattr(self, name).copy_(chart(chart.right_inverse(q)))

    def _transition(self, suffix: str) -> Tensor | Reflections:
        """Return Q, or for CWY its reflections: the recurrence then takes the cheaper form."""
        name = f"weight_hh{suffix}"
        if not parametrize.is_parametrized(self, name):
            return getattr(self, name)
        chain = cast(
            parametrize.ParametrizationList, cast(nn.ModuleDict, self.parametrizations)[name]
        )
        chart = chain[0]
        if not isinstance(chart, CWY) or len(chain) > 1:
            return getattr(self, name)
        v, *phase = originals(chain)
        return Reflections(
            v,
            signs=lambda: chart.diagonal(tuple(phase)),
            matrix=lambda: getattr(self, name),
        )

    def _check_torch(self) -> None:
        """Raise unless torch has a network like this."""
        real = not cast(Tensor, next(self.parameters())).is_complex()
        if self.nonlinearity not in ("tanh", "relu") or not real:
            raise ValueError(
                f"{name_of(self)}.to_torch: torch has real networks with tanh and relu only, "
                f"and this one has nonlinearity={self.nonlinearity!r}, "
                f"dtype={next(self.parameters()).dtype}. "
                "To deploy it, call cwy.bake and torch.export or torch.onnx.export."
            )


def _uniform(bound: float, *shape: int, **like: Any) -> nn.Parameter:
    """Return a parameter with entries, or their real and imaginary parts, uniform in ±bound."""
    drawn = torch.empty(*shape, **like)
    if drawn.is_complex():
        torch.view_as_real(drawn).uniform_(-bound, bound)
    else:
        drawn.uniform_(-bound, bound)
    return nn.Parameter(drawn)


def _check_dropout(dropout: float) -> None:
    number = isinstance(dropout, numbers.Real) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout <= 1:
        raise ValueError(f"OrthogonalRNN: dropout must be a probability, got {dropout!r}.")


class OrthogonalRNN(_Recurrent):
    r"""Run ``torch.nn.RNN`` with an orthogonal transition: $h_t = f(Q h_{t-1} + W x_t + b)$.

    Takes what ``torch.nn.RNN`` takes, in the same order, and returns what it returns. With complex
    weights the transition is unitary.

    Args:
        input_size, hidden_size, num_layers: as in torch.
        nonlinearity: "tanh", "relu", "leaky_relu", "abs", "modrelu" or "identity". A function of
            your own takes the slow path.
        bias: one per layer (torch has two that are added). For "modrelu" it is the threshold.
        batch_first, dropout, bidirectional, device, dtype: as in torch. A complex dtype makes
            states complex.
        method: a square method of :data:`cwy.METHODS`. Those that are only unitary make weights and
            states complex.
        reflections: L of the methods by reflections. With few, states are multiplied in low-rank
            form, without forming Q.
        init, length: initial value of the transition and norm of its vectors, as in
            :func:`cwy.orthogonal`.
        memory: "store", "checkpoint" or "reversible": what is kept for the backward pass, see
            :func:`~cwy.ops.rollout`.
        output: "all" states of the last layer, or only the "last", without storing the others.
        backend: of :func:`~cwy.ops.rollout`.

    Attributes:
        weight_ih_l0, weight_hh_l0, bias_ih_l0: ``(N, input_size)``, Q itself ``(N, N)``, ``(N,)``.
            Further layers have the suffix ``_l1``, the backward direction ``_l0_reverse``.
            ``rnn.weight_hh_l0 = Q`` assigns an orthogonal matrix.

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
            bias=bias,
            nonlinearity=nonlinearity,
            method=method,
            reflections=reflections,
            init=init,
            device=device,
            dtype=dtype,
            length=length,
        )
        check_counts("OrthogonalRNN", num_layers=num_layers)
        check_switches("OrthogonalRNN", batch_first=batch_first, bidirectional=bidirectional)
        _check_dropout(dropout)
        check_choices("OrthogonalRNN", nonlinearity, output, memory)
        check_backend("OrthogonalRNN", "rollout", backend)
        self.num_layers = num_layers
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.memory = memory
        self.output = output
        self.backend = backend
        self._add_layers()

    def _add_layers(self) -> None:
        features = self.input_size
        for layer in range(self.num_layers):
            suffixes = self._suffixes(layer)
            for suffix in suffixes:
                self._add(suffix, features)
            features = self.hidden_size * len(suffixes)

    def _suffixes(self, layer: int) -> list[str]:
        """Return what the names of a layer's weights end with, for each direction."""
        if self.bidirectional:
            return [f"_l{layer}", f"_l{layer}_reverse"]
        return [f"_l{layer}"]

    def _all_suffixes(self) -> list[str]:
        return [suffix for layer in range(self.num_layers) for suffix in self._suffixes(layer)]

    @classmethod
    def from_torch(cls, rnn: nn.RNN, **options) -> OrthogonalRNN:
        """Return the same network as a ``torch.nn.RNN`` whose transitions are orthogonal already.

        Raises if a transition is not orthogonal.

        Args:
            rnn: its weights are copied.
            options: the keywords of this class. ``reflections`` must reach the transitions.
        """
        kind = type(rnn)
        if parametrize.is_parametrized(rnn):
            kind = unparametrized_class(rnn)
        if kind is not nn.RNN:
            raise TypeError(
                f"OrthogonalRNN.from_torch: expected a torch.nn.RNN, got {type(rnn).__name__}."
            )
        if rnn.proj_size:
            raise ValueError("OrthogonalRNN.from_torch: projections (proj_size) are not supported.")
        like = cast(Tensor, rnn.weight_ih_l0)
        ours = cls(
            rnn.input_size,
            rnn.hidden_size,
            rnn.num_layers,
            rnn.nonlinearity,
            rnn.bias,
            rnn.batch_first,
            rnn.dropout,
            rnn.bidirectional,
            like.device,
            like.dtype,
            **options,
        )
        with torch.no_grad():
            for suffix in ours._all_suffixes():
                getattr(ours, f"weight_ih{suffix}").copy_(getattr(rnn, f"weight_ih{suffix}"))
                ours._assign(f"weight_hh{suffix}", getattr(rnn, f"weight_hh{suffix}").detach())
                if rnn.bias:
                    bias = getattr(rnn, f"bias_ih{suffix}") + getattr(rnn, f"bias_hh{suffix}")
                    getattr(ours, f"bias_ih{suffix}").copy_(bias)
        return ours.train(rnn.training)

    @torch.no_grad()
    def to_torch(self) -> nn.RNN:
        """Return the same network as a ``torch.nn.RNN``: for "tanh" and "relu", with real weights.

        Its weights are copies, its transitions ordinary parameters, and its second bias is zero. It
        returns all states.
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
        for suffix in self._all_suffixes():
            _copy(self, theirs, suffix)
        return theirs.train(self.training)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """Return the weights of each layer and direction: input map, transition Q and any bias."""
        names = ["weight_ih", "weight_hh"]
        if self.bias:
            names.append("bias_ih")
        return [[getattr(self, name + suffix) for name in names] for suffix in self._all_suffixes()]

    def flatten_parameters(self) -> None:
        """Do nothing. Torch's layers have this method, and what trains them calls it."""

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run all steps, as ``torch.nn.RNN`` does.

        Args:
            input: ``(T, B, input_size)``, ``(B, T, input_size)`` with ``batch_first``,
                ``(T, input_size)`` for one sequence, or a packed sequence.
            hx: ``(layers, B, hidden_size)``, the first states, zero by default. A bidirectional
                network has two layers of them per layer.

        Returns:
            The states of the last layer, in the layout of ``input``, and the last states of every
            layer, in the layout of ``hx``.
        """
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        return self._run(input, hx)

    def _run(self, input: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output for sequences of one length, and the last states."""
        self._check_features(input)
        x = self._time_first(input)
        check_input(self, input, cast(Tensor, self.weight_ih_l0), x.shape[0])
        unbatched = input.dim() == 2
        h0 = self._first_states(hx, x.shape[1], x.device, unbatched=unbatched)
        x, hn = self._run_layers(x, h0, None)
        if unbatched:
            hn = hn.squeeze(1)
        if unbatched and self.output == "last":
            return x.squeeze(0), hn
        if unbatched:
            return x.squeeze(1), hn
        if self.batch_first and self.output == "all":
            return x.transpose(0, 1), hn
        return x, hn

    def _run_packed(
        self, packed: PackedSequence, hx: Tensor | None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Return the output for a packed sequence, and the last states."""
        x = packed.data
        self._check_features(x)
        check_input(self, x, cast(Tensor, self.weight_ih_l0), x.shape[0])
        h0 = self._first_states(hx, int(packed.batch_sizes[0]), x.device)
        if packed.sorted_indices is not None:
            h0 = h0[:, packed.sorted_indices]
        x, hn = self._run_layers(x, h0, packed.batch_sizes)
        order = packed.unsorted_indices
        if order is not None:
            hn = hn[:, order]
        if self.output == "all":
            return PackedSequence(x, packed.batch_sizes, packed.sorted_indices, order), hn
        if order is not None:
            x = x[order]
        return x, hn

    def _run_layers(
        self, x: Tensor, h0: Tensor, batch_sizes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers in all directions.

        Args:
            x: ``(T, B, features)``, or the rows of a packed sequence.
            h0: ``(layers and directions, B, N)``, the first states.
            batch_sizes: the sequences that go on at each step of a packed sequence, else None.

        Returns:
            The states of the last layer, or its last states if only these are wanted, and the last
            states of every layer and direction.
        """
        last: list[Tensor] = []
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout and self.training:
                x = nn.functional.dropout(x, self.dropout)
            wanted = "all"
            if layer == self.num_layers - 1:
                wanted = self.output
            outputs = []
            for suffix in self._suffixes(layer):
                states, h = self._direction(x, h0[len(last)], suffix, batch_sizes, wanted)
                last.append(h)
                if states is None:
                    states = h
                outputs.append(states)
            x = outputs[0]
            if len(outputs) > 1:
                x = torch.cat(outputs, -1)
        if len(last) == 1:
            return x, last[0].unsqueeze(0)
        return x, torch.stack(last)

    def _check_features(self, x: Tensor) -> None:
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"OrthogonalRNN: expected input of {self.input_size} features, "
                f"got shape {tuple(x.shape)}."
            )

    def _time_first(self, x: Tensor) -> Tensor:
        """Return the input as ``(T, B, features)``."""
        if x.dim() not in (2, 3):
            raise ValueError(
                "OrthogonalRNN: expected input of 2 (unbatched) or 3 dimensions, "
                f"got shape {tuple(x.shape)}."
            )
        if x.dim() == 2:
            return x.unsqueeze(1)
        if self.batch_first:
            return x.transpose(0, 1)
        return x

    def _first_states(
        self, hx: Tensor | None, batch: int, device: torch.device, *, unbatched: bool = False
    ) -> Tensor:
        """Return the first states of all layers and directions, zero by default."""
        directions = len(self._suffixes(0))
        shape = (self.num_layers * directions, batch, self.hidden_size)
        dtype = cast(Tensor, self.weight_ih_l0).dtype
        if hx is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        if hx.is_complex() and not dtype.is_complex:
            raise ValueError(
                f"OrthogonalRNN: hx is {hx.dtype}, but the layer's states are {dtype}."
            )
        given = hx
        expected = shape
        if unbatched:
            expected = (shape[0], shape[2])
            if hx.dim() == 2:
                given = hx.unsqueeze(1)
        if given.shape != shape:
            raise ValueError(
                f"OrthogonalRNN: expected hx of shape {expected}, got {tuple(hx.shape)}."
            )
        return given.to(dtype)

    def _direction(
        self, x: Tensor, h0: Tensor, suffix: str, batch_sizes: Tensor | None, output: str
    ) -> tuple[Tensor | None, Tensor]:
        """Run one layer in one direction.

        Returns:
            The states of every step like x, or None if only the last are wanted, and the last
            states.
        """
        if not suffix.endswith("_reverse"):
            return self._recur(x, h0, suffix, batch_sizes, output)
        order = None
        if batch_sizes is not None:
            order = _reversal(batch_sizes).to(x.device)
        states, last = self._recur(_reversed(x, order), h0, suffix, batch_sizes, output)
        if states is not None:
            states = _reversed(states, order)
        return states, last

    def _recur(
        self, x: Tensor, h0: Tensor, suffix: str, batch_sizes: Tensor | None, output: str
    ) -> tuple[Tensor | None, Tensor]:
        """Run the recurrence of one layer forward in time. Returns what :meth:`_direction` does."""
        weight = getattr(self, f"weight_ih{suffix}")
        bias = getattr(self, f"bias_ih{suffix}", None)
        if weight.is_complex():
            x = x.to(weight.dtype)
        backend = self.backend
        memory = self.memory
        if leaves(self, f"weight_hh{suffix}"):
            backend = "reference"
            memory = "store"
        if weight.is_cuda and memory == "store" and output == "all" and batch_sizes is None:
            found = self._whole_layer(x, h0, suffix)
            if found is not None:
                return found
        weight_by_chunk = weight
        if memory == "store":
            # One product over all steps, the bias with it where it is not a threshold. Kernels add
            # it for nothing, and its gradient would be one more pass over all steps.
            weight_by_chunk = None
            if self._threshold or weight.is_cuda:
                x = nn.functional.linear(x, weight)
            else:
                x = nn.functional.linear(x, weight, bias)
                bias = None
        inputs: Tensor | PackedSequence = x
        if batch_sizes is not None:
            inputs = PackedSequence(x, batch_sizes)
        states, last = run(
            inputs,
            h0,
            self._transition(suffix),
            bias,
            self.nonlinearity,
            weight=weight_by_chunk,
            output=output,
            memory=memory,
            backend=backend,
        )
        if isinstance(states, PackedSequence):
            states = states.data
        if weight.dtype in (torch.float16, torch.bfloat16):
            last = last.to(weight.dtype)
            if states is not None:
                states = states.to(weight.dtype)
        return states, last

    def _whole_layer(self, x: Tensor, h0: Tensor, suffix: str) -> tuple[Tensor, Tensor] | None:
        """Return what :meth:`_recur` does from one node of autograd, None if it can't serve."""
        if torch.compiler.is_compiling() or self.backend != "auto":
            return None
        if not isinstance(self.nonlinearity, str):
            return None
        chain = own_chain(self, f"weight_hh{suffix}")
        if chain is None:
            return None
        chart = chain.plain_map()
        if not isinstance(chart, CWY):
            return None
        weight = getattr(self, f"weight_ih{suffix}")
        bias = getattr(self, f"bias_ih{suffix}", None)
        return whole_layer(x, h0, chain.original, chart.signs, weight, bias, self.nonlinearity)


def _copy(ours: nn.Module, theirs: nn.Module, suffix: str) -> None:
    """Copy a layer's weights to torch's, which has two biases that it adds."""
    for name in ("weight_ih", "weight_hh", "bias_ih"):
        value = getattr(ours, name + suffix, None)
        if value is not None:
            getattr(theirs, name + suffix).copy_(value)
    bias = getattr(theirs, f"bias_hh{suffix}", None)
    if bias is not None:
        bias.zero_()


def _reversed(x: Tensor, order: Tensor | None) -> Tensor:
    """Return the steps in reverse order, those of a packed sequence by the order of its rows."""
    if order is None:
        return x.flip(0)
    return x[order]


def _reversal(sizes: Tensor) -> Tensor:
    """Return the order of a packed sequence's rows that reverses each sequence within its length.

    Args:
        sizes: the sequences that go on at each step.
    """
    steps = torch.arange(len(sizes))
    starts = sizes.cumsum(0) - sizes
    lengths = (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)
    step = steps.repeat_interleave(sizes)
    row = torch.arange(int(sizes.sum())) - starts[step]
    return starts[lengths[row] - 1 - step] + row


class OrthogonalRNNCell(_Recurrent):
    r"""Compute ``torch.nn.RNNCell`` with an orthogonal transition: one step $h' = f(Qh + Wx + b)$.

    Args:
        input_size, hidden_size, bias, device, dtype: as in torch.
        nonlinearity: as in :class:`OrthogonalRNN`.
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
            bias=bias,
            nonlinearity=nonlinearity,
            method=method,
            reflections=reflections,
            init=init,
            device=device,
            dtype=dtype,
            length=length,
        )
        check_choices("OrthogonalRNNCell", nonlinearity, "all", "store")
        self._add("", input_size)

    @torch.no_grad()
    def to_torch(self) -> nn.RNNCell:
        """Return the same cell as a ``torch.nn.RNNCell``. See :meth:`OrthogonalRNN.to_torch`."""
        self._check_torch()
        like = {"device": self.weight_ih.device, "dtype": self.weight_ih.dtype}
        theirs = nn.RNNCell(
            self.input_size, self.hidden_size, self.bias, cast(str, self.nonlinearity), **like
        )
        _copy(self, theirs, "")
        return theirs.train(self.training)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state, ``(B, hidden_size)``, from input and state of one step.

        Args:
            input: ``(B, input_size)``, or ``(input_size,)`` for one sequence.
            hx: ``(B, hidden_size)``, the state, zero by default.
        """
        if input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"OrthogonalRNNCell: expected input (*, {self.input_size}), "
                f"got shape {tuple(input.shape)}."
            )
        weight = self.weight_ih
        transition = self.weight_hh
        bias = getattr(self, "bias_ih", None)
        check_input(self, input, weight)
        x = input
        if weight.is_complex():
            x = input.to(weight.dtype)
        if self._threshold:
            z = nn.functional.linear(x, weight)
        else:
            z = nn.functional.linear(x, weight, bias)
        if hx is not None:
            expected = (*input.shape[:-1], self.hidden_size)
            if hx.shape != expected:
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

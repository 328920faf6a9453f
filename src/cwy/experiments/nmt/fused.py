"""All steps of a recurrence on a GPU, with one product and one kernel per step each way.

The kernel attends to the source and computes the pointwise part of the cell. Autograd launches
more than twenty kernels per step for the same.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ...ops import _nvrtc
from ...ops._precision import without_tf32
from ...ops.recurrence.nonlinearities import SLOPE
from ...ops.recurrence.tiling import NONLINEARITIES, TYPES
from .pointwise import CELLS, Lstm, Pointwise, State

KERNELS = Path(__file__).parent / "kernels" / "step.cu"
MOST_THREADS = 1024
"""The largest number of threads per block."""
MOST_SHARED_BYTES = 48 * 1024
"""The largest shared memory per block."""

# The tensors of one step. Absent ones are null.
#   x            what the word gives the cell
#   product      the query, and then the product with the state
#   h, c         the state before the step
#   vector, threshold, entries, score, lengths  as Pointwise and Source have them
#   next, next_c  the state after the step
#   rounded      the same in half precision
#   weights      the attention
#   kept         numbers that forward keeps for backward
#   to_next      the gradient that the state after the step gets from outside
#   through      the gradient of that state by way of the next product
#   direct       the gradient of that state past the next product, for an LSTM that of c. It is
#                replaced by that of the state before
#   to_x, to_product  the gradients of x and of the product
#   to_entries   the sum over steps of the gradients of keys. Those of values are not written
#   to_score, to_vector, to_threshold  sums over steps, with a row for each sentence
StepTensors = _nvrtc.structure(
    "StepTensors",
    x="const float*",
    product="const void*",
    h="const float*",
    c="const float*",
    vector="const float*",
    threshold="const float*",
    entries="const void*",
    score="const float*",
    lengths="const int*",
    next="float*",
    next_c="float*",
    rounded="void*",
    weights="float*",
    kept="float*",
    to_next="const float*",
    through="const void*",
    direct="float*",
    to_x="float*",
    to_product="void*",
    to_entries="float*",
    to_score="float*",
    to_vector="float*",
    to_threshold="float*",
    n="int",
    positions="int",
)


class Source(NamedTuple):
    """Hold what a decoder attends to.

    Attributes:
        entries: for each word its key, and then its value, ``(S, B, N + C)``.
        score: v ``(N,)``.
        lengths: words of each sentence, ``(B,)``, int32. What lies beyond is not read.
    """

    entries: Tensor
    score: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Form:
    """Describe a variant of the kernels.

    Attributes:
        cell: the kind of cell.
        nonlinearity: its name.
        attends: whether it attends to a source.
        dtype: that of products and entries.
    """

    cell: type[Pointwise]
    nonlinearity: str
    attends: bool
    dtype: torch.dtype

    @property
    def contexts(self) -> int:
        """Return the numbers per unit that attention adds to the cell's input."""
        if self.attends:
            return self.cell.contexts
        return 0

    @property
    def macros(self) -> dict[str, int | float]:
        """Return the constants of the source."""
        cells = {cell.__name__.upper(): number for number, cell in enumerate(CELLS)}
        names = {name.upper(): number for name, number in NONLINEARITIES.items()}
        types = {str(dtype).removeprefix("torch.").upper(): code for dtype, code in TYPES.items()}
        return {
            **cells,
            **names,
            **types,
            "CELL": CELLS.index(self.cell),
            "NONLINEARITY": NONLINEARITIES[self.nonlinearity],
            "SLOPE": SLOPE,
            "INPUTS": self.cell.inputs,
            "CONTEXTS": self.contexts,
            "PRODUCTS": self.cell.products,
            "KEPT": self.cell.kept,
            "TYPE": TYPES[self.dtype],
            "MOST_THREADS": MOST_THREADS,
        }


def serves(x: Tensor, matrix: Tensor, positions: int = 0) -> bool:
    """Return whether the kernels take such inputs.

    Args:
        x: the inputs, ``(T, B, K)``.
        matrix: that of the products.
        positions: the most words of a source, 0 without one.
    """
    if not _on_gpu(x):
        return False
    if x.dtype != torch.float32 or matrix.dtype not in TYPES or x.numel() == 0:
        return False
    return _shared_bytes(positions, MOST_THREADS) <= MOST_SHARED_BYTES


def _on_gpu(x: Tensor) -> bool:
    """Return whether kernels can be compiled for the device of x."""
    return x.is_cuda and not torch.version.hip and _nvrtc.why_not() is None


def roll(
    x: Tensor,
    matrix: Tensor,
    pointwise: Pointwise,
    state: State,
    source: Source | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute all steps of a cell, with attention to a source before each of them.

    Args:
        x: what the words give the cell, ``(T, B, K)``.
        matrix: ``(W, N)``, that of the query above that of the state. Without a source, only the
            latter.
        pointwise: the cell after its products.
        state: the first one.
        source: to attend to.

    Returns:
        The states ``(T, B, N)``, and the attention ``(T, B, S)`` without a gradient. The latter is
        None without a source.
    """
    form = Form(type(pointwise), pointwise.nonlinearity, source is not None, matrix.dtype)
    h = state[0]
    c = None
    if form.cell is Lstm:
        c = state[1]
    given = _Given(x, matrix, h, c, pointwise.vector, pointwise.threshold)
    if source is not None:
        # Outside of autocast they may be in another precision.
        entries = source.entries.to(matrix.dtype)
        given = given._replace(entries=entries, score=source.score, lengths=source.lengths)
    given = _Given(*cast(list[Any], [_contiguous(tensor) for tensor in given]))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        return _Roll.apply(form, *given)
    steps = _forward(form, given, keeps=False)
    return steps.states, steps.weights


class _Given(NamedTuple):
    """Hold the tensors that :func:`roll` takes."""

    x: Tensor
    matrix: Tensor
    h: Tensor
    c: Tensor | None
    vector: Tensor | None
    threshold: Tensor | None
    entries: Tensor | None = None
    score: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def positions(self) -> int:
        """Return the most words of a source, 0 without one."""
        if self.entries is None:
            return 0
        return len(self.entries)


class _Steps(NamedTuple):
    """Hold the numbers of all steps.

    Attributes:
        states: after each step, ``(T, B, N)``.
        weights: the attention, ``(T, B, S)``, or None.
        rounded: the first state and those after each step in half precision,
            ``(T + 1, B, N)``, or None.
        cells: the first c and those after each step, ``(T + 1, B, N)``, or None.
        products: ``(T, B, W)``. They share one place if nothing is kept.
        kept: what the kernel keeps, ``(T, B, *)``, or None.
    """

    states: Tensor
    weights: Tensor | None
    rounded: Tensor | None
    cells: Tensor | None
    products: Tensor
    kept: Tensor | None


class _Roll(Function):
    @staticmethod
    def forward(ctx, form, *tensors):
        given = _Given(*tensors)
        steps = _forward(form, given, keeps=True)
        ctx.form = form
        ctx.save_for_backward(*given, *steps)
        if steps.weights is not None:
            ctx.mark_non_differentiable(steps.weights)
        return steps.states, steps.weights

    @staticmethod
    def backward(ctx, grad, _):
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "the kernels of translation have no second derivatives, which create_graph=True "
                "asks for. Use float64, or a CPU."
            )
        saved = ctx.saved_tensors
        count = len(_Given._fields)
        given = _Given(*saved[:count])
        steps = _Steps(*saved[count:])
        with without_tf32("cuda"):
            gradients = _backward(ctx.form, given, steps, grad.contiguous())
        return None, *gradients


def _forward(form: Form, given: _Given, *, keeps: bool) -> _Steps:
    """Compute all steps."""
    steps = _allocate(form, given, keeps)
    arguments = _Arguments(given, steps)
    launch = _prepared("forward", form, given)
    before = (given.h, *steps.states.unbind())
    if steps.rounded is not None:
        before = steps.rounded.unbind()
    matrix = given.matrix.mT
    with without_tf32("cuda"):
        for t, product in enumerate(steps.products.unbind()):
            torch.mm(before[t], matrix, out=product)
            launch(arguments.at(t))
    return steps


def _allocate(form: Form, given: _Given, keeps: bool) -> _Steps:
    """Return places for all steps. Those that are read before a step have the first state."""
    count, batch, _ = given.x.shape
    h = given.h
    n = h.shape[-1]
    width = len(given.matrix)
    weights = None
    if form.attends:
        weights = h.new_empty(count, batch, given.positions)
    rounded = None
    if form.dtype != torch.float32:
        rounded = h.new_empty(count + 1, batch, n, dtype=form.dtype)
        rounded[0] = h
    cells = None
    if given.c is not None:
        cells = h.new_empty(count + 1, batch, n)
        cells[0] = given.c
    kept = None
    if keeps:
        kept = h.new_empty(count, batch, form.cell.kept * n)
        products = given.matrix.new_empty(count, batch, width)
    else:
        products = given.matrix.new_empty(1, batch, width).expand(count, -1, -1)
    return _Steps(h.new_empty(count, batch, n), weights, rounded, cells, products, kept)


class _Moving(NamedTuple):
    """Name a field, with its address at the first step and the bytes from step to step."""

    name: str
    begin: int
    stride: int


class _Arguments:
    """Hold the arguments of a kernel, and move them from step to step.

    Args:
        given, steps: the tensors that both kernels take.
    """

    def __init__(self, given: _Given, steps: _Steps) -> None:
        self.fields = StepTensors(
            vector=_address(given.vector),
            threshold=_address(given.threshold),
            entries=_address(given.entries),
            score=_address(given.score),
            lengths=_address(given.lengths),
            n=given.h.shape[-1],
            positions=given.positions,
        )
        self._first = _address(given.h)
        self._moving: list[_Moving] = []
        self.move("x", given.x)
        self.move("product", steps.products)
        self.move("h", steps.states, ahead=-1)
        self.move("next", steps.states)
        self.move("c", steps.cells)
        self.move("next_c", steps.cells, ahead=1)
        self.move("rounded", steps.rounded, ahead=1)
        self.move("weights", steps.weights)
        self.move("kept", steps.kept)

    def move(self, name: str, tensor: Tensor | None, ahead: int = 0) -> None:
        """Let a field be ``tensor[t + ahead]`` at step t."""
        if tensor is not None:
            stride = tensor.stride(0) * tensor.element_size()
            self._moving.append(_Moving(name, tensor.data_ptr() + ahead * stride, stride))

    def at(self, t: int) -> ctypes.Structure:
        """Return the arguments of step t."""
        for moving in self._moving:
            setattr(self.fields, moving.name, moving.begin + t * moving.stride)
        if t == 0:
            self.fields.h = self._first
        return self.fields


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr()


class _Gradients(NamedTuple):
    """Hold the gradients of all steps.

    Attributes:
        x, products: ``(T, B, *)``.
        through: what the state before a step gets by way of its product, ``(B, N)``.
        direct: what it gets past the product, ``(B, N)``. For an LSTM that of c.
        entries: those of the keys, and zeros for the values, ``(S, B, N + C)``, or None.
        score, vector, threshold: a row for each sentence, ``(B, N)``, or None.
    """

    x: Tensor
    products: Tensor
    through: Tensor
    direct: Tensor
    entries: Tensor | None
    score: Tensor | None
    vector: Tensor | None
    threshold: Tensor | None


def _backward(form: Form, given: _Given, steps: _Steps, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of what was given, from those of the states."""
    made = _allocate_gradients(given, steps)
    arguments = _Arguments(given, steps)
    arguments.move("to_next", grad)
    arguments.move("to_x", made.x)
    arguments.move("to_product", made.products)
    fields = arguments.fields
    fields.through = _address(made.through)
    fields.direct = _address(made.direct)
    fields.to_entries = _address(made.entries)
    fields.to_score = _address(made.score)
    fields.to_vector = _address(made.vector)
    fields.to_threshold = _address(made.threshold)
    launch = _prepared("backward", form, given)
    for t, part in reversed(list(enumerate(made.products.unbind()))):
        launch(arguments.at(t))
        torch.mm(part, given.matrix, out=made.through)
    return tuple(_gathered(form, given, steps, made))


def _allocate_gradients(given: _Given, steps: _Steps) -> _Gradients:
    """Return places for gradients. Those that are sums are zero."""
    h = given.h
    entries = None
    score = None
    if given.entries is not None:
        entries = h.new_zeros(given.entries.shape)
        score = torch.zeros_like(h)
    vector = None
    if given.vector is not None:
        vector = torch.zeros_like(h)
    threshold = None
    if given.threshold is not None:
        threshold = torch.zeros_like(h)
    return _Gradients(
        x=torch.empty_like(given.x),
        products=torch.empty_like(steps.products),
        through=given.matrix.new_zeros(h.shape),
        direct=torch.zeros_like(h),
        entries=entries,
        score=score,
        vector=vector,
        threshold=threshold,
    )


def _gathered(form: Form, given: _Given, steps: _Steps, made: _Gradients) -> _Given:
    """Return the gradients of what was given, after the first step has got its own."""
    h = made.through.to(given.h.dtype)
    c = None
    if given.c is None:
        h = h + made.direct
    else:
        c = made.direct
    if steps.rounded is None:
        before = torch.cat([given.h.unsqueeze(0), steps.states[:-1]])
    else:
        before = steps.rounded[:-1]
    entries = made.entries
    if entries is not None:
        assert steps.weights is not None
        n = given.h.shape[-1]
        # For each sentence a product, summed over the steps.
        contexts = made.x[..., : form.contexts * n].transpose(0, 1)
        values = entries[..., n:].transpose(0, 1)
        torch.bmm(steps.weights.permute(1, 2, 0), contexts, out=values)
        entries = entries.to(form.dtype)
    return _Given(
        x=made.x,
        matrix=made.products.flatten(0, 1).mT @ before.flatten(0, 1),
        h=h,
        c=c,
        vector=_row_sum(made.vector),
        threshold=_row_sum(made.threshold),
        entries=entries,
        score=_row_sum(made.score),
    )


def _row_sum(rows: Tensor | None) -> Tensor | None:
    if rows is None:
        return None
    return rows.sum(0)


def _prepared(name: str, form: Form, given: _Given) -> Callable[..., None]:
    """Return the launch of a kernel, with a block for each sentence."""
    batch, n = given.h.shape
    return _launch(name, form, batch, n, given.positions, given.h.get_device())


@functools.lru_cache(maxsize=1024)
def _launch(
    name: str, form: Form, batch: int, n: int, positions: int, device: int
) -> Callable[..., None]:
    threads = min(MOST_THREADS, -(-n // 32) * 32)
    with torch.cuda.device(device):
        kernel = _nvrtc.kernel(
            KERNELS,
            name,
            form.macros,
            shared=_shared_bytes(positions, threads),
            structures=(StepTensors,),
        )
        return kernel.prepare((batch, 1), threads)


def _shared_bytes(positions: int, threads: int) -> int:
    """Return the shared memory of a block: a sum per position, and those of its warps.

    It is rounded up, so that sources of several lengths share a kernel.
    """
    floats = positions + max(positions, threads // 32)
    return -(-floats // 256) * 1024

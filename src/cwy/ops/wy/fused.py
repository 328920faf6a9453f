"""Kernels that go from vectors to a matrix, and from its gradient to theirs, in one launch each."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import _nvrtc
from .._nvrtc import copy_of
from .cooperative import Division, Source, address, divide, next_ticket, padded, workspace_words

Result = Literal["y", "matrix", "truncated"]

# `y` is U T^T, of the first l rows if truncated. `out` is Q or its first columns, times `signs`.
# `s` is S in tiles. `parts` holds `part_size` numbers for the sums of each matrix. Absent tensors
# are null.
Forward = _nvrtc.structure(
    "Forward",
    v="const float*",
    signs="const float*",
    u="float*",
    reciprocal="float*",
    t="float*",
    y="float*",
    out="float*",
    s="double*",
    parts="double*",
    flags="unsigned long long*",
    ticket="unsigned long long",
    batch="int",
    n="int",
    l="int",
    truncated="int",
    chunks="int",
    splits="int",
    groups="int",
    part_size="int",
)
# `factor` is y if WIDE, else t. `q` is given if WIDE. `w`, `a` and `b` are given if ENDING.
# For FACTORS `a` and `b` are the gradients of U (null for zero) and of T. `parts` is as above.
# Everything else from `w` to `omega` is scratch memory, which :func:`_scratch` sizes.
Backward = _nvrtc.structure(
    "Backward",
    z="const float*",
    u="const float*",
    factor="const float*",
    reciprocal="const float*",
    signs="const float*",
    q="const float*",
    w="float*",
    a="float*",
    b="float*",
    c="float*",
    d="float*",
    e="float*",
    k="float*",
    top="float*",
    x="float*",
    y="float*",
    omega="float*",
    dv="float*",
    parts="double*",
    flags="unsigned long long*",
    ticket="unsigned long long",
    batch="int",
    n="int",
    l="int",
    chunks="int",
    splits="int",
    groups="int",
    part_size="int",
)


class Kind(enum.IntEnum):
    """Name what the gradient is of, by the values of the macro KIND."""

    NARROW = 0  # a matrix, L < N
    WIDE = 1  # a matrix, L >= N
    TRUNCATED = 2  # the first columns of a matrix
    ENDING = 3  # a matrix, L < N, whose large products are given
    FACTORS = 4  # U and T


_KINDS = {kind.name: kind.value for kind in Kind}
FORWARD = Source("forward.cu", "forward", Forward)
BACKWARD = {
    kind: Source("backward.cu", "backward", Backward, _KINDS | {"KIND": kind.value})
    for kind in Kind
}


class Factors(NamedTuple):
    """Hold the factors of a product of reflections.

    Attributes:
        u: ``(*, N, L)``, the unit columns.
        t: ``(*, L, L)``.
        reciprocal: ``(*, 1, L)``, the reciprocal norms.
    """

    u: Tensor
    t: Tensor
    reciprocal: Tensor


class Formed(NamedTuple):
    """Hold a result, and what its gradient takes.

    Attributes:
        u: ``(*, N, L)``, the unit columns.
        factor: t ``(*, L, L)``, or y ``(*, N, L)`` for a matrix with L >= N.
        reciprocal: ``(*, 1, L)``, the reciprocal norms.
        result: the result.
    """

    u: Tensor
    factor: Tensor
    reciprocal: Tensor
    result: Tensor


def factors(v: Tensor) -> Factors:
    """Compute the factors of ``v (*, N, L)``, float32, on an NVIDIA GPU."""
    v = v.contiguous()
    *batch, _, size = v.shape
    u = torch.empty_like(v)
    t = v.new_empty((*batch, size, size))
    reciprocal = v.new_empty((*batch, 1, size))
    plan = _forward_plan(v.shape, "factors", True, v.get_device())
    _launch_forward(plan, v, None, _Kept(u.data_ptr(), t.data_ptr(), reciprocal.data_ptr()), None)
    return Factors(u, t, reciprocal)


def forward(v: Tensor, wanted: Result, signs: Tensor | None = None) -> Formed:
    """Compute a result, and keep what its gradient takes.

    Args:
        v: ``(*, N, L)``, float32, on an NVIDIA GPU.
        wanted: "y" ``(*, N, L)``, which is U T^T, "matrix" ``(*, N, N)`` or "truncated"
            ``(*, N, L)``.
        signs: ``(*, N)``, of the columns of a "matrix", or ``(*, L)`` of a "truncated" one.
    """
    v = v.contiguous()
    *batch, _, size = v.shape
    plan = _forward_plan(v.shape, wanted, True, v.get_device())
    u = torch.empty_like(v)
    factor = v.new_empty((*batch, plan.factor_rows, size))
    reciprocal = v.new_empty((*batch, 1, size))
    result = v.new_empty(plan.result_shape)
    kept = _Kept(u.data_ptr(), factor.data_ptr(), reciprocal.data_ptr())
    _launch_forward(plan, v, signs, kept, result)
    return Formed(u, factor, reciprocal, result)


class Packed(NamedTuple):
    """Hold a result, and what its gradient takes in one piece of memory: one allocation, not three.

    Attributes:
        kept: u, the factor and the reciprocal norms of :class:`Formed`, one after another.
        result: the result.
    """

    kept: Tensor
    result: Tensor


@dataclass(frozen=True)
class Plan:
    """Hold all that a result and its gradient take from the shape of v.

    Attributes:
        shape: of v.
        wanted: "matrix" or "truncated".
        device: the number of the GPU.
        forward: the launch that keeps what the gradient takes.
    """

    shape: torch.Size
    wanted: Result
    device: int
    forward: _ForwardPlan

    @functools.cached_property
    def result(self) -> _ForwardPlan:
        """Return the launch that keeps nothing but the result."""
        return _forward_plan(self.shape, self.wanted, False, self.device)

    @functools.cached_property
    def backward(self) -> _BackwardPlan:
        """Return the launch of the gradient."""
        kind = Kind.TRUNCATED
        if self.wanted == "matrix":
            kind = Kind.NARROW
            if self.forward.full_rank:
                kind = Kind.WIDE
        return _backward_plan(kind, self.shape, self.device)


@functools.lru_cache(maxsize=1024)
def plan(shape: torch.Size, wanted: Result, device: int) -> Plan:
    """Return the plan for vectors of a shape on a GPU."""
    return Plan(shape, wanted, device, _forward_plan(shape, wanted, True, device))


def packed_forward(plan: Plan, v: Tensor, signs: Tensor | None = None) -> Packed:
    """Compute the same as :func:`forward` for a contiguous v."""
    forward = plan.forward
    memory = v.new_empty(forward.kept_floats)
    result = v.new_empty(forward.result_shape)
    _launch_forward(forward, v, signs, _places(memory, forward), result)
    return Packed(memory, result)


def _places(kept: Tensor, plan: _ForwardPlan) -> _Kept:
    """Return the addresses of u, the factor and the reciprocal norms."""
    u = kept.data_ptr()
    factor = u + 4 * plan.u_floats
    return _Kept(u, factor, factor + 4 * plan.factor_floats)


def unpack(kept: Tensor, plan: Plan) -> Factors:
    """Return u, the factor and the reciprocal norms of :func:`packed_forward` as views."""
    forward = plan.forward
    *batch, _, size = plan.shape
    norms = kept.numel() - forward.u_floats - forward.factor_floats
    u, factor, reciprocal = kept.split([forward.u_floats, forward.factor_floats, norms])
    return Factors(
        u.view(plan.shape),
        factor.view(*batch, forward.factor_rows, size),
        reciprocal.view(*batch, 1, size),
    )


def result_only(plan: Plan, v: Tensor, signs: Tensor | None = None) -> Tensor:
    """Compute the "matrix" or "truncated" result of :func:`forward`, and keep nothing else."""
    result = v.new_empty(plan.result.result_shape)
    _launch_forward(plan.result, v.contiguous(), signs, None, result)
    return result


class _Kept(NamedTuple):
    """Hold the addresses that the kernel writes to for the gradient."""

    u: int
    factor: int
    reciprocal: int


@dataclass(frozen=True)
class _ForwardPlan:
    """Hold all that a forward launch takes from the shape.

    Attributes:
        launch: takes the argument of the kernel.
        constants: that argument, without its addresses.
        words: numbers of 8 bytes of the workspace.
        parts, flags, floats: bytes before the parts of sums, the flags and the numbers of 4 bytes.
        y_floats: floats of a y that is needed on the way to the result, and not kept.
        full_rank: whether y is kept in place of t.
        u_floats, factor_floats, kept_floats: floats of u, of the factor, and of all that is kept.
        factor_rows: rows of the factor.
        result_shape: of the result.
    """

    launch: Callable[[_nvrtc.Structure], None]
    constants: _nvrtc.Structure
    words: int
    parts: int
    flags: int
    floats: int
    y_floats: int
    full_rank: bool
    u_floats: int
    factor_floats: int
    kept_floats: int
    factor_rows: int
    result_shape: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _forward_plan(
    shape: torch.Size, wanted: Result | Literal["factors"], keeps: bool, device: int
) -> _ForwardPlan:
    """Return the plan for vectors of a shape, with or without what the gradient takes."""
    *batch, n, size = shape
    count = math.prod(batch)
    full_rank = keeps and wanted == "matrix" and size >= n
    u_floats = count * n * size
    y_floats = 0
    if not full_rank:
        y_floats = count * size * _y_rows(wanted, n, size)
    floats = y_floats
    if not keeps:
        floats += u_floats + count * size
    division = divide(FORWARD, count, n, size, device)
    s_numbers = count * padded(size) ** 2
    numbers = s_numbers + count * division.part_size
    factor_rows = size
    result_shape = (*batch, n, size)
    if wanted == "matrix":
        result_shape = (*batch, n, n)
        if size >= n:
            factor_rows = n
    factor_floats = count * factor_rows * size
    constants = Forward(
        truncated=wanted == "truncated", **_divided_fields(count, n, size, division)
    )
    return _ForwardPlan(
        launch=division.launch,
        constants=constants,
        words=workspace_words(division.blocks, numbers, floats),
        parts=8 * s_numbers,
        flags=8 * numbers,
        floats=8 * (numbers + division.blocks),
        y_floats=y_floats,
        full_rank=full_rank,
        u_floats=u_floats,
        factor_floats=factor_floats,
        kept_floats=u_floats + factor_floats + count * size,
        factor_rows=factor_rows,
        result_shape=result_shape,
    )


def _divided_fields(count: int, n: int, size: int, division: Division) -> dict[str, int]:
    """Return the fields that say how ``count`` matrices ``n`` x ``size`` are divided."""
    return {
        "batch": count,
        "n": n,
        "l": size,
        "chunks": division.chunks,
        "splits": division.splits,
        "groups": division.groups,
        "part_size": division.part_size,
    }


def _launch_forward(
    plan: _ForwardPlan,
    v: Tensor,
    signs: Tensor | None,
    kept: _Kept | None,
    result: Tensor | None,
) -> None:
    """Launch the kernel. What is not kept lies in the workspace."""
    work = torch.empty(plan.words, dtype=torch.float64, device=v.device)
    begin = work.data_ptr()
    scratch = begin + plan.floats
    out = address(result)
    fields = copy_of(plan.constants)
    fields.v = v.data_ptr()
    fields.signs = address(signs)
    fields.s = begin
    fields.parts = begin + plan.parts
    fields.flags = begin + plan.flags
    fields.ticket = next_ticket()
    if kept is None:
        fields.u = scratch + 4 * plan.y_floats
        fields.reciprocal = fields.u + 4 * plan.u_floats
        fields.y = scratch
        fields.out = out
        plan.launch(fields)
        return
    fields.u = kept.u
    fields.reciprocal = kept.reciprocal
    if plan.full_rank:
        fields.y = kept.factor
        fields.out = out
    elif plan.y_floats > 0:
        fields.t = kept.factor
        fields.y = scratch
        fields.out = out
    else:
        fields.t = kept.factor
        fields.y = out
    plan.launch(fields)


def _y_rows(wanted: Result | Literal["factors"], n: int, size: int) -> int:
    """Return the rows of a y that is needed on the way to the result, and not kept."""
    if wanted == "truncated":
        return size
    if wanted == "matrix":
        return n
    return 0


def narrow_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Compute the gradient of v from that of a matrix with L < N.

    Args:
        u, t, reciprocal: what :func:`forward` returned.
        z: ``(*, N, N)``, the gradient of the matrix.
        signs: as in :func:`forward`.

    Returns:
        ``(*, N, L)``.
    """
    return _launch_backward(Kind.NARROW, u, _kept_by(u, t, reciprocal), z=z, signs=signs)


def wide_gradient(
    u: Tensor, y: Tensor, reciprocal: Tensor, q: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Compute the gradient of v from that of a matrix q with L >= N, as :func:`narrow_gradient`."""
    return _launch_backward(Kind.WIDE, u, _kept_by(u, y, reciprocal), z=z, q=q, signs=signs)


def truncated_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Compute the gradient of v from that of the first columns, as :func:`narrow_gradient`."""
    return _launch_backward(Kind.TRUNCATED, u, _kept_by(u, t, reciprocal), z=z, signs=signs)


def factors_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, gu: Tensor | None, gt: Tensor
) -> Tensor:
    """Compute the gradient of v from those of u (None for zero) and of t."""
    return _launch_backward(Kind.FACTORS, u, _kept_by(u, t, reciprocal), a=gu, b=gt)


def end_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, *, w: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """Compute the gradient of v for L < N from W, A and B ``(*, N, L)`` of README.md.

    A and B are of the gradient of Q times the signs.
    """
    return _launch_backward(Kind.ENDING, u, _kept_by(u, t, reciprocal), w=w, a=a, b=b)


def packed_gradient(
    plan: Plan,
    kept: Tensor,
    z: Tensor,
    q: Tensor | None = None,
    signs: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of v from that of the result of :func:`packed_forward`.

    Args:
        plan: its plan.
        kept: what it kept.
        z: the gradient of the result.
        q: the result itself, for a matrix with L >= N.
        signs: as there.
    """
    dv = z.new_empty(plan.shape)
    _fill_backward(plan.backward, dv, _places(kept, plan.forward), z=z, q=q, signs=signs)
    return dv


def _kept_by(u: Tensor, factor: Tensor, reciprocal: Tensor) -> _Kept:
    return _Kept(u.data_ptr(), factor.data_ptr(), reciprocal.data_ptr())


@dataclass(frozen=True)
class _BackwardPlan:
    """Hold all that a backward launch takes from the shape.

    Attributes:
        launch: takes the argument of the kernel.
        constants: that argument, without its addresses.
        words: numbers of 8 bytes of the workspace.
        flags: bytes before the flags.
        scratch: bytes before each scratch field of :data:`Backward`.
    """

    launch: Callable[[_nvrtc.Structure], None]
    constants: _nvrtc.Structure
    words: int
    flags: int
    scratch: tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=1024)
def _backward_plan(kind: Kind, shape: torch.Size, device: int) -> _BackwardPlan:
    """Return the plan for the gradient of vectors of a shape."""
    *batch, n, size = shape
    count = math.prod(batch)
    division = divide(BACKWARD[kind], count, n, size, device)
    numbers = count * division.part_size
    places = []
    at = 8 * (numbers + division.blocks)
    total = 0
    for name, floats in _scratch(kind, n, size).items():
        places.append((name, at + 4 * total))
        total += count * floats
    return _BackwardPlan(
        launch=division.launch,
        constants=Backward(**_divided_fields(count, n, size, division)),
        words=workspace_words(division.blocks, numbers, total),
        flags=8 * numbers,
        scratch=tuple(places),
    )


def _launch_backward(
    kind: Kind,
    like: Tensor,
    kept: _Kept,
    *,
    z: Tensor | None = None,
    signs: Tensor | None = None,
    q: Tensor | None = None,
    w: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor:
    """Launch the kernel of a kind, and return the gradient of v, a tensor like ``like``."""
    plan = _backward_plan(kind, like.shape, like.get_device())
    dv = torch.empty_like(like)
    _fill_backward(plan, dv, kept, z=z, signs=signs, q=q, w=w, a=a, b=b)
    return dv


def _fill_backward(
    plan: _BackwardPlan,
    dv: Tensor,
    kept: _Kept,
    *,
    z: Tensor | None = None,
    signs: Tensor | None = None,
    q: Tensor | None = None,
    w: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
) -> None:
    """Launch the kernel of a plan, which writes the gradient of v to ``dv``."""
    work = torch.empty(plan.words, dtype=torch.float64, device=dv.device)
    begin = work.data_ptr()
    # Copies must live until the launch.
    z = _contiguous(z)
    w = _contiguous(w)
    a = _contiguous(a)
    b = _contiguous(b)
    fields = copy_of(plan.constants)
    fields.z = address(z)
    fields.u = kept.u
    fields.factor = kept.factor
    fields.reciprocal = kept.reciprocal
    fields.signs = address(signs)
    fields.q = address(q)
    fields.w = address(w)
    fields.a = address(a)
    fields.b = address(b)
    fields.dv = dv.data_ptr()
    fields.parts = begin
    fields.flags = begin + plan.flags
    fields.ticket = next_ticket()
    for name, offset in plan.scratch:
        setattr(fields, name, begin + offset)
    plan.launch(fields)


def _scratch(kind: Kind, n: int, size: int) -> dict[str, int]:
    """Return the floats of one matrix in each scratch field of :data:`Backward`."""
    square = size * size
    tall = n * size
    if kind == Kind.NARROW:
        return {"d": square, "y": tall, "w": tall, "a": tall, "b": tall}
    if kind == Kind.WIDE:
        return {"k": square, "x": tall, "omega": n * n}
    if kind == Kind.TRUNCATED:
        return dict.fromkeys(("c", "y", "e", "top", "d"), square)
    if kind == Kind.FACTORS:
        return {"e": square, "d": square}
    return {"d": square}


def _contiguous(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.contiguous()

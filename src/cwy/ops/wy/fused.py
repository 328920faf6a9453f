"""Kernels that go from vectors to a matrix, and from its gradient to theirs, in one launch each."""

from __future__ import annotations

import enum
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import _nvrtc
from .cooperative import Source, address, divide, next_ticket, padded, workspace

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
    """What the gradient is of, and the values of the macro KIND."""

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
    """The factors of a product of reflections.

    Attributes:
        u: ``(*, N, L)``, the unit columns.
        t: ``(*, L, L)``.
        reciprocal: ``(*, 1, L)``, the reciprocal norms.
    """

    u: Tensor
    t: Tensor
    reciprocal: Tensor


class Formed(NamedTuple):
    """A result, and what its gradient takes.

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
    _launch_forward(v, "factors", kept=_Kept(u, t, reciprocal))
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
    *batch, n, size = v.shape
    factor_rows = size
    if wanted == "matrix" and size >= n:
        factor_rows = n
    u = torch.empty_like(v)
    factor = v.new_empty((*batch, factor_rows, size))
    reciprocal = v.new_empty((*batch, 1, size))
    result = _empty_result(v, wanted)
    _launch_forward(v, wanted, result, signs, _Kept(u, factor, reciprocal))
    return Formed(u, factor, reciprocal, result)


def result_only(v: Tensor, wanted: Result, signs: Tensor | None = None) -> Tensor:
    """Compute the "matrix" or "truncated" result of :func:`forward`, and keep nothing else."""
    v = v.contiguous()
    result = _empty_result(v, wanted)
    _launch_forward(v, wanted, result, signs)
    return result


def _empty_result(v: Tensor, wanted: Result) -> Tensor:
    if wanted == "matrix":
        return v.new_empty((*v.shape[:-1], v.shape[-2]))
    return torch.empty_like(v)


class _Kept(NamedTuple):
    """Tensors that the kernel writes for the gradient."""

    u: Tensor
    factor: Tensor
    reciprocal: Tensor


class _Addresses(NamedTuple):
    """Where the kernel writes. None is not written."""

    u: int
    reciprocal: int
    t: int | None
    y: int | None
    out: int | None


def _launch_forward(
    v: Tensor,
    wanted: Result | Literal["factors"],
    result: Tensor | None = None,
    signs: Tensor | None = None,
    kept: _Kept | None = None,
) -> None:
    """Launch the kernel. What is not kept lies in the workspace."""
    *batch, n, size = v.shape
    count = math.prod(batch)
    full_rank = kept is not None and wanted == "matrix" and size >= n
    u_floats = count * n * size
    y_floats = 0
    if not full_rank:
        y_floats = count * size * _y_rows(wanted, n, size)
    floats = y_floats
    if kept is None:
        floats += u_floats + count * size
    division = divide(FORWARD, count, n, size, v.get_device())
    s_numbers = count * padded(size) ** 2
    numbers = s_numbers + count * division.part_size
    work = workspace(v, division.blocks, numbers, floats)
    if kept is None:
        u = work.floats + 4 * y_floats
        places = _Addresses(u, u + 4 * u_floats, t=None, y=work.floats, out=address(result))
    else:
        y = None
        if y_floats > 0:
            y = work.floats
        places = _kept_addresses(kept, address(result), y, full_rank)
    division.launch(
        Forward(
            v=v.data_ptr(),
            signs=address(signs),
            u=places.u,
            reciprocal=places.reciprocal,
            t=places.t,
            y=places.y,
            out=places.out,
            s=work.numbers,
            parts=work.numbers + 8 * s_numbers,
            flags=work.flags,
            ticket=next_ticket(),
            batch=count,
            n=n,
            l=size,
            truncated=wanted == "truncated",
            chunks=division.chunks,
            splits=division.splits,
            groups=division.groups,
            part_size=division.part_size,
        )
    )


def _kept_addresses(kept: _Kept, result: int | None, y: int | None, full_rank: bool) -> _Addresses:
    """Return the addresses for a call that keeps its factors.

    Args:
        kept: the tensors that are kept.
        result: where the result goes.
        y: where a y goes that is needed but not kept.
        full_rank: whether y is kept in place of t.
    """
    u = kept.u.data_ptr()
    factor = kept.factor.data_ptr()
    reciprocal = kept.reciprocal.data_ptr()
    if full_rank:
        return _Addresses(u, reciprocal, t=None, y=factor, out=result)
    if y is not None:
        return _Addresses(u, reciprocal, t=factor, y=y, out=result)
    return _Addresses(u, reciprocal, t=factor, y=result, out=None)


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
    return _launch_backward(Kind.NARROW, u, t, reciprocal, z=z, signs=signs)


def wide_gradient(
    u: Tensor, y: Tensor, reciprocal: Tensor, q: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Compute the gradient of v from that of a matrix q with L >= N, as :func:`narrow_gradient`."""
    return _launch_backward(Kind.WIDE, u, y, reciprocal, z=z, q=q, signs=signs)


def truncated_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Compute the gradient of v from that of the first columns, as :func:`narrow_gradient`."""
    return _launch_backward(Kind.TRUNCATED, u, t, reciprocal, z=z, signs=signs)


def factors_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, gu: Tensor | None, gt: Tensor
) -> Tensor:
    """Compute the gradient of v from those of u (None for zero) and of t."""
    return _launch_backward(Kind.FACTORS, u, t, reciprocal, a=gu, b=gt)


def end_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, *, w: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """Compute the gradient of v for L < N from W, A and B ``(*, N, L)`` of README.md.

    A and B are of the gradient of Q times the signs.
    """
    return _launch_backward(Kind.ENDING, u, t, reciprocal, w=w, a=a, b=b)


def _launch_backward(
    kind: Kind,
    u: Tensor,
    factor: Tensor,
    reciprocal: Tensor,
    *,
    z: Tensor | None = None,
    signs: Tensor | None = None,
    q: Tensor | None = None,
    w: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor:
    *batch, n, size = u.shape
    count = math.prod(batch)
    division = divide(BACKWARD[kind], count, n, size, u.get_device())
    dv = torch.empty_like(u)
    scratch = _scratch(kind, n, size)
    floats = count * sum(scratch.values())
    work = workspace(u, division.blocks, count * division.part_size, floats)
    # Copies must live until the launch.
    z = _contiguous(z)
    w = _contiguous(w)
    a = _contiguous(a)
    b = _contiguous(b)
    places = {"w": address(w), "a": address(a), "b": address(b)}
    at = work.floats
    for name, floats in scratch.items():
        places[name] = at
        at += 4 * count * floats
    division.launch(
        Backward(
            z=address(z),
            u=u.data_ptr(),
            factor=factor.data_ptr(),
            reciprocal=reciprocal.data_ptr(),
            signs=address(signs),
            q=address(q),
            dv=dv.data_ptr(),
            parts=work.numbers,
            flags=work.flags,
            ticket=next_ticket(),
            batch=count,
            n=n,
            l=size,
            chunks=division.chunks,
            splits=division.splits,
            groups=division.groups,
            part_size=division.part_size,
            **places,
        )
    )
    return dv


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

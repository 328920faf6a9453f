"""The functions as registered ops, ``torch.ops.cwy.cwy_matrix`` and so on, for compilers.

Compilers do not look into an op. It chooses its backend when it runs, as an eager call does, so
compiled programs reach the kernels. It returns what its backward op takes. The backward ops have no
derivative. Under ``torch.func`` transforms and forward-mode AD the composite serves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import below_autograd, with_lazy_conjugation
from .. import dispatch
from .._library import define
from ..checks import sign_error, wrong_sign
from .composite import sign_columns


def why_not(*tensors: Tensor) -> str | None:
    """Return why the ops can't serve, or None if they can."""
    if not torch.compiler.is_compiling():
        return "they are for compilers"
    return dispatch.why_only_autograd(*tensors)


def wy_factors(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return U and T."""
    u, t, _ = torch.ops.cwy.wy_factors(v)
    return u, t


def cwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    """Return Q, its columns times signs."""
    if _takes(signs, v):
        return torch.ops.cwy.cwy_matrix(v, signs)[0]
    return sign_columns(torch.ops.cwy.cwy_matrix(v, None)[0], signs)


def tcwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    """Return the first columns of Q, times signs."""
    if _takes(signs, v):
        return torch.ops.cwy.tcwy_matrix(v, signs)[0]
    return sign_columns(torch.ops.cwy.tcwy_matrix(v, None)[0], signs)


def _takes(signs: Tensor | None, v: Tensor) -> bool:
    """Return whether an op takes these signs: constants, in the dtype of v."""
    return signs is not None and signs.dtype == v.dtype and not signs.requires_grad


def cwy_multiply(v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    """Return the rows of x mapped by Q, or by its adjoint."""
    return torch.ops.cwy.cwy_multiply(v, x, adjoint)[0]


# These run: a backend that is chosen by the tensors at hand.


def _backend(v: Tensor):
    return dispatch.choose("wy", "auto", v)


def _plain(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors laid out as the fake ones: contiguous, without a lazy conjugation."""
    if tensors[0].is_complex():
        tensors = tuple(x.resolve_conj() for x in tensors)
    return tuple(x.contiguous() for x in tensors)


def _as_in_eager_mode(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that records no graph and resolves lazy conjugations."""

    @functools.wraps(compute)
    def kernel(first: Tensor, *rest: Any) -> Any:
        with torch.no_grad():
            if not first.is_complex():
                return compute(first, *rest)
            with with_lazy_conjugation():
                return compute(first, *rest)

    return kernel


def _check_signs(call: str, signs: Tensor | None) -> None:
    """Raise unless signs are ±1. Only on a CPU are values read without synchronization."""
    if signs is None or signs.device.type != "cpu":
        return
    wrong = wrong_sign(signs)
    if wrong is not None:
        raise sign_error(call, wrong)


@_as_in_eager_mode
def _factors(v: Tensor) -> tuple[Tensor, ...]:
    return _plain(*_backend(v).forward_factors(v))


@_as_in_eager_mode
def _factors_backward(
    u: Tensor, t: Tensor, reciprocal: Tensor, gu: Tensor | None, gt: Tensor | None
) -> Tensor:
    (dv,) = _plain(_backend(u).backward_factors(u, t, reciprocal, gu, gt))
    return dv


@_as_in_eager_mode
def _matrix(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    _check_signs("cwy_matrix", signs)
    return _plain(*_backend(v).forward_matrix(v, signs))


@_as_in_eager_mode
def _matrix_backward(
    z: Tensor, q: Tensor, u: Tensor, factor: Tensor, reciprocal: Tensor, signs: Tensor | None
) -> Tensor:
    (dv,) = _plain(_backend(u).backward_matrix(z, q, u, factor, reciprocal, signs))
    return dv


@_as_in_eager_mode
def _truncated(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    _check_signs("tcwy_matrix", signs)
    return _plain(*_backend(v).forward_truncated(v, signs))


@_as_in_eager_mode
def _truncated_backward(
    z: Tensor, u: Tensor, t: Tensor, reciprocal: Tensor, signs: Tensor | None
) -> Tensor:
    (dv,) = _plain(_backend(u).backward_truncated(z, u, t, reciprocal, signs))
    return dv


@_as_in_eager_mode
def _multiply(v: Tensor, x: Tensor, adjoint: bool) -> tuple[Tensor, ...]:
    return _plain(*_backend(v).forward_multiply(v, x, adjoint))


@_as_in_eager_mode
def _multiply_backward(
    gy: Tensor, x: Tensor, u: Tensor, t: Tensor, reciprocal: Tensor, adjoint: bool
) -> tuple[Tensor, ...]:
    return _plain(*_backend(u).backward_multiply(gy, x, u, t, reciprocal, adjoint))


# Compilers see these: shapes.


def _fake_reciprocal(v: Tensor) -> Tensor:
    return v.new_empty((*v.shape[:-2], 1, v.shape[-1]), dtype=v.dtype.to_real())


def _fake_square(v: Tensor, size: int) -> Tensor:
    return v.new_empty((*v.shape[:-2], size, size))


def _fake_factors(v: Tensor) -> tuple[Tensor, ...]:
    return v.new_empty(v.shape), _fake_square(v, v.shape[-1]), _fake_reciprocal(v)


def _fake_matrix(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    n, size = v.shape[-2:]
    u, factor, reciprocal = _fake_factors(v)
    if size >= n:
        factor = v.new_empty(v.shape)
    return _fake_square(v, n), u, factor, reciprocal


def _fake_truncated(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    return v.new_empty(v.shape), *_fake_factors(v)


def _fake_multiply(v: Tensor, x: Tensor, adjoint: bool) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), *_fake_factors(v)


# Derivatives.


class _Factors(Function):
    @staticmethod
    def forward(ctx, v):
        with below_autograd():
            u, t, reciprocal = torch.ops.cwy.wy_factors(v)
        ctx.save_for_backward(u, t, reciprocal)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(reciprocal)
        return u, t, reciprocal

    @staticmethod
    def backward(ctx, gu, gt, _):
        if gu is None and gt is None:
            return None
        return torch.ops.cwy.wy_factors_backward(*ctx.saved_tensors, gu, gt)


class _Matrix(Function):
    @staticmethod
    def forward(ctx, v, signs):
        with below_autograd():
            q, u, factor, reciprocal = torch.ops.cwy.cwy_matrix(v, signs)
        ctx.save_for_backward(q, u, factor, reciprocal, signs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(u, factor, reciprocal)
        return q, u, factor, reciprocal

    @staticmethod
    def backward(ctx, z, *_):
        if z is None:
            return None, None
        return torch.ops.cwy.cwy_matrix_backward(z, *ctx.saved_tensors), None


class _Truncated(Function):
    @staticmethod
    def forward(ctx, v, signs):
        with below_autograd():
            omega, u, t, reciprocal = torch.ops.cwy.tcwy_matrix(v, signs)
        ctx.save_for_backward(u, t, reciprocal, signs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(u, t, reciprocal)
        return omega, u, t, reciprocal

    @staticmethod
    def backward(ctx, z, *_):
        if z is None:
            return None, None
        return torch.ops.cwy.tcwy_matrix_backward(z, *ctx.saved_tensors), None


class _Multiply(Function):
    @staticmethod
    def forward(ctx, v, x, adjoint):
        with below_autograd():
            y, u, t, reciprocal = torch.ops.cwy.cwy_multiply(v, x, adjoint)
        ctx.save_for_backward(x, u, t, reciprocal)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(u, t, reciprocal)
        ctx.adjoint = adjoint
        return y, u, t, reciprocal

    @staticmethod
    def backward(ctx, gy, *_):
        if gy is None:
            return None, None, None
        dv, dx = torch.ops.cwy.cwy_multiply_backward(gy, *ctx.saved_tensors, ctx.adjoint)
        return dv, dx, None


class _Last(Function):
    """Run a backward op. It has no derivative."""

    @staticmethod
    def forward(ctx, op, *given):
        ctx.op = op
        with below_autograd():
            return op(*given)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.op}: it has no derivative, so a compiled or exported program has no second one. "
            'Pass backend="composite" to the function, or run it in eager mode.'
        )


def _define_backward(schema: str, compute, fake) -> None:
    name = schema.partition("(")[0]
    define(schema, compute, fake, lambda *given: _Last.apply(getattr(torch.ops.cwy, name), *given))


define(
    "wy_factors(Tensor v) -> (Tensor u, Tensor t, Tensor reciprocal)",
    _factors,
    _fake_factors,
    lambda v: _Factors.apply(v),
)
_define_backward(
    "wy_factors_backward(Tensor u, Tensor t, Tensor reciprocal, Tensor? gu, Tensor? gt) -> Tensor",
    _factors_backward,
    lambda u, *rest: u.new_empty(u.shape),
)
define(
    "cwy_matrix(Tensor v, Tensor? signs) -> (Tensor q, Tensor u, Tensor factor, Tensor reciprocal)",
    _matrix,
    _fake_matrix,
    lambda v, signs: _Matrix.apply(v, signs),
)
_define_backward(
    "cwy_matrix_backward(Tensor z, Tensor q, Tensor u, Tensor factor, Tensor reciprocal, "
    "Tensor? signs) -> Tensor",
    _matrix_backward,
    lambda z, q, u, *rest: u.new_empty(u.shape),
)
define(
    "tcwy_matrix(Tensor v, Tensor? signs) -> (Tensor omega, Tensor u, Tensor t, Tensor reciprocal)",
    _truncated,
    _fake_truncated,
    lambda v, signs: _Truncated.apply(v, signs),
)
_define_backward(
    "tcwy_matrix_backward(Tensor z, Tensor u, Tensor t, Tensor reciprocal, "
    "Tensor? signs) -> Tensor",
    _truncated_backward,
    lambda z, u, *rest: u.new_empty(u.shape),
)
define(
    "cwy_multiply(Tensor v, Tensor x, bool adjoint) "
    "-> (Tensor y, Tensor u, Tensor t, Tensor reciprocal)",
    _multiply,
    _fake_multiply,
    lambda v, x, adjoint: _Multiply.apply(v, x, adjoint),
)
_define_backward(
    "cwy_multiply_backward(Tensor gy, Tensor x, Tensor u, Tensor t, Tensor reciprocal, "
    "bool adjoint) -> (Tensor dv, Tensor dx)",
    _multiply_backward,
    lambda gy, x, u, *rest: (u.new_empty(u.shape), x.new_empty(x.shape)),
)

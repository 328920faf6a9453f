"""Operations: counted by torch, and by formula where torch counts nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ... import parametrizations  # noqa: F401 - defines our ops
from ..._torch import FakeTensorMode, eigh_op, fourier_op, solve_op
from .entry import Case, Entry

aten = torch.ops.aten
Shape = tuple[int, ...]
LIMITED = ("cwy", "tcwy")
"""Methods of which the backward pass is counted, too: pictures show how fast they could be."""


def count(entry: Entry, case: Case, dtype: torch.dtype) -> dict[str, int]:
    """Count operations by kind of time: of the forward pass and, for some entries, of both.

    Both are counted for the paper's methods and for plain products. Shapes are enough for ours and
    for torch's operations. Compiled code of other packages gets real tensors: without values its
    kernels would read from nowhere. A number is one of the method's, real or complex.
    """
    # Code that looks at values raises, and is counted with values.
    with suppress(Exception):
        if entry.package == "cwy":
            shapes = entry.make(dtype, torch.device("meta"))
            return _count(entry, shapes.call, shapes.inputs)
        if entry.package == "torch":
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                return _count(entry, case.call, [mode.from_tensor(x) for x in case.inputs])
    return _count(entry, case.call, case.inputs)


def _count(entry: Entry, call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, int]:
    leaves = [x.detach().requires_grad_() for x in inputs]

    def both() -> None:
        out = call(*leaves)
        # Not autograd.grad: the counter's hooks on modules refuse that.
        out.backward(torch.ones_like(out))

    with torch.no_grad():
        found = {"forward": _total(lambda: call(*leaves))}
    found["forward_graph"] = found["forward"]
    if entry.method in LIMITED or (entry.group == "floor" and entry.differentiable):
        found["both"] = _total(both)
        found["both_inline"] = found["both"]
        found["both_graph"] = found["both"]
    return {kind: total for kind, total in found.items() if total}


def _total(call: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS | SMALL)
    with counter, warnings.catch_warnings():
        # A copied module asks a tensor without values where they lie.
        warnings.simplefilter("ignore")
        call()
    found = counter.get_flop_counts()["Global"]
    leading = sum(flops for op, flops in found.items() if op not in SMALL)
    return leading or sum(found.values())


def _rows_and_columns(shape: Shape) -> tuple[int, int, int]:
    *batch, n, m = shape
    return math.prod(batch), n, m


def _product(a: Shape, b: Shape, *_, **__) -> int:
    return 2 * math.prod(a) * b[-1]


def _rollout(x: Shape, h0: Shape, q: Sequence[Shape], *_, **__) -> int:
    """Multiply each state by Q, or by U, S⁻¹ and U again."""
    n, m = q[0]
    products = 2 * n * n
    if len(q) > 1:
        products = 4 * n * m + 2 * m * m
    return math.prod(x[:-1]) * products


def _rollout_backward(*given, **__) -> int:
    """Count the adjoint recurrence, and the gradient of the transition."""
    _, _, _, h0, q, _, _, states, *_ = given
    return 2 * _rollout(states, h0, q)


def _cayley(a: Shape, *_, **__) -> int:
    return _solve(a, a)


def _inverse(a: Shape, *_, **__) -> int:
    batch, n, _ = _rows_and_columns(a)
    return batch * n**3


def _solve(a: Shape, b: Shape, *_, **__) -> int:
    """Count LU, then both of its triangles against every column."""
    batch, n, _ = _rows_and_columns(a)
    return batch * (2 * n**3 // 3 + 2 * n * n * b[-1])


def _triangular(a: Shape, b: Shape, *_, left: bool = True, **__) -> int:
    """Count a solve. Against as many columns as rows it is taken for the inverse."""
    batch, n, _ = _rows_and_columns(a)
    columns = b[-2]
    if left:
        columns = b[-1]
    if columns == n:
        return _triangular_inverse(a)
    return batch * n * n * columns


def _triangular_inverse(a: Shape, *_, **__) -> int:
    batch, n, _ = _rows_and_columns(a)
    return batch * n**3 // 3


def _qr(a: Shape, *_, **__) -> int:
    batch, n, m = _rows_and_columns(a)
    return batch * 2 * min(n, m) ** 2 * (3 * max(n, m) - min(n, m)) // 3


def _eigh(a: Shape, *_, **__) -> int:
    batch, n, _ = _rows_and_columns(a)
    return batch * 8 * n**3 // 3


def _cholesky(a: Shape, *_, **__) -> int:
    batch, n, _ = _rows_and_columns(a)
    return batch * n**3 // 3


def _exponential(a: Shape, *_, **__) -> int:
    """Count the five products of a polynomial of degree 18. Squarings depend on the norm."""
    batch, n, _ = _rows_and_columns(a)
    return batch * 10 * n**3


def _exponential_slope(a: Shape, *_, **__) -> int:
    """Count three products for each of the exponential."""
    return 3 * _exponential(a)


def _reflections(v: Shape, tau: Shape, x: Shape, *_, **__) -> int:
    return 4 * math.prod(x) * tau[-1]


def _fourier(x: Shape, dims: list[int], *_, **__) -> int:
    length = math.prod(x[d] for d in dims)
    return round(5 * math.prod(x) * math.log2(length))


def _each(*_, out_shape: Shape, **__) -> int:
    return math.prod(out_shape)


def _sum(x: Shape, *_, **__) -> int:
    return math.prod(x)


def _twice(*_, out_shape: Shape, **__) -> int:
    return 2 * math.prod(out_shape)


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.linalg_inv_ex: _inverse,
    solve_op: _solve,
    aten.linalg_solve_triangular: _triangular,
    aten.linalg_qr: _qr,
    aten.linalg_householder_product: _qr,
    eigh_op: _eigh,
    aten.linalg_cholesky_ex: _cholesky,
    aten.linalg_matrix_exp: _exponential,
    aten.ormqr: _reflections,
    fourier_op: _fourier,
    torch.ops.cwy.matmul: _product,
    torch.ops.cwy.triangular_inverse: _triangular_inverse,
    torch.ops.cwy.matrix_exp: _exponential,
    torch.ops.cwy.matrix_exp_slope: _exponential_slope,
    torch.ops.cwy.cayley: _cayley,
    torch.ops.cwy.rollout: _rollout,
    torch.ops.cwy.rollout_backward: _rollout_backward,
}
"""The paper's counts (Table 2) of inverses, QR and eigenvalues, the usual ones of the others."""

SMALL: dict[Any, Callable[..., int]] = {
    aten.mul: _each,
    aten.add: _each,
    aten.sub: _each,
    aten.sum: _sum,
    aten.addcmul: _twice,
}
"""Operations on single numbers.

As in the paper's tables, only leading terms count. These count where a method has no others.
"""

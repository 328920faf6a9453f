"""How many operations a forward pass takes: counted by torch, by formula where its counter counts nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from .. import parametrizations  # noqa: F401 - with it our ops are defined
from .entry import Case, Entry

aten = torch.ops.aten
Shape = tuple[int, ...]
LIMITED = ("cwy", "tcwy")
"""Methods of which the backward pass is counted too: the pictures show how fast they could be."""


def count(entry: Entry, case: Case, dtype: torch.dtype) -> dict[str, int]:
    """Operations of the forward pass and, of the paper's methods and plain products, of both, by the fields of a row.

    Shapes are enough for ours, which without values are made of torch's own operations, and for torch's. What others have
    compiled takes a tensor without values for one that has them: on a GPU TorchScript's kernels then read from nowhere. A
    number is one of the method's, real or complex.
    """
    with suppress(Exception):  # of what looks at values
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
        found = {"forward_flops": _total(lambda: call(*leaves))}
    if entry.method in LIMITED or (entry.group == "floor" and entry.differentiable):
        found["both_flops"] = _total(both)
    return {name: total for name, total in found.items() if total}


def _total(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False, custom_mapping=FORMULAS | SMALL) as counter, warnings.catch_warnings():
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
    """Each state by Q, or by U, S⁻¹ and U again."""
    (n, m), factors = q[0], len(q) > 1
    return math.prod(x[:-1]) * (4 * n * m + 2 * m * m if factors else 2 * n * n)


def _rollout_backward(
    g: Shape, gn: Shape, x: Shape, h0: Shape, q: Sequence[Shape], bias, weight, states: Shape, *_, **__
) -> int:
    """The adjoint recurrence, and the gradient of the transition."""
    return 2 * _rollout(states, h0, q)


def _cayley(a: Shape, *_, **__) -> int:
    return _solve(a, a)


def _inverse(a: Shape, *_, **__) -> int:
    batch, n, _ = _rows_and_columns(a)
    return batch * n**3


def _solve(a: Shape, b: Shape, *_, **__) -> int:
    """LU, then both of its triangles against every column."""
    batch, n, _ = _rows_and_columns(a)
    return batch * (2 * n**3 // 3 + 2 * n * n * b[-1])


def _triangular(a: Shape, b: Shape, *_, left: bool = True, **__) -> int:
    """Against as many columns as rows it is taken for the inverse."""
    batch, n, _ = _rows_and_columns(a)
    k = b[-1] if left else b[-2]
    return _triangular_inverse(a) if k == n else batch * n * n * k


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
    """The five products of a polynomial of degree 18; how many squarings follow depends on the norm."""
    batch, n, _ = _rows_and_columns(a)
    return batch * 10 * n**3


def _reflections(v: Shape, tau: Shape, x: Shape, *_, **__) -> int:
    return 4 * math.prod(x) * tau[-1]


def _fourier(x: Shape, dims: list[int], *_, **__) -> int:
    length = math.prod(x[d] for d in dims)
    return round(5 * math.prod(x) * math.log2(length)) if length > 1 else 0


def _each(*_, out_shape: Shape, **__) -> int:
    return math.prod(out_shape)


def _sum(x: Shape, *_, **__) -> int:
    return math.prod(x)


def _twice(*_, out_shape: Shape, **__) -> int:
    return 2 * math.prod(out_shape)


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.linalg_inv_ex: _inverse,
    aten._linalg_solve_ex: _solve,
    aten.linalg_solve_triangular: _triangular,
    aten.linalg_qr: _qr,
    aten.linalg_householder_product: _qr,
    aten._linalg_eigh: _eigh,
    aten.linalg_cholesky_ex: _cholesky,
    aten.linalg_matrix_exp: _exponential,
    aten.ormqr: _reflections,
    aten._fft_c2c: _fourier,
    torch.ops.cwy.matmul: _product,
    torch.ops.cwy.triangular_inverse: _triangular_inverse,
    torch.ops.cwy.matrix_exp: _exponential,
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
"""Operations on single numbers. As in the paper's tables leading terms count; so do these where a method has no others."""

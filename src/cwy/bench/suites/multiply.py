"""The benchmark ``multiply``: Q x for B vectors, where Q is a product of L reflections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ... import ops
from ...ops._linalg import double
from ...registry import Method
from ..harness.entry import Case, Entry, gaussian
from . import Size, Suite
from .matrix import householder_orgqr
from .methods import Usage, counted, listed, multiplies_without_q, serving, weight_dtype


def baseline(size: Size, device: str) -> str:
    """Name the entry that the others are compared with."""
    return "cwy"


def entries(size: Size) -> list[Entry]:
    """List free weights as the floor, methods without Q formed, Q formed, and the peers.

    ``v (N, L)`` and ``x (B, N)`` are Gaussian and both are differentiated.
    """
    n, count, batch = size
    ours = {"group": "ours", "method": "cwy", "package": "cwy"}
    function = partial(_function, size)
    found = [
        Entry(
            "matmul",
            f"x @ W.mT with a free {n} x {n} weight",
            partial(_free_weight, n, n, batch),
            group="floor",
        ),
        Entry(
            "matmul to 2L",
            f"x @ W.mT with a free {2 * count} x {n} weight: about the operations of Q x",
            partial(_free_weight, n, 2 * count, batch),
            group="floor",
        ),
        *_ours(n, count, batch),
        function("cwy_multiply", "the op alone, from vectors", ops.cwy_multiply, **ours),
        function("cwy, Q formed", "cwy_matrix(v), then x @ Q.mT", _formed, **ours),
        function("torch.ormqr", "torch.ormqr of unit lower-triangular vectors", _ormqr),
    ]
    if count == n:
        about = "torch_householder_orgqr(v), then x @ Q.mT. It forms only square Q whole"
        orgqr = function("torch_householder", about, _orgqr, package="torch_householder")
        found.append(orgqr)
    return found


def _ours(n: int, count: int, batch: int) -> list[Entry]:
    found = []
    for name, method in serving(n, n).items():
        # The others form Q first. The benchmark `matrix` shows what that costs.
        if not multiplies_without_q(method):
            continue
        options = counted(method, count)
        if weight_dtype(method, n, n, torch.float32, **options) is not None:
            found.append(_method(name, method, n, batch, options))
    return found


def _method(name: str, method: Method, n: int, batch: int, options: dict[str, int]) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        weight = weight_dtype(method, n, n, dtype, **options) or dtype
        x = gaussian(batch, n, dtype=weight, device=device)
        use = lambda chart: chart.multiply
        usage = Usage(method, n, n, use, partial(norm_error, x), options)
        return usage.case(weight, device, x)

    about = f"cwy.METHODS[{method.name!r}]{listed(options)}: multiply(free, x)"
    return Entry(name, about, make, group="ours", method=method.name, package="cwy")


def _function(
    size: Size,
    name: str,
    about: str,
    call: Callable[[Tensor, Tensor], Tensor],
    **given,
) -> Entry:
    n, count, batch = size

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(batch, n, dtype=dtype, device=device)
        v = gaussian(n, count, dtype=dtype, device=device)
        return Case(call, (v, x), call, partial(norm_error, x))

    return Entry(name, about, make, **given)


def _formed(v: Tensor, x: Tensor) -> Tensor:
    return x @ ops.cwy_matrix(v).mT


def _orgqr(v: Tensor, x: Tensor) -> Tensor:
    return x @ householder_orgqr(v).mT


def _ormqr(v: Tensor, x: Tensor) -> Tensor:
    v = v.tril(-1)
    return torch.ormqr(v, 2 / (1 + v.square().sum(-2)), x.mT).mT


def _free_weight(n: int, rows: int, batch: int, dtype: torch.dtype, device: torch.device) -> Case:
    call = lambda w, x: x @ w.mT
    weight = gaussian(rows, n, dtype=dtype, device=device)
    x = gaussian(batch, n, dtype=dtype, device=device)
    return Case(call, (weight, x), call, None)


def norm_error(x: Tensor, y: Tensor) -> float:
    """Return how far Q is from keeping the length of a vector: max|‖y‖/‖x‖ - 1| over rows."""
    before = torch.linalg.vector_norm(double(x), dim=-1)
    after = torch.linalg.vector_norm(double(y), dim=-1)
    return (after / before - 1).abs().max().item()


SUITE = Suite(entries, baseline)

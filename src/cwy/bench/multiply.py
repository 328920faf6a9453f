"""The benchmark ``multiply``: Q x for a batch of B vectors, Q a product of L reflections of dimension N."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from .. import ops
from ..registry import Method
from ..testing import double
from .entry import Case, Entry, gaussian
from .ours import case, multiplies_unformed, serving, takes, weight_dtype
from .sizes import Size


def baseline(size: Size, device: str) -> str:
    return "cwy"


def entries(size: Size) -> list[Entry]:
    """Free weights as the floor, the methods that multiply without forming Q, Q formed and multiplied, and the peers.

    ``v (N, L)`` and ``x (B, N)`` are Gaussian and both are differentiated.
    """
    n, count, batch = size
    function = partial(_function, n, count, batch)
    found = [
        Entry("matmul", f"x @ W.mT with a free {n} x {n} weight", partial(_free_weight, n, n, batch), group="floor"),
        Entry(
            "matmul to 2L",
            f"x @ W.mT with a free {2 * count} x {n} weight: about the operations of Q x",
            partial(_free_weight, n, 2 * count, batch),
            group="floor",
        ),
        *_ours(n, count, batch),
        function("cwy_multiply", "the op alone, from vectors", ops.cwy_multiply, group="ours", method="cwy", package="cwy"),
        function("cwy, Q formed", "cwy_matrix(v), then x @ Q.mT", _formed, group="ours", method="cwy", package="cwy"),
        function("torch.ormqr", "torch.ormqr of unit lower-triangular vectors", _ormqr),
    ]
    if count == n:
        about = "torch_householder_orgqr(v), then x @ Q.mT; it forms only square Q whole"
        orgqr = lambda v, x: x @ import_module("torch_householder").torch_householder_orgqr(v).mT
        found.append(function("torch_householder", about, orgqr, package="torch_householder"))
    return found


def _ours(n: int, count: int, batch: int) -> list[Entry]:
    found = []
    for name, method in serving(n, n).items():
        options = {option: count for option in ("reflections", "layers") if takes(method, option)}
        # The others form Q first; what that costs, the benchmark `matrix` says.
        if multiplies_unformed(method) and weight_dtype(method, n, n, torch.float32, **options) is not None:
            found.append(_method(name, method, n, batch, options))
    return found


def _method(name: str, method: Method, n: int, batch: int, options: dict) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        weight = weight_dtype(method, n, n, dtype, **options) or dtype
        x = gaussian(batch, n, dtype=weight, device=device)
        return case(method, n, n, lambda chart: chart.multiply, partial(norm_error, x), weight, device, x, **options)

    about = f"cwy.METHODS[{method.name!r}]{''.join(f', {key}={value}' for key, value in options.items())}: multiply(free, x)"
    return Entry(name, about, make, group="ours", method=method.name, package="cwy")


def _function(
    n: int,
    count: int,
    batch: int,
    name: str,
    about: str,
    call: Callable[[Tensor, Tensor], Tensor],
    **given,
) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(batch, n, dtype=dtype, device=device)
        return Case(call, (gaussian(n, count, dtype=dtype, device=device), x), call, partial(norm_error, x))

    return Entry(name, about, make, **given)


def _formed(v: Tensor, x: Tensor) -> Tensor:
    return x @ ops.cwy_matrix(v).mT


def _ormqr(v: Tensor, x: Tensor) -> Tensor:
    v = v.tril(-1)
    return torch.ormqr(v, 2 / (1 + v.square().sum(-2)), x.mT).mT


def _free_weight(n: int, rows: int, batch: int, dtype: torch.dtype, device: torch.device) -> Case:
    like = {"dtype": dtype, "device": device}
    call = lambda w, x: x @ w.mT
    return Case(call, (gaussian(rows, n, **like), gaussian(batch, n, **like)), call, None)


def norm_error(x: Tensor, y: Tensor) -> float:
    """How far Q is from keeping the length of a vector: max|‖y‖/‖x‖ - 1| over the rows."""
    before, after = (torch.linalg.vector_norm(double(z), dim=-1) for z in (x, y))
    return (after / before - 1).abs().max().item()

"""The benchmark ``matrix``: from free parameters to matrices with orthonormal columns.

These are N x N or N x M, one or a batch of B.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ... import init
from ...api import orthogonality_error
from ...ops._linalg import double
from ...registry import Method
from ..harness.entry import Case, Entry, gaussian
from . import Size, Suite
from .methods import Usage, listed, serving, takes, weight_dtype

LARGEST = 8192
"""The largest N at which entries are tried that form N x N matrices to make N x M ones."""


def baseline(size: Size, device: str) -> str:
    """Name the entry that the others are compared with."""
    *_, n, m = _shape(size)
    if n == m:
        return "cwy"
    return "tcwy"


def entries(size: Size) -> list[Entry]:
    """List one matrix product as the floor, every method that serves the size, and the peers.

    Skew-symmetric matrices are Gaussian. Their largest angle is about 1 radian unless the entry
    states otherwise.
    """
    shape = _shape(size)
    return [_floor(shape), *_ours(shape), *_torch(shape), *_packages(shape)]


def _shape(size: Size) -> Size:
    """Return the shape ``(*, N, M)`` of the weight."""
    if len(size) == 1:
        return size * 2
    return size


def _ours(shape: Size) -> list[Entry]:
    *batch, n, m = shape
    options: dict[str, Any] = {}
    if batch:
        options["batch"] = tuple(batch)
    found = []
    for name, method in serving(n, m).items():
        found.append(_method(name, method, (n, m), options))
        # Fewer reflections are a choice that square weights have.
        if method.kind == "square" and takes(method, "reflections"):
            for label, count in _fewer(n).items():
                given = options | {"reflections": count}
                found.append(_method(f"{name} {label}", method, (n, m), given))
    return found


def _fewer(n: int) -> dict[str, int]:
    """Return the smaller numbers of reflections that are tried, by label."""
    fewer = {}
    if n >= 4:
        fewer["L=N/4"] = n // 4
    if n > 512:
        fewer["L=128"] = 128
    return fewer


def _method(name: str, method: Method, shape: Size, options: dict[str, Any]) -> Entry:
    n, m = shape
    usage = Usage(method, n, m, lambda chart: chart, orthogonality_error, options)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        weight = weight_dtype(method, n, m, dtype, **options) or dtype
        return usage.case(weight, device)

    about = f"cwy.METHODS[{method.name!r}]{listed(options)}"
    return Entry(name, about, make, group="ours", method=method.name, package="cwy")


def _torch(shape: Size) -> list[Entry]:
    peer = partial(_function, shape)
    found = [_layer(shape, kind) for kind in ("matrix_exp", "cayley", "householder")]
    if shape[-2] == shape[-1]:
        found += [
            peer(
                "matrix_exp, angle 1",
                "torch.matrix_exp of a skew matrix, largest angle about 1",
                lambda x: torch.matrix_exp(_skew(x)),
            ),
            peer(
                "matrix_exp, angle 0.01",
                "torch.matrix_exp of a skew matrix, largest angle about 0.01",
                lambda x: torch.matrix_exp(0.01 * _skew(x)),
            ),
            peer("cayley solve", "torch.linalg.solve(I + A/2, I - A/2)", _cayley),
        ]
    found += [
        Entry(
            "linalg.qr",
            "the Q of torch.linalg.qr, of a well-conditioned matrix",
            partial(_qr, shape),
        ),
        peer(
            "householder_product",
            "torch.linalg.householder_product of unit lower-triangular vectors",
            _householder_product,
        ),
    ]
    return found


def _layer(shape: Size, kind: str) -> Entry:
    """Time torch's own parametrization."""
    entry = Entry(
        f"orthogonal({kind})",
        f"torch.nn.utils.parametrizations.orthogonal(layer, orthogonal_map={kind!r})",
        partial(_torch_orthogonal, shape, kind),
    )
    if kind == "householder":
        return entry
    return replace(entry, why_not=partial(_too_large, shape))


def _packages(shape: Size) -> list[Entry]:
    kind = "Stiefel"
    if shape[-2] == shape[-1]:
        kind = "SO"
    found = [
        Entry(
            f"geotorch {triv}",
            f"geotorch.{kind}(size, triv={triv!r})",
            partial(_geotorch, shape, triv),
            package="geotorch",
            why_not=partial(_too_large, shape),
        )
        for triv in ("expm", "cayley")
    ]
    cayley = _manifold_step(shape, "cayley step", "CanonicalStiefel")
    found.append(replace(cayley, why_not=partial(_too_large, shape)))
    found.append(_manifold_step(shape, "qr step", "EuclideanStiefel"))
    orgqr = _function(
        shape,
        "torch_householder",
        "torch_householder_orgqr of Gaussian vectors",
        householder_orgqr,
        std=1.0,
    )
    found.append(replace(orgqr, package="torch_householder"))
    return found


def _manifold_step(shape: Size, label: str, manifold: str) -> Entry:
    """Time a step of geoopt's. It takes the place of a backward pass, so it has none."""
    return Entry(
        f"geoopt {label}",
        f"geoopt.{manifold}(): proju, then retr. One step from a point, no map to differentiate",
        partial(_geoopt, shape, manifold),
        package="geoopt",
        differentiable=False,
    )


def _floor(shape: Size) -> Entry:
    *batch, n, m = shape

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        left = gaussian(*shape, dtype=dtype, device=device)
        right = gaussian(*batch, m, m, dtype=dtype, device=device)
        return Case(torch.matmul, (left, right), torch.matmul, None)

    each = ""
    if batch:
        each = f" for each of {batch[0]}"
    return Entry("matmul", f"one product{each}, {n} x {m} by {m} x {m}", make, group="floor")


def _function(
    shape: Size,
    name: str,
    about: str,
    call: Callable[[Tensor], Tensor],
    std: float | None = None,
) -> Entry:
    """Time a plain function of N x M Gaussian matrices. Its float64 truth is itself."""
    if std is None:
        std = _std(shape)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(*shape, std=std, dtype=dtype, device=device)
        return Case(call, (x,), call, orthogonality_error)

    return Entry(name, about, make)


def _too_large(shape: Size, dtype: torch.dtype, device: torch.device) -> str | None:
    n, m = shape[-2:]
    if n <= max(m, LARGEST):
        return None
    return f"it forms N x N matrices, and N = {n} is above the {LARGEST} tried"


def _std(shape: Size) -> float:
    return 0.5 * shape[-2] ** -0.5


def _skew(x: Tensor) -> Tensor:
    upper = x.triu(1)
    return upper - upper.mT


def _cayley(x: Tensor) -> Tensor:
    half = _skew(x) / 2
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(eye + half, eye - half)


def _qr(shape: Size, dtype: torch.dtype, device: torch.device) -> Case:
    # Singular values between 1/2 and 3/2: the derivative of QR divides by them.
    eye = torch.eye(*shape[-2:], dtype=dtype, device=device)
    x = eye + gaussian(*shape, std=_std(shape) / 2, dtype=dtype, device=device)
    call = lambda x: torch.linalg.qr(x).Q
    return Case(call, (x,), call, orthogonality_error)


def _householder_product(x: Tensor) -> Tensor:
    v = x.tril(-1)
    return torch.linalg.householder_product(v, 2 / (1 + v.square().sum(-2)))


def _torch_orthogonal(shape: Size, kind: str, dtype: torch.dtype, device: torch.device) -> Case:
    layer = nn.Module()
    layer.weight = nn.Parameter(gaussian(*shape, dtype=dtype, device=device))
    parametrizations.orthogonal(layer, orthogonal_map=kind)
    chart = cast(nn.ModuleList, layer.get_submodule("parametrizations.weight"))[0]
    x = gaussian(*shape, std=_std(shape), dtype=dtype, device=device)
    if kind == "householder":
        # Its diagonal holds the signs, truncated to integers. At -1.5 they are -1 and stay so.
        x = x.tril(-1) - 1.5 * torch.eye(*shape[-2:], dtype=dtype, device=device)
    return Case(chart, (x,), deepcopy(chart).double(), orthogonality_error)


def _geotorch(shape: Size, triv: str, dtype: torch.dtype, device: torch.device) -> Case:
    import geotorch  # pyrefly: ignore[missing-import]

    n, m = shape[-2:]
    build = geotorch.Stiefel
    if n == m:
        build = geotorch.SO
    chart = build(shape, triv=triv).to(dtype=dtype, device=device)
    # It was drawn in torch's default dtype.
    chart.base.copy_(init.haar(n, dtype=dtype, device=device))
    x = gaussian(*shape, std=_std(shape), dtype=dtype, device=device)
    return Case(chart, (x,), deepcopy(chart).double(), orthogonality_error)


def _geoopt(shape: Size, name: str, dtype: torch.dtype, device: torch.device) -> Case:
    import geoopt  # pyrefly: ignore[missing-import]

    manifold = getattr(geoopt, name)()
    point = init.haar(*shape[-2:], dtype=dtype, device=device).expand(shape).contiguous()

    def step(at: Tensor, g: Tensor) -> Tensor:
        return manifold.retr(at, manifold.proju(at, g))

    g = gaussian(*shape, std=_std(shape), dtype=dtype, device=device)
    return Case(partial(step, point), (g,), partial(step, double(point)), orthogonality_error)


def householder_orgqr(x: Tensor) -> Tensor:
    """Return torch_householder's product of reflections."""
    from torch_householder import (  # pyrefly: ignore[missing-import]
        torch_householder_orgqr,
    )

    return torch_householder_orgqr(x)


SUITE = Suite(entries, baseline)

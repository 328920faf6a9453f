"""The benchmark ``matrix``: from free parameters to an orthogonal N x N, or an orthonormal N x M, matrix."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .. import init
from ..registry import Method
from ..testing import double, orthogonality_error
from .entry import Case, Entry, gaussian
from .ours import case, serving, takes, weight_dtype
from .sizes import Size


def baseline(size: Size, device: str) -> str:
    return "cwy" if len(size) == 1 else "tcwy"


def entries(size: Size) -> list[Entry]:
    """One matrix product as the floor, every method that serves the size, and the peers.

    Skew-symmetric matrices are Gaussian, their largest angle about 1 radian unless the entry says otherwise.
    """
    n, m = size[0], size[-1]
    return [_floor(n, m), *_ours(n, m), *_torch(n, m), *_packages(n, m)]


def _ours(n: int, m: int) -> list[Entry]:
    found = []
    for name, method in serving(n, m).items():
        found.append(_method(name, method, n, m, {}))
        # Fewer reflections are a choice that square weights have.
        if method.kind == "square" and takes(method, "reflections"):
            fewer = {"L=N/4": n // 4} | ({"L=128": 128} if n > 512 else {})
            found += [
                _method(f"{name} {label}", method, n, m, {"reflections": count}) for label, count in fewer.items() if count
            ]
    return found


def _method(name: str, method: Method, n: int, m: int, options: dict) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        weight = weight_dtype(method, n, m, dtype, **options) or dtype
        return case(method, n, m, lambda chart: chart, orthogonality_error, weight, device, **options)

    about = f"cwy.METHODS[{method.name!r}]{''.join(f', {key}={value}' for key, value in options.items())}"
    return Entry(name, about, make, group="ours", method=method.name, package="cwy")


def _torch(n: int, m: int) -> list[Entry]:
    square = n == m
    peer = partial(_function, n, m)
    found = [
        Entry(f"orthogonal({kind})", f"torch.nn.utils.parametrizations.orthogonal(layer, orthogonal_map={kind!r})", make)
        for kind, make in ((kind, partial(_torch_orthogonal, n, m, kind)) for kind in ("matrix_exp", "cayley", "householder"))
    ]
    if square:
        found += [
            peer(
                "matrix_exp 1", "torch.matrix_exp of a skew matrix, largest angle about 1", lambda x: torch.matrix_exp(_skew(x))
            ),
            peer(
                "matrix_exp 0.01",
                "torch.matrix_exp of a skew matrix, largest angle about 0.01",
                lambda x: torch.matrix_exp(0.01 * _skew(x)),
            ),
            peer("cayley solve", "torch.linalg.solve(I + A/2, I - A/2)", _cayley),
        ]
    found += [
        Entry("linalg.qr", "the Q of torch.linalg.qr, of a well-conditioned matrix", partial(_qr, n, m)),
        peer("householder_product", "torch.linalg.householder_product of unit lower-triangular vectors", _householder_product),
    ]
    return found


def _packages(n: int, m: int) -> list[Entry]:
    kind = "SO" if n == m else "Stiefel"
    found = [
        Entry(f"geotorch {triv}", f"geotorch.{kind}(size, triv={triv!r})", partial(_geotorch, n, m, triv), package="geotorch")
        for triv in ("expm", "cayley")
    ]
    # A step on the manifold is not differentiated: it takes the place of a backward pass through a map.
    found += [
        Entry(
            f"geoopt {label}",
            f"geoopt.{manifold}(): proju, then retr; one step from a point, no map to differentiate",
            partial(_geoopt, n, m, manifold),
            package="geoopt",
            differentiable=False,
        )
        for label, manifold in (("cayley step", "CanonicalStiefel"), ("qr step", "EuclideanStiefel"))
    ]
    orgqr = lambda x: import_module("torch_householder").torch_householder_orgqr(x)
    about = "torch_householder_orgqr of Gaussian vectors"
    found.append(_function(n, m, "torch_householder", about, orgqr, std=1.0, package="torch_householder"))
    return found


def _floor(n: int, m: int) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        like = {"dtype": dtype, "device": device}
        return Case(torch.matmul, (gaussian(n, m, **like), gaussian(m, m, **like)), torch.matmul, None)

    return Entry("matmul", f"one product, {n} x {m} by {m} x {m}", make, group="floor")


def _function(
    n: int, m: int, name: str, about: str, call: Callable[[Tensor], Tensor], std: float | None = None, package: str = "torch"
) -> Entry:
    """An entry of a plain function of an N x M Gaussian matrix; its float64 truth is itself."""

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(n, m, std=0.5 * n**-0.5 if std is None else std, dtype=dtype, device=device)
        return Case(call, (x,), call, orthogonality_error)

    return Entry(name, about, make, package=package)


def _skew(x: Tensor) -> Tensor:
    upper = x.triu(1)
    return upper - upper.mT


def _cayley(x: Tensor) -> Tensor:
    half = _skew(x) / 2
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(eye + half, eye - half)


def _qr(n: int, m: int, dtype: torch.dtype, device: torch.device) -> Case:
    # Singular values between 1/2 and 3/2: the derivative of QR divides by them.
    x = torch.eye(n, m, dtype=dtype, device=device) + gaussian(n, m, std=0.25 * n**-0.5, dtype=dtype, device=device)
    call = lambda x: torch.linalg.qr(x).Q
    return Case(call, (x,), call, orthogonality_error)


def _householder_product(x: Tensor) -> Tensor:
    v = x.tril(-1)
    return torch.linalg.householder_product(v, 2 / (1 + v.square().sum(-2)))


def _torch_orthogonal(n: int, m: int, kind: str, dtype: torch.dtype, device: torch.device) -> Case:
    layer = nn.Linear(m, n, bias=False, dtype=dtype, device=device)
    parametrizations.orthogonal(layer, orthogonal_map=kind)
    chart = cast(nn.ModuleList, layer.get_submodule("parametrizations.weight"))[0]
    x = gaussian(n, m, std=0.5 * n**-0.5, dtype=dtype, device=device)
    if kind == "householder":
        # Its diagonal holds the signs, truncated to integers: at -1 they would jump, at -1.5 they are -1 and stay.
        x = x.tril(-1) - 1.5 * torch.eye(n, m, dtype=dtype, device=device)
    return Case(chart, (x,), deepcopy(chart).double(), orthogonality_error)


def _geotorch(n: int, m: int, triv: str, dtype: torch.dtype, device: torch.device) -> Case:
    geotorch = import_module("geotorch")
    chart = (geotorch.SO if n == m else geotorch.Stiefel)((n, m), triv=triv).to(dtype=dtype, device=device)
    # It was drawn in torch's default dtype.
    chart.base.copy_(init.haar(n, dtype=dtype, device=device))
    x = gaussian(n, m, std=0.5 * n**-0.5, dtype=dtype, device=device)
    return Case(chart, (x,), deepcopy(chart).double(), orthogonality_error)


def _geoopt(n: int, m: int, name: str, dtype: torch.dtype, device: torch.device) -> Case:
    manifold = getattr(import_module("geoopt"), name)()
    point = init.haar(n, m, dtype=dtype, device=device)

    def step(at: Tensor, g: Tensor) -> Tensor:
        return manifold.retr(at, manifold.proju(at, g))

    g = gaussian(n, m, std=0.5 * n**-0.5, dtype=dtype, device=device)
    return Case(partial(step, point), (g,), partial(step, double(point)), orthogonality_error)

"""The benchmark ``matrix``: from free parameters to an orthogonal N x N, or orthonormal N x M, matrix, or a batch of B."""

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

LARGEST = 8192
"""N up to which what forms N x N matrices on its way to N x M ones is tried."""


def baseline(size: Size, device: str) -> str:
    *_, n, m = _shape(size)
    return "cwy" if n == m else "tcwy"


def entries(size: Size) -> list[Entry]:
    """One matrix product as the floor, every method that serves the size, and the peers.

    Skew-symmetric matrices are Gaussian, their largest angle about 1 radian unless the entry says otherwise.
    """
    shape = _shape(size)
    return [_floor(shape), *_ours(shape), *_torch(shape), *_packages(shape)]


def _shape(size: Size) -> Size:
    """``(*, N, M)``, of the weight."""
    return size * 2 if len(size) == 1 else size


def _ours(shape: Size) -> list[Entry]:
    *batch, n, m = shape
    given, found = {"batch": tuple(batch)} if batch else {}, []
    for name, method in serving(n, m).items():
        found.append(_method(name, method, n, m, given))
        # Fewer reflections are a choice that square weights have.
        if method.kind == "square" and takes(method, "reflections"):
            fewer = {"L=N/4": n // 4} | ({"L=128": 128} if n > 512 else {})
            found += [
                _method(f"{name} {label}", method, n, m, given | {"reflections": count})
                for label, count in fewer.items()
                if count
            ]
    return found


def _method(name: str, method: Method, n: int, m: int, options: dict) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        weight = weight_dtype(method, n, m, dtype, **options) or dtype
        return case(method, n, m, lambda chart: chart, orthogonality_error, weight, device, **options)

    about = f"cwy.METHODS[{method.name!r}]{''.join(f', {key}={value}' for key, value in options.items())}"
    return Entry(name, about, make, group="ours", method=method.name, package="cwy")


def _torch(shape: Size) -> list[Entry]:
    square = shape[-2] == shape[-1]
    peer = partial(_function, shape)
    found = [
        Entry(
            f"orthogonal({kind})",
            f"torch.nn.utils.parametrizations.orthogonal(layer, orthogonal_map={kind!r})",
            partial(_torch_orthogonal, shape, kind),
            why_not=lambda *_, whole=kind != "householder": _too_large(shape) if whole else None,
        )
        for kind in ("matrix_exp", "cayley", "householder")
    ]
    if square:
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
        Entry("linalg.qr", "the Q of torch.linalg.qr, of a well-conditioned matrix", partial(_qr, shape)),
        peer("householder_product", "torch.linalg.householder_product of unit lower-triangular vectors", _householder_product),
    ]
    return found


def _packages(shape: Size) -> list[Entry]:
    kind = "SO" if shape[-2] == shape[-1] else "Stiefel"
    found = [
        Entry(
            f"geotorch {triv}",
            f"geotorch.{kind}(size, triv={triv!r})",
            partial(_geotorch, shape, triv),
            package="geotorch",
            why_not=lambda *_: _too_large(shape),
        )
        for triv in ("expm", "cayley")
    ]
    # A step on the manifold is not differentiated: it takes the place of a backward pass through a map.
    found += [
        Entry(
            f"geoopt {label}",
            f"geoopt.{manifold}(): proju, then retr; one step from a point, no map to differentiate",
            partial(_geoopt, shape, manifold),
            package="geoopt",
            differentiable=False,
            why_not=lambda *_, whole=label == "cayley step": _too_large(shape) if whole else None,
        )
        for label, manifold in (("cayley step", "CanonicalStiefel"), ("qr step", "EuclideanStiefel"))
    ]
    orgqr = lambda x: import_module("torch_householder").torch_householder_orgqr(x)
    about = "torch_householder_orgqr of Gaussian vectors"
    found.append(_function(shape, "torch_householder", about, orgqr, std=1.0, package="torch_householder"))
    return found


def _floor(shape: Size) -> Entry:
    *batch, n, m = shape

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        like = {"dtype": dtype, "device": device}
        return Case(torch.matmul, (gaussian(*shape, **like), gaussian(*batch, m, m, **like)), torch.matmul, None)

    each = f" for each of {batch[0]}" if batch else ""
    return Entry("matmul", f"one product{each}, {n} x {m} by {m} x {m}", make, group="floor")


def _function(
    shape: Size, name: str, about: str, call: Callable[[Tensor], Tensor], std: float | None = None, package: str = "torch"
) -> Entry:
    """An entry of a plain function of N x M Gaussian matrices; its float64 truth is itself."""

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(*shape, std=_std(shape) if std is None else std, dtype=dtype, device=device)
        return Case(call, (x,), call, orthogonality_error)

    return Entry(name, about, make, package=package)


def _too_large(shape: Size) -> str | None:
    n, m = shape[-2:]
    return f"it forms N x N matrices, and N = {n} is above the {LARGEST} tried" if n > max(m, LARGEST) else None


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
    like = {"dtype": dtype, "device": device}
    x = torch.eye(*shape[-2:], **like) + gaussian(*shape, std=_std(shape) / 2, **like)
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
        # Its diagonal holds the signs, truncated to integers: at -1 they would jump, at -1.5 they are -1 and stay.
        x = x.tril(-1) - 1.5 * torch.eye(*shape[-2:], dtype=dtype, device=device)
    return Case(chart, (x,), deepcopy(chart).double(), orthogonality_error)


def _geotorch(shape: Size, triv: str, dtype: torch.dtype, device: torch.device) -> Case:
    geotorch = import_module("geotorch")
    n, m = shape[-2:]
    chart = (geotorch.SO if n == m else geotorch.Stiefel)(shape, triv=triv).to(dtype=dtype, device=device)
    # It was drawn in torch's default dtype.
    chart.base.copy_(init.haar(n, dtype=dtype, device=device))
    x = gaussian(*shape, std=_std(shape), dtype=dtype, device=device)
    return Case(chart, (x,), deepcopy(chart).double(), orthogonality_error)


def _geoopt(shape: Size, name: str, dtype: torch.dtype, device: torch.device) -> Case:
    manifold = getattr(import_module("geoopt"), name)()
    point = init.haar(*shape[-2:], dtype=dtype, device=device).expand(shape).contiguous()

    def step(at: Tensor, g: Tensor) -> Tensor:
        return manifold.retr(at, manifold.proju(at, g))

    g = gaussian(*shape, std=_std(shape), dtype=dtype, device=device)
    return Case(partial(step, point), (g,), partial(step, double(point)), orthogonality_error)

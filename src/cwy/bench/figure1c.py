"""Figure 1c: the time to compute an orthogonal N x N matrix of a random argument, by CWY, the exponential and the Cayley map.

As in the paper, reflection vectors have standard normal entries, and skew-symmetric arguments are X - Xᵀ with such an X.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.exponential import exponential
from ..ops.skew import cayley
from ..testing import orthogonality_error
from . import matrix
from .entry import Case, Entry, gaussian
from .sizes import Size

Map = Callable[[Tensor], Tensor]
OURS = ("cwy", "cwy L=N/4", "cwy L=128")


def baseline(size: Size, device: str) -> str:
    return "cwy"


def entries(size: Size) -> list[Entry]:
    """CWY, as it is and as the paper's code had it; its rivals, as torch has them and as ours, which never wait for the
    device, so that a CUDA graph can hold them; one product, and Q of fewer reflections, for scale.
    """
    (n,) = size
    floor, *ours = [entry for entry in matrix.entries(size) if entry.group == "floor" or entry.name in OURS]
    solved = "I - U S⁻¹ Uᵀ by torch.linalg.solve_triangular; autograd"
    return [
        floor,
        *ours,
        _of(n, "cwy, one solve", solved, _solved),
        _of(n, "exponential", "torch.matrix_exp(X - Xᵀ)", lambda x: torch.matrix_exp(x - x.mT)),
        _of(n, "cayley", "torch.linalg.solve(I + A/2, I - A/2) with A = X - Xᵀ", _cayley),
        _waitless(n, "exponential", "exprnn", "cwy.ops.exponential", exponential, torch.matrix_exp),
        _waitless(n, "cayley", "scornn", "cwy.ops.skew.cayley", cayley, cayley),
    ]


def _of(n: int, name: str, about: str, call) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        return Case(call, (gaussian(n, n, dtype=dtype, device=device),), call, orthogonality_error)

    return Entry(name, about, make)


def _waitless(n: int, rival: str, method: str, name: str, call: Map, truth: Map) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(n, n, dtype=dtype, device=device)
        return Case(lambda x: call(x - x.mT), (x,), lambda x: truth(x - x.mT), orthogonality_error)

    about = f"{name}(X - Xᵀ), which does not wait for the device"
    return Entry(f"{rival}, no sync", about, make, group="ours", method=method, package="cwy")


def _cayley(x: Tensor) -> Tensor:
    half, eye = (x - x.mT) / 2, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(eye + half, eye - half)


def _solved(v: Tensor) -> Tensor:
    u = v / v.norm(dim=0)
    eye = torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
    s = 0.5 * eye + (u.mT @ u).triu(1)
    return eye - u @ torch.linalg.solve_triangular(s, u.mT, upper=True)

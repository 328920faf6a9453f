"""OWN: orthogonal weight normalization."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch import transform_is_active
from ..ops._linalg import double, widen
from ..registry import register
from .base import OrthogonalMap


@register(
    "own", domain="St(N, M), M < N, columns of zero mean", kind="tall", paper="Huang et al. 2018"
)
class OWN(OrthogonalMap):
    r"""Compute $\Omega = \tilde V(\tilde V^\top\tilde V)^{-1/2}$ from the centered columns of V.

    That is $\tilde V = V - \frac1N\mathbf 1\mathbf 1^\top V$. The eigendecomposition
    $\tilde V^\top\tilde V = P\Lambda P^\top$ gives the root. Covers the matrices of St(N, M) whose
    columns have zero mean. $\Omega$ is the nearest of them to V. Costs $4NM^2 + 14M^3/3$ operations
    (Table 2), here in float64, because $\tilde V^\top\tilde V$ squares the condition of V. The
    derivative is that of the root itself, which, unlike that of P, needs no distinct eigenvalues.

    A $\tilde V$ of rank below M has no such $\Omega$ and raises. Compiled, or under a transform,
    the result is NaN. V starts with Gaussian columns of norm about 1. An $\Omega$ with columns of
    zero mean can be assigned: V is then $\Omega$.

    Args:
        n, m: the matrix is N x M, $N > M$.
        batch, dtype, device: of the weight, real.

    Example:
        >>> omega = OWN(9, 4)
        >>> w = omega(omega.sample())
        >>> orthogonality_error(w) < 1e-5, w.mean(0).abs().max() < 1e-6
        (True, tensor(True))
    """

    stacked_buffers = ()

    def __init__(self, n: int, m: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        if self.m == self.n:
            raise ValueError(
                f"{self._call}: N orthonormal columns can't all have zero mean. "
                f"For {n} x {n} use CWY."
            )
        if self.dtype.is_complex:
            raise TypeError(
                f"{self._call}: expected a real dtype, got {self.dtype}. "
                "For complex matrices use TCWY."
            )

    def matrix(self, v: Tensor) -> Tensor:
        v_ = widen(v)
        v_ = v_ - v_.mean(-2, keepdim=True)
        return (v_ @ _inverse_root(v_.mT @ v_)).to(v.dtype)

    def free(self, matrix: Tensor) -> Tensor:
        mean = double(matrix).sum(-2).abs().max().item() / self.n**0.5
        # A float32 matrix may be assigned to a float64 weight. What is left of its mean is taken
        # off.
        if mean > max(torch.finfo(matrix.dtype).eps ** 0.5, 1e-6):
            raise ValueError(
                f"{self._call}: OWN reaches only columns of zero mean, and one of these lies by "
                f"{mean:.2g} along the constant vector. "
                "Subtract the mean and orthogonalise again, or use method='tcwy'."
            )
        return matrix.clone()

    def sample(self) -> Tensor:
        v = torch.randn(*self.batch, self.n, self.m, dtype=self.dtype, device=self.device)
        return v / self.n**0.5


def _inverse_root(g: Tensor) -> Tensor:
    r"""Compute $R = G^{-1/2}$ of a positive definite ``g (*, M, M)``, float64.

    It has derivatives of every order.
    """
    if torch.compiler.is_compiling():
        return _InverseRoot.apply(g)[0]
    if g.is_cuda and torch.cuda.is_current_stream_capturing():
        # cuSOLVER would fail now and from then on.
        raise RuntimeError(
            "OWN: torch.linalg.eigh synchronizes with the host, so it can't be captured in a CUDA "
            "graph. Use TCWY."
        )
    r, _, root = _DualInverseRoot.apply(g)
    # Fake and meta tensors, and those under a transform, have no values to look at.
    plain = type(root) is Tensor and not root.is_meta and not transform_is_active()
    if plain and root.isnan().any():
        raise ValueError(
            "OWN: V, its column means taken off, has rank below M, so there is no Ω. "
            "Draw another V."
        )
    return r


def _lyapunov(r: Tensor, c: Tensor, p: Tensor, root: Tensor) -> Tensor:
    """Return X with RX + XR = C, for R = P diag(root) Pᵀ."""
    if torch.compiler.is_compiling():
        return _Lyapunov.apply(r, c, p, root)
    return _DualLyapunov.apply(r, c, p, root)


class _InverseRoot(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(g):
        size, p = torch.linalg.eigh(g)
        smallest = size[..., -1:] * g.shape[-1] * torch.finfo(g.dtype).eps
        root = torch.where(size > smallest, size, torch.nan).rsqrt()
        return (p * root.unsqueeze(-2)) @ p.mT, p, root

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx, z, *_):
        r, p, root = ctx.saved_tensors
        return _move(r, p, root, z)


class _DualInverseRoot(_InverseRoot):
    """Add forward mode, which a compiler can't trace."""

    @staticmethod
    def jvp(ctx, dg):
        r, p, root = ctx.saved_tensors
        return _move(r, p, root, dg), None, None


def _move(r: Tensor, p: Tensor, root: Tensor, dg: Tensor) -> Tensor:
    """Return the dR of a dG: R dR + dR R = -R² dG R².

    The map is self-adjoint, so it also takes the gradient of R to that of G.
    """
    return -_lyapunov(r, r @ (r @ dg @ r) @ r, p, root)


class _Lyapunov(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(r, c, p, root):
        return p @ ((p.mT @ c @ p) / (root.unsqueeze(-1) + root.unsqueeze(-2))) @ p.mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        r, _, p, root = inputs
        ctx.save_for_backward(r, output, p, root)
        ctx.save_for_forward(r, output, p, root)

    @staticmethod
    def backward(ctx, z):
        r, x, p, root = ctx.saved_tensors
        dc = _lyapunov(r, z, p, root)
        return -(dc @ x.mT + x.mT @ dc), dc, None, None


class _DualLyapunov(_Lyapunov):
    @staticmethod
    def jvp(ctx, dr, dc, *_):
        r, x, p, root = ctx.saved_tensors
        return _lyapunov(r, dc - dr @ x - x @ dr, p, root)

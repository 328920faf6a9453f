"""The inverse of the exponential: the logarithm of an orthogonal matrix."""

import math

import torch
from torch import Tensor


def logarithm(q: Tensor) -> Tensor:
    r"""Return a skew-symmetric A with $\exp(A) = Q$ and no angle above $\pi$, for a Q in SO(N).

    It is backward stable for every Q, also for repeated angles, eigenvalues -1 and near I.

    Args:
        q: ``(*, N, N)``, float64, orthogonal to rounding, of determinant 1.

    Returns:
        ``(*, N, N)``, exactly skew-symmetric.

    Example:
        >>> q = torch.eye(5, dtype=torch.float64).roll(1, 0)
        >>> torch.allclose(torch.matrix_exp(logarithm(q)), q)
        True
    """
    n = q.shape[-1]
    return torch.stack([_logarithm(one) for one in q.reshape(-1, n, n)]).reshape(q.shape)


def _logarithm(q: Tensor) -> Tensor:
    # The logarithm jumps for planes turned by nearly π. They are split off at the widest gap of the
    # negative cosines.
    cosine, basis = torch.linalg.eigh((q + q.mT) / 2)
    negative = torch.cat([cosine.new_tensor([-1.0]), cosine[cosine < 0], cosine.new_tensor([0.0])])
    k = int(negative.diff().argmax())
    near = basis[:, :k]
    far = basis[:, k:]
    a = far @ _principal(far.mT @ q @ far) @ far.mT
    if k:
        b = _principal(-(near.mT @ q @ near))
        a = a + near @ (b - math.pi * _quarter_turn(b)) @ near.mT
    return (a - a.mT) / 2


def _principal(q: Tensor) -> Tensor:
    r"""Return the logarithm of an orthogonal matrix without eigenvalues near -1.

    The inverse Cayley transform is skew, with eigenvalues $-i\tan(\theta/2)$. This is one Hermitian
    eigenproblem, in which distinct angles stay distinct and equal ones may mix freely.
    """
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    t = torch.linalg.solve(eye + q, eye - q)
    tangent, p = torch.linalg.eigh(1j * (t - t.mT) / 2)
    return ((p * (2j * tangent.atan())) @ p.mH).real


def _quarter_turn(b: Tensor) -> Tensor:
    r"""Return a real skew J with $J^2 = -I$ that commutes with a skew b of even size.

    It turns the planes of b in the direction of b.
    """
    u, size, vh = torch.linalg.svd(b)
    # Singular values come in pairs. In planes that b does not turn, any J commutes.
    rank = int((size > 1e-12).sum()) // 2 * 2
    one = vh[rank::2]
    other = vh[rank + 1 :: 2]
    j = u[:, :rank] @ vh[:rank] + one.mT @ other - other.mT @ one
    u, _, vh = torch.linalg.svd(j - j.mT)
    return u @ vh

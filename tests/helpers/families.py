"""Reflection vectors that are hard on a compact WY transform, by name."""

import torch


def vectors(family, n, size, dtype=torch.float64, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(n, size, dtype=torch.float64, generator=g)
    one = torch.randn(n, 1, dtype=torch.float64, generator=g)
    if family == "parallel":
        v = one + 1e-3 * v
    elif family == "nearly parallel":
        v = one + 1e-6 * v
    elif family == "identical":
        v = one.expand(n, size).clone()
    elif family == "paired":
        v = v[:, torch.arange(size) // 2]
    elif family == "zero":
        v = v * (torch.rand(size, generator=g) < 0.5)
    elif family == "sparse":
        v = v * (torch.rand(n, size, generator=g) < 0.1)
    elif family == "scaled":
        v = v * 10.0 ** torch.randint(-30, 31, (size,), generator=g)
    elif family == "non-negative":
        v = v.abs()
    elif family == "low rank":
        v = torch.randn(n, 8, dtype=torch.float64, generator=g) @ torch.randn(
            8, size, dtype=torch.float64, generator=g
        )
    elif family != "gaussian":
        raise ValueError(family)
    return v.to(dtype=dtype, device=device)


FAMILIES = [
    "gaussian",
    "parallel",
    "nearly parallel",
    "identical",
    "paired",
    "zero",
    "sparse",
    "scaled",
    "non-negative",
    "low rank",
]


def departure(q):
    """The spectral norm of QᴴQ − I, in float64: exact when small, by power iteration when large."""
    q = q.detach().to(torch.complex128 if q.is_complex() else torch.float64)
    e = q.mH @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    if not e.isfinite().all():
        return float("nan")
    if e.shape[-1] <= 512:
        return torch.linalg.matrix_norm(e, ord=2).max().item()
    x = torch.randn(e.shape[-1], 8, dtype=e.dtype, device=e.device)
    for _ in range(40):
        x = torch.linalg.qr(e @ x).Q
    return torch.linalg.matrix_norm(e @ x, ord=2).item()

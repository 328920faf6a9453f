"""The paper's formulas with their N x N matrices, with which tests compare the fast functions."""

import torch
from torch import Tensor


def generator(x: Tensor, g: Tensor, metric: str) -> Tensor:
    r"""Compute $A = \hat A - \hat A^H$.

    $$ \hat A = G\Omega^H\ \text{(canonical)}, \quad
       \hat A = G\Omega^H - \tfrac12\Omega\Omega^H G\Omega^H\ \text{(Euclidean)}. $$
    """
    a = g @ x.mH
    if metric == "euclidean":
        a = a - x @ x.mH @ a / 2
    return a - a.mH


def step(
    x: Tensor, g: Tensor, lr: float, metric: str = "canonical", retraction: str = "cayley"
) -> Tensor:
    r"""Take one step of Riemannian gradient descent.

    $$ \mathrm{Cayley}(\eta A)\,\Omega \quad \text{or} \quad \mathrm{qf}(\Omega - \eta A\Omega). $$
    """
    a = generator(x, g, metric)
    if retraction == "cayley":
        eye = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
        return torch.linalg.solve(eye + lr / 2 * a, x - lr / 2 * a @ x)
    q, r = torch.linalg.qr(x - lr * a @ x)
    d = r.diagonal(dim1=-2, dim2=-1)
    return q * (d / d.abs()).unsqueeze(-2)

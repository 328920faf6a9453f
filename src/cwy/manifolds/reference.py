"""The paper's formulas as they stand, with their N x N matrices: what the fast functions are held to."""

import torch
from torch import Tensor


def generator(x: Tensor, g: Tensor, metric: str) -> Tensor:
    r"""$A = \hat A - \hat A^H$ with $\hat A = G\Omega^H$ or, Euclidean, $G\Omega^H - \tfrac12\Omega\Omega^H G\Omega^H$."""
    a = g @ x.mH
    if metric == "euclidean":
        a = a - x @ x.mH @ a / 2
    return a - a.mH


def step(
    x: Tensor, g: Tensor, lr: float, metric: str = "canonical", retraction: str = "cayley"
) -> Tensor:
    r"""One step of Riemannian gradient descent: $\mathrm{Cayley}(\eta A)\,\Omega$ or $\mathrm{qf}(\Omega - \eta A\Omega)$."""
    a = generator(x, g, metric)
    if retraction == "cayley":
        eye = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
        return torch.linalg.solve(eye + lr / 2 * a, x - lr / 2 * a @ x)
    q, r = torch.linalg.qr(x - lr * a @ x)
    d = r.diagonal(dim1=-2, dim2=-1)
    return q * (d / d.abs()).unsqueeze(-2)

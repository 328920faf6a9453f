"""The matrix exponential without a word from the device to the host, so that a CUDA graph can hold it."""

import math

import torch
from torch import Tensor

RADIUS = 0.8  # the norm up to which a polynomial of degree 16 is exact to rounding in float64
LARGEST = 1024  # the largest matrices that graphs hold so: above, idle squarings cost more than doing without a graph


def exponential(a: Tensor) -> Tensor:
    r"""$\exp(A)$ of ``a (*, N, N)``, by Taylor's polynomial of degree 16, scaled and squared.

    torch's asks the device for norms, and chooses a degree. Here the number of squarings is known to the device alone, up to a
    bound, and those that are not needed are thrown away. From $\|A\|_1 \approx 3000 N$ on the result is NaN; there
    float32 has few digits left.
    """
    n, most = a.shape[-1], most_squarings(a)
    norm = a.abs().sum(-2).amax(-1)[..., None, None] if n else a.real.new_zeros(*a.shape[:-2], 1, 1)
    squarings = (
        (norm / RADIUS).clamp(min=1).log2().ceil()
    )  # a logarithm of zero would make the gradient NaN
    e = _taylor(a * torch.exp2(-squarings))
    for k in range(most):
        e = torch.where(squarings > k, e @ e, e)
    return torch.where(squarings <= most, e, math.nan)


def most_squarings(a: Tensor) -> int:
    """Return the bound of squarings for ``a (*, N, N)``."""
    return 12 + a.shape[-1].bit_length()


def _taylor(a: Tensor) -> Tensor:
    """Six products: powers up to the fourth, and Horner's rule in the fourth."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    two = a @ a
    three, four = two @ a, two @ two
    e = four / math.factorial(16)
    for k in (12, 8, 4, 0):
        c = [1 / math.factorial(k + i) for i in range(4)]
        e = e + c[0] * eye + c[1] * a + c[2] * two + c[3] * three
        if k:
            e = e @ four
    return e

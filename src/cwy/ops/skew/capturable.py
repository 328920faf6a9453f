"""The matrix exponential without host synchronization, for use inside CUDA graphs."""

import math

import torch
from torch import Tensor

#: The norm up to which a polynomial of degree 16 is exact to rounding in float64.
RADIUS = 0.8
#: The largest matrices computed so in a graph. Above, discarded squarings cost more than no graph.
LARGEST = 1024


def exponential(a: Tensor) -> Tensor:
    r"""Compute $\exp(A)$ of ``a (*, N, N)`` by Taylor's polynomial of degree 16, with squarings.

    torch reads the norm on the host and chooses a degree. Here the number of squarings stays on the
    device, up to a bound, and surplus squarings are discarded. The result is NaN from
    $\|A\|_1 \approx 3000 N$ on, where float32 has few digits left.
    """
    most = most_squarings(a)
    if a.shape[-1] > 0:
        norm = a.abs().sum(-2).amax(-1)[..., None, None]
    else:
        norm = a.real.new_zeros(*a.shape[:-2], 1, 1)
    # The logarithm of zero would make the gradient NaN.
    squarings = (norm / RADIUS).clamp(min=1).log2().ceil()
    e = _taylor(a * torch.exp2(-squarings))
    for k in range(most):
        e = torch.where(squarings > k, e @ e, e)
    return torch.where(squarings <= most, e, math.nan)


def most_squarings(a: Tensor) -> int:
    """Return the bound of squarings for ``a (*, N, N)``."""
    return 12 + a.shape[-1].bit_length()


def _taylor(a: Tensor) -> Tensor:
    """Compute six products: powers up to the fourth, and Horner's rule in the fourth."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    two = a @ a
    three = two @ a
    four = two @ two
    e = four / math.factorial(16)
    for k in (12, 8, 4, 0):
        c = [1 / math.factorial(k + i) for i in range(4)]
        e = e + c[0] * eye + c[1] * a + c[2] * two + c[3] * three
        if k:
            e = e @ four
    return e

"""Activations with parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.recurrence.nonlinearities import modrelu


class ModReLU(nn.Module):
    r"""Compute $\mathrm{sgn}(z)\,\mathrm{relu}(|z| + b)$ (Arjovsky et al. 2016).

    It shrinks or grows the modulus, and keeps the sign or phase.

    Args:
        size: of the last dimension of z, with one threshold b for each entry.
        device, dtype: of the thresholds, which are real for complex z too.

    Example:
        >>> ModReLU(3)(torch.tensor([-1.0, 0.0, 2.0])).shape
        torch.Size([3])
    """

    def __init__(
        self, size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw thresholds uniform in ±0.01."""
        nn.init.uniform_(self.bias, -0.01, 0.01)

    def forward(self, z: Tensor) -> Tensor:
        return modrelu(z, self.bias)

    def extra_repr(self) -> str:
        return str(self.bias.shape[0])

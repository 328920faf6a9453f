"""Activations with parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.recurrence.nonlinearities import modrelu


class ModReLU(nn.Module):
    r"""$\mathrm{sgn}(z)\,\mathrm{relu}(|z| + b)$: shrinks or grows the modulus, keeps sign or phase (Arjovsky et al. 2016).

    Args:
        size: of the last dimension of z; one threshold b for each.
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
        """Thresholds uniform in ±0.01."""
        nn.init.uniform_(self.bias, -0.01, 0.01)

    def forward(self, z: Tensor) -> Tensor:
        return modrelu(z, self.bias)

    def extra_repr(self) -> str:
        return str(self.bias.shape[0])

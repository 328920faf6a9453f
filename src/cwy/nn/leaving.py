"""How a layer leaves the library: an exported program of plain weights holds only torch's ops."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize


def leaves(layer: nn.Module, name: str) -> bool:
    """Return whether an exporter is tracing and this weight of a layer is an ordinary parameter.

    That is how :func:`cwy.bake` leaves it. Then the recurrence becomes torch's ``scan``, which runs
    where ``cwy`` is not installed.
    """
    return torch.compiler.is_exporting() and not parametrize.is_parametrized(layer, name)

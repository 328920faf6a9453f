"""A backward pass that comes with a result, for functions of autograd that have their own graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Backward(NamedTuple):
    """Compute the gradient of reflection vectors from that of a result.

    Attributes:
        function: takes the gradient of the result, and ``kept``.
        kept: what the forward pass kept. A function of autograd saves these tensors, so that the
            graph frees them once it is done.
    """

    function: Callable[..., Tensor]
    kept: tuple[Tensor | None, ...]

    def __call__(self, gradient: Tensor) -> Tensor:
        return self.function(gradient, *self.kept)

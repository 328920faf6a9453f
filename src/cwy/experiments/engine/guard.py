"""The watch over a run: what is not finite never reaches the weights, and these stay orthogonal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .distributed import Group
from .meter import Diverged
from .optimizers import worst_orthogonality

WARN, LIMIT = 1e-4, 1e-2


class Guard:
    """Keeps what is not finite from the weights, and looks how orthogonal they are.

    From the first step whose loss or gradient is not finite, gradients are zero: that is decided on the device, and the
    loop finds out at the next reading.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.bad = torch.zeros((), dtype=torch.bool, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.checked: tuple[int, float | None] = (-1, None)
        self.warned = False

    @torch.no_grad()
    def screen(self, loss: Tensor) -> None:
        """Looks at the loss and the gradients of a step, before it is taken."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        largest = nn.utils.get_total_norm(gradients, norm_type=torch.inf)
        self.bad |= ~torch.isfinite(largest + loss)
        for gradient in gradients:
            gradient.masked_fill_(self.bad, 0)
        self.count += self.bad

    def check(self, step: int, group: Group, say: Callable[[str], object]) -> float | None:
        """The orthogonality error after a step, None where nothing is constrained; raises where a run can't go on.

        A warning, the first, is told to ``say``. Waits for the device, once a step.
        """
        if self.checked[0] != step:
            count = max(int(part) for part in group.gather(self.count.cpu().reshape(1)))
            if count:
                raise Diverged(f"the loss or a gradient of step {step - count + 1} was not finite")
            self.checked = step, worst_orthogonality(self.model)
        error = self.checked[1]
        # Written so that a NaN stops the run.
        if error is not None and not error <= LIMIT:
            raise Diverged(
                f"the orthogonality error after step {step} is {error:.1e}, above {LIMIT:.0e}"
            )
        if error is not None and error > WARN and not self.warned:
            self.warned = True
            say(
                f"Warning: the orthogonality error after step {step} is {error:.1e}, above {WARN:.0e}."
            )
        return error

"""Measure a run: metrics, training time, and whether it can continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import Group
from .files import Damaged
from .optimizers import skip_steps, unskipped, worst_orthogonality

ORTHOGONALITY_WARNING = 1e-4
ORTHOGONALITY_LIMIT = 1e-2


class Diverged(RuntimeError):
    """Report a loss, a gradient or an orthogonality error with which a run cannot go on."""

    status = 3


def all_finite(state: Any) -> bool:
    """Return whether no tensor in nested dictionaries and lists has a NaN or an infinity.

    The call synchronizes with the host.
    """
    if isinstance(state, Tensor):
        return bool(state.isfinite().all())
    parts: Iterable[Any] = ()
    if isinstance(state, dict):
        parts = state.values()
    elif isinstance(state, list | tuple):
        parts = state
    return all(map(all_finite, parts))


class Clock:
    """Measure the seconds of training.

    The clock stops while the run evaluates and saves. It starts after the first step, which may
    compile.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._before = seconds
        self._since: float | None = None

    @property
    def going(self) -> bool:
        """Return whether the clock runs."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        if self._since is None:
            return self._before
        return self._before + time.perf_counter() - self._since

    def start(self) -> None:
        """Let the clock run."""
        self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Stop the clock inside this context."""
        going = self.going
        self._before = self.seconds
        self._since = None
        yield
        if going:
            self.start()


class Meter:
    """Average metrics since the last reading, over steps and ranks. The sums stay on the device."""

    def __init__(self, device: torch.device) -> None:
        self.names: list[str] = []
        self.sums = torch.zeros(0, dtype=torch.float64, device=device)
        self.steps = 0

    def add(self, metrics: dict[str, Tensor], weight: float) -> None:
        """Add what a step measured. The loop counts ``steps``.

        Args:
            metrics: scalars by name.
            weight: this rank's share of the step.
        """
        if not self.names:
            self.names = list(metrics)
            self.sums = self.sums.new_zeros(len(metrics))
        if self.names != list(metrics):
            raise Damaged(
                f"the last checkpoint has sums of {self.names}, "
                f"but the run measures {list(metrics)}."
            )
        self.sums.add_(torch.stack([value.detach() for value in metrics.values()]), alpha=weight)

    def read(self, group: Group) -> dict[str, float]:
        """Return the means and start again. The call synchronizes with the host."""
        means = (group.mean(self.sums) / max(self.steps, 1)).tolist()
        self.sums.zero_()
        self.steps = 0
        return dict(zip(self.names, means, strict=True))

    def state_dict(self, group: Group) -> dict[str, Any]:
        """Return the sums for a checkpoint."""
        return {"names": self.names, "sums": group.mean(self.sums.clone()), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read what :meth:`state_dict` returned. Anything else raises :class:`Damaged`."""
        names = state["names"]
        sums = state["sums"]
        steps = state["steps"]
        if type(names) is not list or sums.shape != (len(names),) or sums.dtype != self.sums.dtype:
            raise Damaged("its sums of metrics have no such names.")
        if type(steps) is not int or steps < 0:
            raise Damaged("its sums of metrics are of no number of steps.")
        self.names = names
        self.sums = sums.to(self.sums.device)
        self.steps = steps


class Guard:
    """Keep non-finite values from the weights, and check how orthogonal the weights are.

    From the first step whose loss or gradient is not finite, fused optimizers take no step, and all
    others have gradients of zero. This is decided on the device. The loop finds out at the next
    reading.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.bad = torch.zeros((), dtype=torch.float32, device=device)
        # Fused optimizers read the flag themselves. It saves two passes over their gradients.
        skip_steps(optimizer, self.bad)
        self.zeroed = unskipped(optimizer)
        self.bad_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.checked_step = -1
        self.error: float | None = None
        self.warned = False

    @torch.no_grad()
    def screen(self, value: Tensor) -> None:
        """Check the gradients of a step, and a value such as its loss, before the optimizer."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        largest = nn.utils.get_total_norm(gradients, norm_type=torch.inf)
        self.bad.masked_fill_(~torch.isfinite(largest + value), 1)
        bad = self.bad.bool()
        for parameter in self.zeroed:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(bad, 0)
        self.bad_steps += bad

    def check(self, step: int, group: Group, say: Callable[[str], object]) -> float | None:
        """Return the orthogonality error after a step, or None where nothing is constrained.

        Raises :class:`Diverged` where a run cannot go on. The first warning goes to ``say``. The
        call synchronizes with the host, once per step.
        """
        if self.checked_step != step:
            bad_steps = max(int(part) for part in group.gather(self.bad_steps.cpu().reshape(1)))
            if bad_steps:
                first = step - bad_steps + 1
                raise Diverged(
                    f"the loss, a gradient or the norm of all gradients of step {first} was not "
                    "finite"
                )
            self.error = worst_orthogonality(self.model)
            self.checked_step = step
        if self.error is None:
            return None
        message = f"the orthogonality error after step {step} is {self.error:.1e}, above"
        # Written so that a NaN stops the run.
        if not self.error <= ORTHOGONALITY_LIMIT:
            raise Diverged(f"{message} {ORTHOGONALITY_LIMIT:.0e}")
        if self.error > ORTHOGONALITY_WARNING and not self.warned:
            self.warned = True
            say(f"Warning: {message} {ORTHOGONALITY_WARNING:.0e}.")
        return self.error

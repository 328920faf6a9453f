"""The interface of torch's optimizers around an update of one batch of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..manifolds import _orthogonal_group as orthogonal_group
from ..manifolds import stiefel
from ..ops._precision import full_precision
from ..ops.checks import check_tensor
from .batch import Batch, batches, read_largest, readable
from .points import DelayedCheck, check_point, describe, is_hidden

# Above this size the products take longer than the calls, and rounding may exceed what
# `verified_cayley` allows.
_LARGEST_VERIFIED = 512


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Return what a closure returns, called with gradients, or None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def read_lr(group: dict[str, Any]) -> float | None:
    """Return the learning rate of a group as a number, or None if the host cannot read it."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return lr
    if readable(lr):
        return lr.item()
    return None


class KeepsPrecision(Optimizer):
    """Load float32 state of half-precision parameters as it was saved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned."""
        # torch casts floating-point state to the parameter's dtype. As the last hook, this one
        # sees what torch is about to load.
        loaded: list[dict[str, Any]] = []
        with self.register_load_state_dict_pre_hook(lambda _, given: loaded.append(given)):
            super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, loaded[0]["param_groups"], strict=True):
            if "stiefel" not in group:
                continue
            for p, key in zip(group["params"], saved["params"], strict=True):
                self._restore(p, loaded[0]["state"].get(key, {}))

    def _restore(self, p: Tensor, saved: dict[str, Any]) -> None:
        """Set the tensors of a parameter's state to those saved, in their own dtype."""
        for name, value in saved.items():
            # Only tensors are set: reading the defaultdict would add an empty state.
            if isinstance(value, Tensor):
                self.state[p][name] = value.to(p.device, copy=True)


class Mixture(NamedTuple):
    """Hold the tangent vector along which a step goes: a weighted sum of a buffer and the gradient.

    Attributes:
        key: where the state keeps the buffer, or None without one.
        buffer_weight: the weight of the buffer, projected to the tangent space.
        gradient_weight: the weight of the Riemannian gradient.
    """

    key: str | None
    buffer_weight: float
    gradient_weight: float


class Rate(NamedTuple):
    """Hold the number by which a step multiplies its tangent vector.

    Attributes:
        value: the number.
        state: the numbers that the state of the parameter gets when the step is taken.
    """

    value: float
    state: dict[str, float]


class VerifiedMove(NamedTuple):
    """Hold a step of one matrix that is computed and verified, but not taken yet.

    Attributes:
        batch: the matrix.
        point: where it goes, ``(N, N)``.
        key: where the state keeps the buffer, or None without one.
        buffer: the new buffer, ``(N, N)``, or None without one.
        rate: the rate, with the numbers to keep.
    """

    batch: Batch
    point: Tensor
    key: str | None
    buffer: Tensor | None
    rate: Rate

    def take(self) -> None:
        """Write the point and the state."""
        if self.key is not None and self.buffer is not None:
            self.batch.write(self.key, self.buffer)
        for key, value in self.rate.state.items():
            self.batch.write_number(key, value)
        self.batch.move(self.point)


class StiefelOptimizer(KeepsPrecision):
    """Split parameters into batches, check them and move them.

    A subclass defines the tangent vector and the rate of a step, and the update of free parameters.
    """

    def __init__(self, params, defaults: dict[str, Any]) -> None:
        self._versions: dict[Tensor, int] = {}
        self._delayed = DelayedCheck()
        super().__init__(params, {"stiefel": True, "kernel": False, "capturable": True, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after a check of its settings and parameters."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: computes the loss and the gradients again.

        Returns:
            The value of the closure, or None without one.
        """
        loss = evaluate(closure)
        given = self._batches()
        # Nothing is written before every batch of the step is checked or verified.
        must_check = any(self._written(batch) for batch in given)
        if must_check:
            given = self._checked(given)
        moves = [self._verified_move(batch) for batch in given]
        rest = [batch for batch, move in zip(given, moves, strict=True) if move is None]
        if rest and not must_check:
            rest = self._checked(rest)
        for move in moves:
            if move is not None:
                move.take()
        for batch in rest:
            self._update(batch)
        for batch in given:
            for p in batch.params:
                self._versions[p] = p._version
        if rest:
            self._delayed.request(rest)
        return loss

    def check(self) -> None:
        """Raise, before anything is changed, if a gradient or a point must be refused.

        A point that is near enough to the manifold is moved to it.
        """
        self._checked(self._batches())

    def _mixture(self, group: dict[str, Any]) -> Mixture:
        """Return the tangent vector along which a step goes."""
        raise NotImplementedError

    def _rate(self, batch: Batch, g: Tensor) -> float | Tensor:
        """Return the rate of a step and update the state that it depends on."""
        raise NotImplementedError

    def _read_rate(self, batch: Batch, g: Tensor) -> Rate | None:
        """Return the rate of one matrix as a number, or None if it cannot be read as one."""
        raise NotImplementedError

    def _update_free(self, batch: Batch) -> None:
        """Move a free parameter."""
        raise NotImplementedError

    def _batches(self) -> list[Batch]:
        self._check_layouts()
        return [batch for group in self.param_groups for batch in batches(group, self.state)]

    def _checked(self, given: list[Batch]) -> list[Batch]:
        """Return the batches after a check of their gradients and points."""
        for batch in given:
            self._check_gradients(batch)
        suspected = self._delayed.found()
        return [self._on_manifold(batch, suspected) for batch in given]

    def _update(self, batch: Batch) -> None:
        if not batch.on_manifold:
            self._update_free(batch)
            return
        group = batch.group
        mixture = self._mixture(group)
        x = batch.points()
        g = batch.gradients()
        z = stiefel.gradient(x, g, group["metric"])
        if mixture.gradient_weight != 1:
            z = z * mixture.gradient_weight
        if mixture.key is not None:
            z = z + stiefel.project(x, batch.read(mixture.key)) * mixture.buffer_weight
            batch.write(mixture.key, z.at(x))
        retract = stiefel.RETRACTIONS[group["retraction"]]
        batch.move(retract(x, z, -self._rate(batch, g)))

    def _verified_move(self, batch: Batch) -> VerifiedMove | None:
        """Compute the step of one square matrix on the CPU, or None where :meth:`_update` must.

        This takes half the time of :meth:`_update` at 24 x 24. A result shows whether the gradient
        was finite and the point on the manifold, so that nothing is checked before.
        """
        group = batch.group
        if group["retraction"] != "cayley" or not batch.is_one_square_matrix():
            return None
        x = batch.points()
        if x.shape[0] > _LARGEST_VERIFIED:
            return None
        mixture = self._mixture(group)
        if mixture.key is not None and not batch.has_state((mixture.key,)):
            return None
        g = batch.given()
        if group["maximize"]:
            g = -g
        rate = self._read_rate(batch, g)
        if rate is None:
            return None
        with full_precision("cpu"):
            skew = orthogonal_group.skew_product(x, self._mixed(batch, mixture, g))
            point = orthogonal_group.verified_cayley(x, skew, -rate.value)
            if point is None:
                return None
            buffer = None
            if mixture.key is not None:
                buffer = torch.mm(x, skew)
        return VerifiedMove(batch, point, mixture.key, buffer, rate)

    def _mixed(self, batch: Batch, mixture: Mixture, g: Tensor) -> Tensor:
        """Return the matrix whose skew product with X is that of the tangent vector."""
        weight = mixture.gradient_weight * stiefel.skew_scale(batch.group["metric"])
        if mixture.key is None:
            if weight != 1:
                g = g * weight
            return g
        projected = stiefel.skew_scale("euclidean") * mixture.buffer_weight
        return (batch.read(mixture.key) * projected).add_(g, alpha=weight)

    def _check_group(self, group: dict[str, Any]) -> None:
        call = type(self).__name__
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            shape = tuple(lr.shape)
            raise ValueError(f"{call}: a tensor lr must have one element, got shape {shape}.")
        if not 0 <= lr < float("inf"):
            raise ValueError(f"{call}: lr must be a finite number of at least 0, got {lr}.")
        stiefel.check_metric(call, group["metric"])
        retraction = group["retraction"]
        if retraction not in stiefel.RETRACTIONS:
            known = ", ".join(map(repr, stiefel.RETRACTIONS))
            raise ValueError(f"{call}: retraction must be one of {known}, got {retraction!r}.")
        if group["stiefel"]:
            for i in range(len(group["params"])):
                self._check_point(group, i)

    def _check_layouts(self) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                g = p.grad
                if g is not None and g.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__}: {describe(group, i)} has a sparse gradient. "
                        "Use a dense one."
                    )

    def _check_gradients(self, batch: Batch) -> None:
        """Raise for entries that are not finite, by default only on the CPU."""
        strict = batch.group["error_if_nonfinite"]
        if strict is None:
            strict = batch.params[0].is_cpu
        if not strict or batch.is_finite():
            return
        for i, p in zip(batch.indices, batch.params, strict=True):
            if p.grad is not None and not p.grad.isfinite().all():
                raise RuntimeError(
                    f"{type(self).__name__}: the gradient of {describe(batch.group, i)} has NaN or "
                    "infinite entries. Nothing was changed. Look for the loss that made it, or "
                    "pass error_if_nonfinite=False to take it for zero."
                )

    def _on_manifold(self, batch: Batch, suspected: bool) -> Batch:
        """Return the batch after its points were found on the manifold or moved to it.

        torch counts writes to a parameter, except those through ``.data``. The host checks for
        these where it can read the values. On other devices :meth:`Batch.move` leaves in place what
        is off the manifold, and ``suspected`` is true in a later step.
        """
        if not batch.on_manifold or is_hidden(batch.params[0]):
            return batch
        written = self._written(batch)
        if suspected or (readable(batch.params[0]) and not self._is_near(batch)):
            written = batch.params
        if not written:
            return batch
        for i, p in zip(batch.indices, batch.params, strict=True):
            if any(p is other for other in written):
                self._check_point(batch.group, i)
        return Batch(batch.indices, batch.group, self.state)

    def _written(self, batch: Batch) -> list[Tensor]:
        """Return the points that were written to since the last step, as torch counts."""
        if not batch.on_manifold:
            return []
        return [p for p in batch.params if self._versions.get(p) != p._version]

    def _is_near(self, batch: Batch) -> bool:
        return read_largest(batch.error()) <= torch.finfo(batch.params[0].dtype).eps ** 0.5

    def _check_point(self, group: dict[str, Any], index: int) -> None:
        p = group["params"][index]
        kind = type(self).__name__
        name = describe(group, index)
        check_tensor(kind, name, p)
        check_point(f"{kind}: {name}", p, kernel=group["kernel"], project=group["project"])
        self._versions[p] = p._version

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has parameters of its own, which were not checked yet.
        self.__dict__.setdefault("_versions", {})
        self.__dict__.setdefault("_delayed", DelayedCheck())

"""What the optimisers on the manifold share: torch's interface around an update of one batch of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..api import orthogonality_error
from ..manifolds.stiefel import RETRACTIONS, check_metric
from ..ops._linalg import double, nearest_orthogonal
from .batch import ROUNDED, Batch, as_matrix, as_weight, batches, read_largest, readable


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """What a closure returns, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class KeepsPrecision(Optimizer):
    """An optimiser that loads float32 state of half-precision parameters as it was saved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave."""
        # torch casts floating-point state to the parameter's dtype. As the last hook this sees what torch is about to load.
        loaded: list[dict[str, Any]] = []
        with self.register_load_state_dict_pre_hook(lambda _, given: loaded.append(given)):
            super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, loaded[0]["param_groups"], strict=True):
            if "stiefel" in group:
                for p, key in zip(group["params"], saved["params"], strict=True):
                    tensors = {
                        n: x
                        for n, x in loaded[0]["state"].get(key, {}).items()
                        if isinstance(x, Tensor)
                    }
                    # The state is a defaultdict: reading it for a parameter without state would add an empty one.
                    if tensors:
                        self.state[p].update(
                            {n: x.to(p.device, copy=True) for n, x in tensors.items()}
                        )


class StiefelOptimizer(KeepsPrecision):
    """Splits parameters into batches and keeps torch's interface; a subclass defines :meth:`_update`."""

    def __init__(self, params, defaults: dict[str, Any]) -> None:
        self._versions: dict[Tensor, int] = {}
        self._later = Later()
        super().__init__(params, {"stiefel": True, "kernel": False, "capturable": True, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, once its settings and parameters are found good."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure``, if given, computes loss and gradients anew, and its loss is returned."""
        loss = evaluated(closure)
        given = self._checked()
        for batch in given:
            self._update(batch.group, batch)
            self._versions.update((p, p._version) for p in batch.params)
        self._later.look([batch for batch in given if batch.group["stiefel"]])
        return loss

    def check(self) -> None:
        """Raise, before anything is changed, if a gradient or a point must be refused; bring back what is near enough."""
        self._checked()

    def _checked(self) -> list[Batch]:
        """The batches of this step, found good."""
        self._check_layouts()
        given = [batch for group in self.param_groups for batch in batches(group, self.state)]
        for batch in given:
            self._check_gradients(batch)
        found = self._later.found()
        return [self._on_manifold(batch, found) for batch in given]

    def _update(self, group: dict[str, Any], batch: Batch) -> None:
        raise NotImplementedError

    def _check(self, group: dict[str, Any]) -> None:
        call = type(self).__name__
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(
                f"{call}: a tensor lr must have one element, got shape {tuple(lr.shape)}."
            )
        if not 0 <= lr < float("inf"):
            raise ValueError(f"{call}: lr must be a finite number of at least 0, got {lr}.")
        check_metric(call, group["metric"])
        if group["retraction"] not in RETRACTIONS:
            known = ", ".join(map(repr, RETRACTIONS))
            raise ValueError(
                f"{call}: retraction must be one of {known}, got {group['retraction']!r}."
            )
        if group["stiefel"]:
            for i in range(len(group["params"])):
                self._check_point(group, i)

    def _check_layouts(self) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None and p.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__}: {_named(group, i)} has a sparse gradient. Use a dense one."
                    )

    def _check_gradients(self, batch: Batch) -> None:
        """Raise for entries that are not finite, unless that would synchronize with the host unasked."""
        strict = batch.group["error_if_nonfinite"]
        if strict is None:
            strict = batch.params[0].device.type == "cpu"
        if not strict or batch.is_finite():
            return
        for i, p in zip(batch.indices, batch.params, strict=True):
            if p.grad is not None and not p.grad.isfinite().all():
                raise RuntimeError(
                    f"{type(self).__name__}: the gradient of {_named(batch.group, i)} has NaN or infinite entries. Nothing was "
                    "changed. Look for the loss that made it, or pass error_if_nonfinite=False to take it for zero."
                )

    def _on_manifold(self, batch: Batch, suspected: bool) -> Batch:
        """The batch, once its points are found on the manifold or were brought back to it.

        torch counts writes to a parameter, except those through ``.data``. The host looks for these where it can read the
        values. On other devices :meth:`Batch.move` holds back what is off the manifold, and ``suspected`` follows.
        """
        if not batch.group["stiefel"] or _unreadable_now(batch.params[0]):
            return batch
        written = [p for p in batch.params if self._versions.get(p) != p._version]
        if suspected or (readable(batch.params[0]) and not self._looks_good(batch)):
            written = batch.params
        if not written:
            return batch
        for i, p in zip(batch.indices, batch.params, strict=True):
            if any(p is other for other in written):
                self._check_point(batch.group, i)
        return Batch(batch.indices, batch.group, self.state)

    def _looks_good(self, batch: Batch) -> bool:
        return read_largest(batch.error()) <= torch.finfo(batch.params[0].dtype).eps ** 0.5

    def _check_point(self, group: dict[str, Any], index: int) -> None:
        p = group["params"][index]
        _check_point(
            f"{type(self).__name__}: {_named(group, index)}", p, group["kernel"], group["project"]
        )
        self._versions[p] = p._version

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has parameters of its own, not looked at yet.
        self.__dict__.setdefault("_versions", {})
        self.__dict__.setdefault("_later", Later())


class Later:
    """Learn whether a point on a CUDA device was off the manifold without waiting for the device: a step or more later."""

    def __init__(self) -> None:
        self._error: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def look(self, given: list[Batch]) -> None:
        """Send for the largest error of these batches, unless an answer is still awaited."""
        watched = [
            batch
            for batch in given
            if batch.params[0].is_cuda and not _unreadable_now(batch.params[0])
        ]
        if not watched or self._error is not None:
            return
        device = watched[0].params[0].device
        largest = torch.stack(
            [batch.error().max().to(device, torch.float64) for batch in watched]
        ).max()
        with torch.cuda.device(device):
            self._error = largest.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def found(self) -> bool:
        """Return whether an answer has come, and it is that a point was off the manifold."""
        if self._error is None or self._copied is None or torch.compiler.is_compiling():
            return False
        if torch.cuda.is_current_stream_capturing() or not self._copied.query():
            return False
        error = self._error.item()
        self._error = None
        return not error <= ROUNDED


def _unreadable_now(p: Tensor) -> bool:
    """Return whether nobody can look at a value: while a CUDA graph is captured, or if there is none."""
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return p.is_meta


def _check_point(what: str, p: Tensor, kernel: bool, project: bool) -> None:
    """Raises unless the parameter is on the manifold, or may be moved there."""
    free = "If it is free, put it in a group with 'stiefel': False, or let cwy.optim.for_model make the groups"
    if p.dim() < 2 or p.numel() == 0:
        raise ValueError(
            f"{what} must be a matrix (*, rows, columns), got shape {tuple(p.shape)}. {free}."
        )
    if not (p.is_floating_point() or p.is_complex()):
        raise TypeError(f"{what} must be floating-point or complex, got {p.dtype}.")
    if hasattr(p, "device_mesh"):
        raise ValueError(
            f"{what} is sharded, but a step on the manifold needs the whole matrix. Use DDP for it."
        )
    if p.is_meta:
        return
    matrix = as_matrix(p.detach(), kernel)
    error = orthogonality_error(matrix)
    if not error < float("inf"):
        raise ValueError(f"{what} has NaN or infinite entries.")
    if error > ROUNDED and not project:
        raise ValueError(
            f"{what} is not on the manifold: max|XᴴX - I| is {error:.2g}. To move it there pass project=True. {free}."
        )
    # Less is left alone: what was saved and loaded goes on bit by bit.
    if error > torch.finfo(p.dtype).eps ** 0.5:
        p.detach().copy_(as_weight(nearest_orthogonal(double(matrix)), p, kernel))


def _named(group: dict[str, Any], index: int) -> str:
    names = group.get("param_names")
    shape = tuple(group["params"][index].shape)
    return (
        f"parameter {names[index]!r} {shape}"
        if names
        else f"parameter {index} of its group, {shape}"
    )

"""Many layers at once: one batched call computes all weights of a kind, forward and backward.

A small matrix does not fill a GPU, and each layer launches its own kernels. Here the free
parameters of layers of one kind are stacked, the map is called once, and each layer takes its
slice.
"""

from __future__ import annotations

import copy
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import register_optimizer_step_post_hook

from ._torch import (
    backward_number,
    dispatch_mode_count,
    forward_mode_is_active,
    saved_tensors_are_packed,
    transform_is_active,
)
from .api import orthogonal
from .ops.dispatch import is_plain_eager
from .parametrizations import OrthogonalMap
from .parametrizations.base import PullBack, versions_of
from .parametrizations.constraints import Constraint, generation, named_constraints
from .parametrizations.reflections import ReflectionMap

M = TypeVar("M", bound=nn.Module)
Where = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[str, nn.Module], bool]
"""Which layers: a type, several types, a pattern of names, or a function of name and module."""


class together:
    """Compute all constrained weights of one kind in one batched call, inside a ``with`` block.

    Weights are of one kind if their method, shape, dtype and device are the same. Other weights,
    and layers outside of ``model``, are computed one at a time, as without the block. Results equal
    those of single layers to rounding. Backward passes may run inside the block, after it, and
    several times. They have no second derivative.

    If a parameter changes inside the block, as by an optimizer, the weights are computed again. A
    change through ``parameter.data`` is not noticed. Under ``torch.func`` transforms, forward-mode
    AD and modes such as ``FlopCounterMode``, and for parameters of FSDP2, the layers compute their
    weights one at a time. Under ``torch.compile`` they do so too, except in models of
    :func:`cwy.constrain`.

    Args:
        model: a module with layers that :func:`cwy.orthogonal` constrains.

    Example:
        >>> layers = [orthogonal(torch.nn.Linear(8, 8)) for _ in range(3)]
        >>> model = torch.nn.Sequential(*layers)
        >>> x = torch.randn(5, 8)
        >>> with together(model):
        ...     y = model(x)
        >>> torch.allclose(y, model(x), atol=1e-6)
        True
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"together: expected a torch.nn.Module, got {type(model).__name__}.")
        self._model = model
        self._entered: list[_Entered] = []

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        stacks = [stack for stack in _stacks(self._model) if stack.is_free()]
        for stack in stacks:
            stack.open()
        self._entered.append(_Entered(stacks, register_optimizer_step_post_hook(_count_step)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if torch.compiler.is_compiling() or not self._entered:
            return
        entered = self._entered.pop()
        entered.hook.remove()
        for stack in entered.stacks:
            stack.close()


class _Entered(NamedTuple):
    """Hold what a block opened: its stacks, and the hook that counts steps of optimizers."""

    stacks: list[_Stack]
    hook: Any


_steps_of: dict[int, int] = {}
"""How many steps of optimizers changed a parameter inside of blocks, by its id.

A fused step changes parameters without a new version. Steps for other models must not count: a
recomputation would take its weights for outdated ones.
"""


def _count_step(optimizer: torch.optim.Optimizer, *given: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _steps_of[id(parameter)] = _steps_of.get(id(parameter), 0) + 1


def constrain(
    model: nn.Module, where: Where, *, name: str = "weight", **options: Any
) -> list[Constraint]:
    """Constrain every matching layer, and run the model's forward pass :class:`together`.

    Args:
        model: the model, changed in place.
        where: which layers: a module type or a tuple of types, a pattern of names such as
            ``"encoder.*.linear?"`` (see :mod:`fnmatch`), or a function of the name and the module.
        name: the name of the weight in each layer.
        options: as in :func:`cwy.orthogonal`, for example ``method``, ``reflections`` and ``init``.

    Returns:
        What it did: a :class:`~cwy.parametrizations.constraints.Constraint` for each layer.

    Example:
        >>> layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
        >>> model = torch.nn.Sequential(*layers)
        >>> done = constrain(model, torch.nn.Linear, reflections=4)
        >>> [str(one.map) for one in done]
        ['CWY(n=8, m=8, reflections=4)', 'CWY(n=8, m=8, reflections=4)']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"constrain: expected a torch.nn.Module, got {type(model).__name__}.")
    chosen = _matching(model, where)
    held = {id(one.module) for one in named_constraints(model) if one.name == name}
    for path, layer in chosen.items():
        if id(layer) in held:
            raise ValueError(
                f"constrain: {path or 'the model'} has a constrained {name} already. "
                "Exclude it by where, or call cwy.bake first."
            )
        if not isinstance(getattr(layer, name, None), Tensor):
            raise ValueError(
                f"constrain: {path or 'the model'}, a {type(layer).__name__}, "
                f"has no tensor {name!r}. Pass name=, or exclude it by where."
            )
    _try_on_copies(chosen.values(), name, options)
    for layer in chosen.values():
        orthogonal(layer, name, **options)
    run_together(model)
    layers = {id(layer) for layer in chosen.values()}
    return [
        one for one in named_constraints(model) if id(one.module) in layers and one.name == name
    ]


def _try_on_copies(layers: Iterable[nn.Module], name: str, options: dict[str, Any]) -> None:
    """Raise what the options are refused with, before any layer is changed."""
    seen = set()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in layers:
            weight = getattr(layer, name)
            kind = (type(layer), weight.shape, weight.dtype)
            if kind not in seen:
                seen.add(kind)
                orthogonal(copy.deepcopy(layer), name, **options)


def run_together(model: M) -> M:
    """Make each call of a model run :class:`together`. A second call changes nothing."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(getattr(hook, "__self__", None), _Calls):
            return model
    calls = _Calls(model)
    model.register_forward_pre_hook(calls.enter)
    model.register_forward_hook(calls.exit, always_call=True)
    return model


def _matching(model: nn.Module, where: Where) -> dict[str, nn.Module]:
    """Return the layers that ``where`` names, by their names."""
    matches = _predicate(where)
    chosen = {name: layer for name, layer in model.named_modules() if matches(name, layer)}
    if not chosen:
        kinds = sorted({type(layer).__name__ for layer in model.modules()})
        raise ValueError(
            f"constrain: no layer of {type(model).__name__} matches where={where!r}. "
            f"It has modules of the types {', '.join(kinds)}."
        )
    return chosen


def _predicate(where: Where) -> Callable[[str, nn.Module], bool]:
    if isinstance(where, str):
        return lambda name, layer: fnmatch.fnmatchcase(name, where)
    if isinstance(where, (type, tuple)):
        return lambda name, layer: isinstance(layer, where)
    if callable(where):
        return where
    raise TypeError(
        "constrain: where must be a module type, a pattern of names "
        f"or a function of name and module, got {type(where).__name__}."
    )


class _Calls:
    """Open a block before each forward pass of a model, and close it afterwards.

    The stacks are found once. A stack that does not fit the model any more has them found again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._opened: list[list[_Stack]] = []
        self._find(model)

    def _find(self, model: nn.Module) -> None:
        self._stacks = _stacks(model)
        self._watched = [_Watched(x) for one in named_constraints(model) for x in one.free]
        self._generation = generation()
        for stack in self._stacks:
            stack.introduce()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        """Return one that finds its stacks at its first call. It belongs to a copy of the model."""
        twin = type(self).__new__(type(self))
        twin._stacks = []
        twin._watched = []
        twin._generation = -1
        twin._opened = []
        return twin

    def enter(self, model: nn.Module, given: tuple[Any, ...]) -> None:
        """Open the stacks."""
        if torch.compiler.is_compiling():
            for stack in self._stacks:
                stack.give()
            return
        self._opened.append([])
        if not self._still_fit():
            self._find(model)
        for stack in self._stacks:
            if stack.is_free():
                stack.open()
                self._opened[-1].append(stack)

    def _still_fit(self) -> bool:
        """Return whether the stacks hold every weight that they could hold."""
        if self._generation != generation() or any(one.is_stale for one in self._stacks):
            return False
        return all(one.is_unchanged for one in self._watched)

    def exit(self, model: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        """Close the stacks, also after an error."""
        if torch.compiler.is_compiling():
            for stack in self._stacks:
                stack.take_back()
            return
        if self._opened:
            for stack in self._opened.pop():
                stack.close()


class _Watched:
    """Hold a free parameter, and what its kind depends on."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._requires_grad = x.requires_grad
        self._dtype = x.dtype
        self._device = x.device

    @property
    def is_unchanged(self) -> bool:
        x = self._x
        if x.requires_grad != self._requires_grad:
            return False
        return x.dtype == self._dtype and x.device == self._device


@dataclass
class _Computed:
    """Hold weights of a stack, and what they were computed from."""

    weights: tuple[Tensor, ...]
    versions: list[tuple[int, ...]]


class _Kept(NamedTuple):
    """Hold a weight that a checkpointed region used, and what it was computed from.

    The recomputation, in the backward pass, must use the same weight. To compute it again would
    save other tensors than the region did.
    """

    weight: Tensor
    versions: tuple[int, ...]


def _kept_weight(chart: OrthogonalMap, free: tuple[Tensor, ...]) -> Tensor | None:
    """Return the weight for a recomputation, or None if no region used it."""
    kept = chart.kept
    if not isinstance(kept, _Kept) or not saved_tensors_are_packed():
        return None
    if not torch.is_grad_enabled() or kept.versions != _versions(chart, free):
        return None
    return kept.weight


def _alone(chart: OrthogonalMap, free: tuple[Tensor, ...]) -> Tensor | None:
    """Return the weight for a checkpointed region outside of a block, or None elsewhere.

    A recomputation can't tell such a region from one inside a block. So the weight is computed and
    kept in the same way for both, and they save the same tensors.
    """
    if not torch.is_grad_enabled() or not saved_tensors_are_packed():
        return None
    if not any(x.requires_grad for x in free) or chart.recomputed == versions_of(free):
        return None
    with _own_hooks():
        weight = chart.compute(*free)
    chart.kept = _Kept(weight, _versions(chart, free))
    return weight


def _own_hooks() -> saved_tensors_hooks:
    """Return a context in which the hooks of a checkpoint see nothing."""
    return saved_tensors_hooks(Tensor.detach, Tensor.detach)


def _chain(member: Constraint) -> ParametrizationList | None:
    """Return the parametrizations of a weight, None if there are none any more."""
    if not parametrize.is_parametrized(member.module, member.name):
        return None
    chains = cast(nn.ModuleDict, member.module.parametrizations)
    return cast(ParametrizationList, chains[member.name])


class _Stack:
    """Hold constrained weights of one kind. One call computes them when the first is asked for.

    Args:
        members: the weights.
    """

    def __init__(self, members: Sequence[Constraint]) -> None:
        self.members = members
        self.is_stale = False
        self._requires_grad = [x.requires_grad for x in members[0].free]
        self._learns = any(self._requires_grad)
        self._places = {
            (id(member.map), id(member.free[0])): place for place, member in enumerate(members)
        }
        self._computed: dict[tuple[bool, bool], _Computed] = {}
        self._is_open = False

    def is_free(self) -> bool:
        """Return whether no other block serves the weights."""
        return not any(_is_served(member.map) for member in self.members)

    def give(self) -> None:
        """Hand each map its weight, in a program that is being compiled.

        The parameters are those that the layers have now: a compiler or ``functional_call`` may
        have put others in their place.
        """
        first = self.members[0].map
        if not isinstance(first, ReflectionMap) or first.dtype.is_complex:
            return
        chains = [_chain(member) for member in self.members]
        if any(chain is None or len(chain) != 1 for chain in chains):
            # The weights were baked since the stack was found, or have other maps, too.
            return
        v = torch.stack([cast(ParametrizationList, chain).original for chain in chains])
        signs = torch.stack([cast(ReflectionMap, member.map).signs for member in self.members])
        weights = first.product(v, signs)
        if first.wide:
            weights = weights.mT.contiguous()
        for member, weight in zip(self.members, self._shaped(weights.unbind(0)), strict=True):
            member.map.given = weight

    def take_back(self) -> None:
        """Let each map compute by itself again, after :meth:`give`."""
        for member in self.members:
            member.map.given = None

    def introduce(self) -> None:
        """Let maps that know no other stack ask this one, also before the first block."""
        for member in self.members:
            if member.map.stack is None:
                member.map.stack = self

    def open(self) -> None:
        """Let the maps ask this stack for their weights."""
        self._is_open = True
        for member in self.members:
            chart = member.map
            if chart.stack is not self:
                chart.stack = self
            kept = chart.kept
            if isinstance(kept, _Kept) and kept.versions != _versions(chart, member.free):
                chart.kept = None

    def close(self) -> None:
        """Let the maps compute by themselves again. They still ask, and get no weight."""
        self._is_open = False
        self._computed.clear()

    @property
    def serves(self) -> bool:
        """Return whether the maps may ask for weights."""
        return self._is_open

    def weight(self, chart: OrthogonalMap, free: tuple[Tensor, ...]) -> Tensor | None:
        """Return the weight of a map, or None if the map must compute it by itself."""
        if transform_is_active() or dispatch_mode_count() > 0 or forward_mode_is_active():
            return None
        if backward_number() >= 0:
            return _kept_weight(chart, free)
        if not self._is_open:
            return _alone(chart, free)
        recording = self._learns and torch.is_grad_enabled()
        mode = (recording, torch.is_inference_mode_enabled())
        versions = _versions(chart, free)
        place = self._places.get((id(chart), id(free[0])))
        computed = self._computed.get(mode)
        if place is None or computed is None or computed.versions[place] != versions:
            if place is None or not self._still_fits(free):
                self.is_stale = True
                return None
            computed = self._compute(recording)
            self._computed[mode] = computed
        weight = computed.weights[place]
        if recording and saved_tensors_are_packed():
            if chart.recomputed is not None and chart.recomputed == versions_of(free):
                return None
            chart.kept = _Kept(weight, versions)
        return weight

    def _still_fits(self, free: tuple[Tensor, ...]) -> bool:
        """Return whether a member's parameters are learned or frozen as when it was found."""
        return [x.requires_grad for x in free] == self._requires_grad

    def _compute(self, recording: bool) -> _Computed:
        """Compute the weights of all members."""
        if recording:
            flat = [x for member in self.members for x in member.free]
            slices = _Together.apply(self, *flat)
        else:
            with torch.no_grad():
                slices = self.form(self.stacked_free()).unbind(0)
        versions = [_versions(member.map, member.free) for member in self.members]
        return _Computed(self._shaped(slices), versions)

    def _shaped(self, matrices: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return each matrix in the shape of its weight: kernels of convolutions are not flat."""
        weights = []
        for member, matrix in zip(self.members, matrices, strict=True):
            if member.map.kernel is not None:
                matrix = matrix.reshape(member.map.kernel)
            weights.append(matrix)
        return tuple(weights)

    def stacked_free(self) -> list[Tensor]:
        """Return the free parameters, each kind of them stacked along a new first dimension.

        It is called where no graph is recorded.
        """
        kinds = zip(*(member.free for member in self.members), strict=True)
        return [torch.stack(kind) for kind in kinds]

    def joint(self) -> OrthogonalMap:
        """Return one map that has the states of all members, for stacked free parameters."""
        first = self.members[0].map
        buffers = dict(first._buffers)
        for name in first.stacked_buffers or ():
            if name in buffers:
                buffers[name] = torch.stack([_state(member.map, name) for member in self.members])
        # A copy by copy.copy takes ten times as long.
        joint = object.__new__(type(first))
        attributes = vars(first) | {
            "batch": (len(self.members), *first.batch),
            "kernel": None,
            "stack": None,
            "_buffers": buffers,
        }
        vars(joint).update(attributes)
        return joint

    def form(self, free: Sequence[Tensor]) -> Tensor:
        """Compute the weights of stacked free parameters."""
        return self.joint()(*free)

    def weights_and_pull_back(self, free: list[Tensor]) -> tuple[Tensor, PullBack]:
        """Compute the same with its backward pass, which may run several times."""
        joint = self.joint()
        found = joint.matrix_and_pull_back(*free)
        if found is None:
            return _by_autograd(joint, free)
        weights, pull_back = found
        if joint.wide:
            weights = weights.mT.contiguous()

        def plain_pull_back(gradient: Tensor) -> Sequence[Tensor]:
            if not is_plain_eager(gradient):
                _, by_autograd = _by_autograd(joint, free)
                return by_autograd(gradient)
            if joint.wide:
                gradient = gradient.mT
            return pull_back(gradient)

        return weights, plain_pull_back


def _state(chart: OrthogonalMap, name: str) -> Tensor:
    state = chart._buffers[name]
    assert state is not None
    return state


def _by_autograd(joint: OrthogonalMap, free: list[Tensor]) -> tuple[Tensor, PullBack]:
    """Return the weights, and the backward pass through a graph of their own."""
    # The recomputation of a checkpoint does not come here.
    with torch.enable_grad(), _own_hooks():
        leaves = [x.detach().requires_grad_() for x in free]
        weights = joint(*leaves)

    def pull_back(gradient: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            return torch.autograd.grad(weights, leaves, gradient, retain_graph=True)

    return weights.detach(), pull_back


class _Together(Function):
    """Compute all weights of a stack as a function of all of its free parameters.

    The tensors that its backward pass takes are not saved tensors. So several backward passes may
    go through it, as in gradient accumulation and checkpointing.
    """

    @staticmethod
    def forward(ctx, stack, *flat):
        weights, ctx.pull_back = stack.weights_and_pull_back(stack.stacked_free())
        ctx.weights = weights
        ctx.set_materialize_grads(False)
        return weights.unbind(0)

    @staticmethod
    def backward(ctx, *gradients):
        every = list(gradients)
        for place, g in enumerate(gradients):
            if g is None:
                every[place] = torch.zeros_like(ctx.weights[place])
        # A batch of gradients, as of a Jacobian, can't be detached.
        with torch.no_grad():
            gradient = torch.stack(every)
        kinds = [x.unbind(0) for x in ctx.pull_back(gradient)]
        found = []
        for place, g in enumerate(gradients):
            for kind in kinds:
                # A layer that was not used has no gradient, as without the block.
                if g is None:
                    found.append(None)
                elif torch.is_grad_enabled():
                    found.append(_Last.apply(kind[place].detach().requires_grad_()))
                else:
                    found.append(kind[place])
        return None, *found


class _Last(Function):
    """Pass on a gradient that is not differentiated again."""

    @staticmethod
    def forward(ctx, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "cwy.together: weights that are computed together have no second derivative. "
            "Constrain the layers by cwy.orthogonal, and leave out cwy.together and cwy.constrain."
        )


def _versions(chart: OrthogonalMap, free: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return numbers that change when a parameter or a state is written to."""
    numbers = []
    for x in free:
        numbers += (x.requires_grad, _steps_of.get(id(x), 0))
        if not x.is_inference():
            numbers += (x._version, x.data_ptr())
    for name in chart.stacked_buffers or ():
        state = chart._buffers.get(name)
        if state is not None and not state.is_inference():
            numbers += (state._version, state.data_ptr())
    return tuple(numbers)


def _stacks(model: nn.Module) -> list[_Stack]:
    """Return a stack for each kind of weight that several layers have."""
    kinds: dict[tuple[Any, ...], list[Constraint]] = {}
    for constraint in named_constraints(model):
        kind = _kind(constraint)
        if kind is not None:
            kinds.setdefault(kind, []).append(constraint)
    return [_Stack(members) for members in kinds.values() if len(members) > 1]


def _is_served(chart: OrthogonalMap) -> bool:
    """Return whether an open block serves a map."""
    return chart.stack is not None and chart.stack.serves


def _kind(constraint: Constraint) -> tuple[Any, ...] | None:
    """Return what weights of one kind have in common, or None if the weight takes no part."""
    chart = constraint.map
    if chart.stacked_buffers is None:
        return None
    for x in constraint.free:
        if type(x) not in (Tensor, nn.Parameter) or x.is_inference():
            return None
    plain = {
        name: value
        for name, value in vars(chart).items()
        if name == "batch" or (name != "training" and isinstance(value, (bool, int, float, str)))
    }
    free = [(x.shape, x.dtype, x.device, x.requires_grad) for x in constraint.free]
    return (type(chart), tuple(sorted(plain.items())), tuple(free))

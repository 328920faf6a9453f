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
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from ._torch import backward_number, saved_tensors_are_packed, transform_is_active
from .api import orthogonal
from .parametrizations import OrthogonalMap
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

    If a parameter changes inside the block, as by an optimizer, the weights are computed again.
    Under ``torch.func`` transforms, and for parameters of FSDP2, the layers compute their weights
    one at a time. Under ``torch.compile`` they do so too, except in models of
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
        self._entered: list[list[_Stack]] = []

    def __enter__(self) -> None:
        stacks = []
        if not torch.compiler.is_compiling():
            stacks = _stacks(self._model)
        for stack in stacks:
            stack.open()
        self._entered.append(stacks)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stack in self._entered.pop():
            stack.close()


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
        self._stacks = _stacks(model)
        self._generation = generation()
        self._opened: list[list[_Stack]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        """Return one that finds its stacks at its first call. It belongs to a copy of the model."""
        twin = type(self).__new__(type(self))
        twin._stacks = []
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
        if self._generation != generation() or not all(one.fits() for one in self._stacks):
            self._stacks = _stacks(model)
            self._generation = generation()
        for place, stack in enumerate(self._stacks):
            if stack.is_checkpointed:
                # A backward pass may still ask the old one.
                stack = _Stack(stack.members)
                self._stacks[place] = stack
            if stack.is_free():
                stack.open()
                self._opened[-1].append(stack)

    def exit(self, model: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        """Close the stacks, also after an error."""
        if torch.compiler.is_compiling():
            for stack in self._stacks:
                stack.take_back()
            return
        if self._opened:
            for stack in self._opened.pop():
                stack.close()


class _Like(NamedTuple):
    """What the free parameters of a stack have in common."""

    requires_grad: bool
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Computed:
    """Weights of a stack, and what they were computed from."""

    weights: tuple[Tensor, ...]
    versions: list[tuple[int, ...]]


class _Stack:
    """Constrained weights of one kind, which one call computes when the first of them is asked for.

    Args:
        members: the weights.
    """

    def __init__(self, members: Sequence[Constraint]) -> None:
        self.members = members
        self.is_checkpointed = False
        self._first = members[0].free[0]
        self._like = _Like(self._first.requires_grad, self._first.dtype, self._first.device)
        self._is_stale = False
        self._places = {
            (id(member.map), id(member.free[0])): place for place, member in enumerate(members)
        }
        self._computed: dict[tuple[bool, bool], _Computed] = {}
        self._is_open = False

    def fits(self) -> bool:
        """Return whether the weights are still of one kind."""
        if self._is_stale:
            return False
        like = self._like
        for member in self.members:
            x = member.free[0]
            if x.requires_grad != like.requires_grad:
                return False
            if x.dtype != like.dtype or x.device != like.device:
                return False
        return True

    def is_free(self) -> bool:
        """Return whether no other block serves the weights."""
        return not any(_is_served(member.map) for member in self.members)

    def give(self) -> None:
        """Hand each map its weight, in a program that is being compiled."""
        first = self.members[0].map
        if not isinstance(first, ReflectionMap) or first.dtype.is_complex:
            return
        if not all(parametrize.is_parametrized(one.module, one.name) for one in self.members):
            # The weights were baked since the stack was found.
            return
        v = torch.stack([member.free[0] for member in self.members])
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

    def open(self) -> None:
        """Let the maps ask this stack for their weights."""
        self._is_open = True
        for member in self.members:
            if member.map.stack is not self:
                member.map.stack = self

    def close(self) -> None:
        """Let the maps compute by themselves again. They still ask, and get no weight.

        Weights that were used in a checkpointed region stay. Its recomputation asks for them again.
        """
        self._is_open = False
        if not self.is_checkpointed:
            self._computed.clear()

    @property
    def serves(self) -> bool:
        """Whether the maps may ask for weights: inside the block, or in a recomputation."""
        return self._is_open or (self.is_checkpointed and backward_number() >= 0)

    def weight(self, chart: OrthogonalMap, free: tuple[Tensor, ...]) -> Tensor | None:
        """Return the weight of a map, or None if the map must compute it by itself."""
        if torch.compiler.is_compiling() or transform_is_active() or not self.serves:
            return None
        place = self._places.get((id(chart), id(free[0])))
        if place is None or free[0].requires_grad != self._like.requires_grad:
            self._is_stale = True
            return None
        recording = self._like.requires_grad and torch.is_grad_enabled()
        mode = (recording, torch.is_inference_mode_enabled())
        computed = self._computed.get(mode)
        if computed is None or computed.versions[place] != _versions(chart, free):
            if not self._is_open or backward_number() >= 0:
                return None
            computed = self._compute(recording)
            self._computed[mode] = computed
        if saved_tensors_are_packed():
            self.is_checkpointed = True
        return computed.weights[place]

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
        """Return the free parameters, each kind of them stacked along a new first dimension."""
        kinds = zip(*(member.free for member in self.members), strict=True)
        return [torch.stack([x.detach() for x in kind]) for kind in kinds]

    def form(self, free: Sequence[Tensor]) -> Tensor:
        """Compute the weights of stacked free parameters by one map that has all of the states."""
        first = self.members[0].map
        joint = copy.copy(first)
        joint.batch = (len(self.members), *first.batch)
        joint._buffers = dict(first._buffers)
        for name in first.stacked_buffers or ():
            if name in joint._buffers:
                states = [member.map.get_buffer(name) for member in self.members]
                joint._buffers[name] = torch.stack(states)
        joint.kernel = None
        return joint(*free)


class _Together(Function):
    """All weights of a stack, as a function of all of its free parameters.

    The tensors that its backward pass takes are attributes, not saved tensors. So several backward
    passes may go through it, as in gradient accumulation and checkpointing.
    """

    @staticmethod
    def forward(ctx, stack, *flat):
        # Not a checkpoint's hooks: the recomputation does not come here.
        own_hooks = saved_tensors_hooks(Tensor.detach, Tensor.detach)
        with torch.enable_grad(), own_hooks:
            leaves = [x.requires_grad_() for x in stack.stacked_free()]
            weights = stack.form(leaves)
        ctx.leaves = leaves
        ctx.weights = weights
        ctx.set_materialize_grads(False)
        return weights.detach().unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        weights = ctx.weights
        if any(g is None for g in gradients):
            gradient = torch.zeros_like(weights)
            for place, g in enumerate(gradients):
                if g is not None:
                    gradient[place] = g
        else:
            gradient = torch.stack(gradients)
        with torch.enable_grad():
            stacked = torch.autograd.grad(weights, ctx.leaves, gradient, retain_graph=True)
        slices = zip(*(x.unbind(0) for x in stacked), strict=True)
        return None, *(x for given in slices for x in given)


def _versions(chart: OrthogonalMap, free: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return numbers that change when a parameter or a state is written to."""
    states = [chart._buffers.get(name) for name in chart.stacked_buffers or ()]
    numbers = []
    for x in (*free, *states):
        if x is not None and not x.is_inference():
            numbers += [x._version, x.data_ptr()]
    return tuple(numbers)


def _stacks(model: nn.Module) -> list[_Stack]:
    """Return a stack for each kind of weight that several layers have and no block serves."""
    kinds: dict[tuple[Any, ...], list[Constraint]] = {}
    for constraint in named_constraints(model):
        kind = _kind(constraint)
        if kind is not None:
            kinds.setdefault(kind, []).append(constraint)
    return [_Stack(members) for members in kinds.values() if len(members) > 1]


def _is_served(chart: OrthogonalMap) -> bool:
    """Return whether an open block, or a recomputation, serves a map."""
    return chart.stack is not None and chart.stack.serves


def _kind(constraint: Constraint) -> tuple[Any, ...] | None:
    """Return what weights of one kind have in common, or None if the weight takes no part."""
    chart = constraint.map
    if chart.stacked_buffers is None:
        return None
    if _is_served(chart):
        return None
    if any(type(x) not in (Tensor, nn.Parameter) for x in constraint.free):
        return None
    plain = {
        name: value
        for name, value in vars(chart).items()
        if name == "batch" or (name != "training" and isinstance(value, (bool, int, float, str)))
    }
    free = [(x.shape, x.dtype, x.device, x.requires_grad) for x in constraint.free]
    return (type(chart), tuple(sorted(plain.items())), tuple(free))

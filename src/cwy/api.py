"""The front door: constrain a layer, and bake the result."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from . import init as inits
from .ops._linalg import double, gram_gap, matrix_error
from .ops.checks import check_tensor
from .parametrizations import OrthogonalMap
from .parametrizations.base import Free
from .parametrizations.loading import take_no_plain_weights, take_plain_weights
from .parametrizations.reflections import Length
from .parametrizations.rgd import OnManifold, keep, on_manifold, release
from .registry import METHODS

M = TypeVar("M", bound=nn.Module)
_NEAR = 0.1
"""Weights with a smaller orthogonality error take their polar factor by default. Checkpoints in bfloat16 have 2e-3."""
_FAR = 0.5
"""Weights with a smaller orthogonality error, entry by entry and as a whole, are not replaced without a warning."""


class _Array(Protocol):
    """What NumPy can view as an array."""

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        """Return the array."""


def orthogonal(
    module: M,
    name: str = "weight",
    method: str = "cwy",
    *,
    reflections: int | None = None,
    init: str | Tensor | _Array | None = None,
    length: Length | None = None,
    **options: Any,
) -> M:
    r"""Keeps a weight of a module orthogonal while it is trained.

    A square weight becomes orthogonal (complex: unitary), a tall one gets orthonormal columns, a wide one orthonormal
    rows. The last two dimensions are the matrix, those before a batch of them; a convolution kernel
    is flattened from dimension 1.

    Args:
        module: any module with a matrix parameter: Linear, Conv1d/2d/3d, RNN cells, your own.
        name: the parameter's name.
        method: a name in :data:`cwy.METHODS`. "cwy" on a weight that is not square is T-CWY.
        reflections: L of the methods by reflections; all by default.
        init: "random", "nearest" (the weight's polar factor), "haar", "identity", "henaff", "helfrich", "helfrich-exp", or
            the matrix itself. By default a weight that is orthogonal and reachable is kept, one with an
            :func:`~cwy.orthogonality_error` of at most 0.1 takes its polar factor, and any other is replaced by "random".
            A warning states when a weight with an error below 0.5 is replaced, unless its singular values vary as much as
            those of a random matrix.
        length: the norm of the vectors of the methods by reflections, at the start and after an assignment: a number,
            "matched" or "raw". "matched", the default, lets Adam move the weight as far as a free one at the same learning
            rate. "raw" leaves Gaussian vectors as drawn, of norm near $\sqrt N$, and those of a given matrix at norm 1.
        options: what else the method takes.

    Returns:
        The module, its weight now computed from free parameters that any optimiser may train.
        ``module.weight = Q`` assigns an orthogonal matrix. Constrain a weight before another module shares it.
        With the methods "rgd-…" the weight stays a parameter, which :func:`cwy.optim.for_model` finds an optimiser for.

    Example:
        >>> layer = orthogonal(torch.nn.Linear(8, 8))
        >>> orthogonality_error(layer.weight) < 1e-5
        True
    """
    weight = _weight(module, name)
    # Detached: a graph that holds the weight would keep torch from swapping it.
    flat = weight.detach()
    if isinstance(module, _ConvNd):
        flat = flat.flatten(1)
    rows, columns = flat.shape[-2:]
    if method == "cwy" and rows != columns:
        method = "tcwy"
    chosen = METHODS[method]
    square = rows == columns
    if chosen.kind == ("tall" if square else "square"):
        instead = "'cwy' or 'tcwy'" if square else "'tcwy'"
        raise ValueError(
            f"orthogonal: method {method!r} serves {chosen.kind} weights, but {name} is {rows} x {columns}. "
            f"Use method={instead}."
        )
    if weight.is_complex() and not chosen.complex:
        raise ValueError(
            f"orthogonal: method {method!r} serves real weights, but {name} is {weight.dtype}. Use method='cwy'."
        )
    if not (weight.is_complex() or chosen.real):
        raise ValueError(
            f"orthogonal: method {method!r} serves complex weights, but {name} is {weight.dtype}. "
            "Make the weight complex, e.g. with dtype=torch.complex64, or use method='cwy'."
        )

    if reflections is not None:
        options["reflections"] = reflections
    if length is not None:
        options["length"] = length
    _check_options(method, options)
    n, m = max(rows, columns), min(rows, columns)
    like = {"batch": flat.shape[:-2], "dtype": weight.dtype, "device": weight.device}
    chart = chosen.build(n, m, **like, **options)
    chart.wide = rows < columns
    chart.kernel = weight.shape if flat.dim() != weight.dim() else None

    before, start = weight.detach(), _initial(chart, weight, init, reflections, like)
    if isinstance(chart, OnManifold):
        if any(
            step == 0
            for step, length in zip(weight.stride(), weight.shape, strict=True)
            if length > 1
        ):
            raise ValueError(
                f"orthogonal: method {method!r} writes to {name}, whose entries share memory (an expanded tensor). "
                f"Make it a parameter of its own: nn.Parameter({name}.detach().clone(memory_format=torch.contiguous_format))."
            )
        before.copy_(chart(start))
        keep(module, name, chart)
    else:
        with torch.no_grad(), chart.starting_at(start):
            try:
                parametrize.register_parametrization(module, name, chart)
            except Exception:
                # torch puts the free parameters into the weight's own memory before it checks them.
                weight.data = before
                raise
        take_plain_weights(module)
    # It is the gradient of the weight that was.
    weight.grad = None
    return module


def bake(module: M) -> M:
    """Makes every weight that :func:`orthogonal` constrains in a module an ordinary parameter of its final value.

    Args:
        module: a module and all within it, changed in place. Copies of it stay as they are.

    Returns:
        The module. Its parameters are new: an optimiser made before holds the old ones.

    Example:
        >>> model = torch.nn.Sequential(orthogonal(torch.nn.Linear(4, 4)))
        >>> sorted(bake(model).state_dict())
        ['0.bias', '0.weight']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"bake: expected a torch.nn.Module, got {type(module).__name__}.")
    for layer in [*module.modules()]:
        for name in release(layer):
            weight = getattr(layer, name)
            layer.register_parameter(name, _ordinary(weight, weight.requires_grad))
        if parametrize.is_parametrized(layer):
            chains = cast(nn.ModuleDict, layer.parametrizations)
            for name in [
                n
                for n, chain in chains.items()
                if any(isinstance(p, OrthogonalMap) for p in cast(Iterable, chain))
            ]:
                _bake(layer, chains, name)
    return module


def _bake(layer: nn.Module, chains: nn.ModuleDict, name: str) -> None:
    trained = any(p.requires_grad for p in chains[name].parameters())
    weight = _ordinary(getattr(layer, name), trained)
    del chains[name]
    # parametrize swaps in a class that holds the weight's property, and deepcopy shares it: so the layer gets one of its own.
    shared = type(layer)
    if chains:
        layer.__class__ = type(
            shared.__name__,
            shared.__bases__,
            {k: v for k, v in shared.__dict__.items() if k != name},
        )
    else:
        del layer.parametrizations
        layer.__class__ = shared.__bases__[0]
        take_no_plain_weights(layer)
    layer.register_parameter(name, weight)


def _ordinary(weight: Tensor, trained: bool) -> nn.Parameter:
    return nn.Parameter(
        weight.detach().resolve_conj().clone(memory_format=torch.contiguous_format),
        requires_grad=trained,
    )


def _weight(module: nn.Module, name: str) -> Tensor:
    """The parameter to constrain, or an error that says what is wrong with it."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"orthogonal: expected a torch.nn.Module, got {type(module).__name__}.")
    if parametrize.is_parametrized(module, name):
        raise ValueError(
            f"orthogonal: {type(module).__name__}.{name} is parametrized already. "
            "Remove that first with torch.nn.utils.parametrize.remove_parametrizations, or cwy.bake."
        )
    if name in on_manifold(module):
        raise ValueError(
            f"orthogonal: {type(module).__name__}.{name} lives on the manifold already. Free it first with cwy.bake."
        )
    weight = dict(module.named_parameters(recurse=False)).get(name)
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"orthogonal: {type(module).__name__}.{name} has no shape yet. Run the module once first."
        )
    if weight is None:
        names = [n for n, p in module.named_parameters(recurse=False) if p.dim() > 1]
        hint = (
            f"It has {', '.join(names)}."
            if names
            else "It has no matrix parameter of its own; pass the layer that has."
        )
        raise ValueError(f"orthogonal: {type(module).__name__} has no parameter {name!r}. {hint}")
    check_tensor("orthogonal", name, weight)
    if weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(
            f"orthogonal: {name} must be a matrix (*, rows, columns), got shape {tuple(weight.shape)}."
        )
    return weight


# The options of torch's and geotorch's functions, and what stands for them here.
_ELSEWHERE = {
    "orthogonal_map": "Name the map by method=, or call cwy.compat.orthogonal, which has torch's signature.",
    "triv": "Name the map by method=, e.g. 'exprnn' or 'scornn'.",
    "use_trivialization": "With it, use method='dtriv', without it 'exprnn', or call cwy.compat.orthogonal.",
}


def _check_options(method: str, options: dict) -> None:
    takes = {p.name for p in _parameters(METHODS[method].build) if p.kind is p.KEYWORD_ONLY}
    for key in options:
        if key not in takes:
            near = difflib.get_close_matches(key, takes, n=1)
            hint = (
                f"Did you mean {near[0]!r}?"
                if near
                else f"It takes {', '.join(sorted(takes)) or 'no options'}."
            )
            hint = _ELSEWHERE.get(key, hint)
            raise TypeError(f"orthogonal: method {method!r} has no option {key!r}. {hint}")


def _parameters(build: Callable) -> list[inspect.Parameter]:
    return list(inspect.signature(build).parameters.values())


def _initial(
    chart: OrthogonalMap,
    weight: Tensor,
    init: str | Tensor | _Array | None,
    reflections: int | None,
    like: dict,
) -> Free:
    """Return the free parameters to start from."""
    if weight.is_meta:
        return chart.start()
    if init is None:
        return _kept(chart, weight.detach())
    if isinstance(init, Tensor):
        return chart.right_inverse(init)
    if not isinstance(init, str) and hasattr(init, "__array__"):
        return chart.right_inverse(torch.tensor(init.__array__()))
    if init == "random":
        return chart.start()
    if init == "nearest":
        return chart.nearest(weight.detach())
    if isinstance(init, str) and init in inits.MATRICES:
        return chart.free(inits.MATRICES[init](chart.n, chart.m, reflections=reflections, **like))
    known = ["random", "nearest", *inits.MATRICES]
    near = difflib.get_close_matches(str(init), known, n=2)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(
        f"orthogonal: unknown init {init!r}. {hint}Known: {', '.join(known)}, or a matrix (a torch.Tensor or a NumPy array)."
    )


def _kept(chart: OrthogonalMap, weight: Tensor) -> Free:
    """Return the free parameters of a weight, of its polar factor if it is near, or else of a random start."""
    gap = gram_gap(chart.as_matrix(weight))
    error = gap.abs().max().item()
    # A fresh torch.nn.Linear(64, 192) has small entries here and singular values σ from 0.4 to 1.6. This is max rms(σ² - 1).
    spread = torch.linalg.matrix_norm(gap).max().item() / chart.m**0.5
    # Written so that a NaN is far.
    if not (error < _FAR and spread < _FAR):
        return chart.start()
    try:
        return chart.right_inverse(weight)
    except ValueError as refused:
        reason = str(refused)
    if error <= _NEAR:
        try:
            return chart.nearest(weight)
        except ValueError as refused:
            reason = str(refused)
    warnings.warn(
        f"orthogonal: the weight is nearly orthogonal (max|QᴴQ - I| is {error:.2g}) but is not kept: random values replace "
        f"it. The reason: {reason} To silence this warning pass init='random'. To take the nearest orthogonal matrix, or "
        "an error if the method can't reach it, pass init='nearest'.",
        UserWarning,
        stacklevel=4,
    )
    return chart.start()


def orthogonality_error(x: Tensor | nn.Module) -> float:
    r"""Return how far a matrix is from orthonormal columns (rows, if it is wide): $\max|X^H X - I|$.

    Args:
        x: ``(*, N, M)``. A batch counts by its worst matrix. The kernel of a convolution is flattened from
            dimension 1, as in :func:`cwy.orthogonal`. A tensor of three or more dimensions may be a batch or a
            kernel: the smaller of both errors is returned. A module counts by the worst of the weights that
            :func:`cwy.orthogonal` constrains within it.

    Returns:
        The largest entry of the difference, computed in float64.

    Example:
        >>> orthogonality_error(torch.eye(5)[:, :3])
        0.0
        >>> model = torch.nn.Sequential(orthogonal(torch.nn.Conv2d(4, 8, 3)), torch.nn.ReLU())
        >>> orthogonality_error(model) < 1e-5, orthogonality_error(model[0].weight) < 1e-5
        (True, True)
    """
    if isinstance(x, nn.Module):
        errors = [matrix_error(weight) for weight in _constrained(x)]
        if not errors:
            raise ValueError(
                f"orthogonality_error: {type(x).__name__} has no weight that cwy.orthogonal constrains. "
                "Constrain one first, or pass a weight."
            )
        return max(errors)
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"orthogonality_error: x must be a module or a matrix (*, N, M), got {got}."
        )
    error = matrix_error(x)
    if x.dim() > 2 and _may_be_kernel(x, error):
        return min(error, matrix_error(x.flatten(1)))
    return error


def _may_be_kernel(x: Tensor, error: float) -> bool:
    """Return whether the flattened tensor can have a smaller error: its unit rows or columns decide at low cost."""
    flat = double(x.flatten(1))
    if flat.numel() == 0:
        return False
    shorter = -1 if flat.shape[0] <= flat.shape[1] else 0
    off = (flat.abs().square().sum(shorter) - 1).abs().max().item()
    return off < error


def _constrained(module: nn.Module) -> Iterator[Tensor]:
    """Yield every weight that a map of this library constrains, as matrices ``(*, rows, columns)``."""
    for layer in module.modules():
        for name, maps in _maps(layer):
            for chart in maps:
                as_matrix: Callable[[Tensor], Tensor] | None = getattr(chart, "as_matrix", None)
                if as_matrix is not None:
                    yield as_matrix(getattr(layer, name).detach())
                    break


def _maps(layer: nn.Module) -> Iterator[tuple[str, Iterable[nn.Module]]]:
    """Yield the name of each weight of a layer that has maps, with these maps."""
    if parametrize.is_parametrized(layer):
        yield from cast(nn.ModuleDict, layer.parametrizations).items()  # pyrefly: ignore
    kept = layer._modules.get("on_manifold")
    if isinstance(kept, nn.ModuleDict):
        for name, chart in kept.items():
            yield name, [chart]

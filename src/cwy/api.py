"""The front door: constrain a layer, find what is constrained, and bake the result."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from . import init as inits
from ._hints import did_you_mean, sentences
from ._torch import ConvNd, unparametrized_class
from .ops._linalg import double, gram_gap, matrix_error
from .ops.checks import check_dense, check_tensor
from .parametrizations import OrthogonalMap
from .parametrizations.base import Free
from .parametrizations.chain import register
from .parametrizations.constraints import Constraint, named_constraints, note_change
from .parametrizations.loading import take_no_plain_weights, take_plain_weights
from .parametrizations.marks import OnManifold, keep, on_manifold, release
from .parametrizations.reflections import Length
from .registry import METHODS, Method

__all__ = ["Constraint", "bake", "named_constraints", "orthogonal", "orthogonality_error"]

M = TypeVar("M", bound=nn.Module)

_NEAR = 0.1
"""Weights with a smaller orthogonality error take their polar factor by default.

Checkpoints in bfloat16 have an error of 2e-3.
"""

_FAR = 0.5
"""Weights with a smaller error, entry by entry and as a whole, are not replaced without warning."""


class _Array(Protocol):
    """Describe an object that NumPy can view as an array."""

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
    r"""Keep a weight of a module orthogonal while it is trained.

    A square weight becomes orthogonal (complex: unitary). A tall one gets orthonormal columns, a
    wide one orthonormal rows. The last two dimensions are the matrix, those before are a batch of
    matrices. The kernel of a convolution is flattened from dimension 1.

    Args:
        module: any module with a matrix parameter: Linear, Conv1d/2d/3d, RNN cells, your own.
        name: the parameter's name.
        method: a name in :data:`cwy.METHODS`. "cwy" on a weight that is not square is T-CWY.
        reflections: L of the methods by reflections. All by default.
        init: "random", "nearest" (the weight's polar factor), "haar", "identity", "henaff",
            "helfrich", "helfrich-exp", or the matrix itself. The default keeps a weight that is
            orthogonal and reachable. One with an :func:`~cwy.orthogonality_error` of at most 0.1
            takes its polar factor. Any other is replaced by "random". A warning states when a
            weight with an error below 0.5 is replaced, unless its singular values vary as much as
            those of a random matrix.
        length: the norm of the vectors of the methods by reflections, at the start and after an
            assignment: a number, "matched" or "raw". "matched", the default, lets Adam move the
            weight as far as a free one at the same learning rate. "raw" leaves Gaussian vectors as
            drawn, of norm near $\sqrt N$, and those of a given matrix at norm 1.
        options: what else the method takes.

    Returns:
        The module, its weight now computed from free parameters that any optimizer may train.
        ``module.weight = Q`` assigns an orthogonal matrix. Constrain a weight before another module
        shares it. With the methods "rgd-…" the weight stays a parameter, for which
        :func:`cwy.optim.for_model` finds an optimizer.

    Example:
        >>> layer = orthogonal(torch.nn.Linear(8, 8))
        >>> orthogonality_error(layer.weight) < 1e-5
        True
    """
    weight = find_weight(module, name)
    # Detached: a graph that holds the weight would keep torch from swapping it.
    before = weight.detach()
    matrix = before
    if isinstance(module, ConvNd):
        matrix = before.flatten(1)
    rows, columns = matrix.shape[-2:]
    if method == "cwy" and rows != columns:
        method = "tcwy"
    _check_method(METHODS[method], name, matrix)
    if reflections is not None:
        options["reflections"] = reflections
    if length is not None:
        options["length"] = length
    _check_options(method, options)

    chart = METHODS[method].build(
        max(rows, columns),
        min(rows, columns),
        batch=matrix.shape[:-2],
        dtype=weight.dtype,
        device=weight.device,
        **options,
    )
    chart.wide = rows < columns
    if matrix.dim() != weight.dim():
        chart.kernel = weight.shape
    start = _initial(chart, weight, init, reflections)
    if isinstance(chart, OnManifold):
        _check_memory(method, name, weight)
        before.copy_(chart(start))
        keep(module, name, chart)
    else:
        with torch.no_grad(), chart.starting_at(start):
            try:
                register(module, name, chart)
            except Exception:
                # torch puts the free parameters into the weight's own memory before it checks them.
                weight.data = before
                raise
        take_plain_weights(module)
    note_change()
    # It is the gradient of the weight that was.
    weight.grad = None
    return module


def bake(module: M) -> M:
    """Make each weight that :func:`orthogonal` constrains an ordinary parameter of its final value.

    Args:
        module: a module and all within it, changed in place. Copies of it stay as they are.

    Returns:
        The module. Its parameters are new: an optimizer made before holds the old ones.

    Example:
        >>> model = torch.nn.Sequential(orthogonal(torch.nn.Linear(4, 4)))
        >>> sorted(bake(model).state_dict())
        ['0.bias', '0.weight']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"bake: expected a torch.nn.Module, got {type(module).__name__}.")
    for constraint in [*named_constraints(module)]:
        layer, name = constraint.module, constraint.name
        if isinstance(constraint.map, OnManifold):
            release(layer, name)
            weight = getattr(layer, name)
            layer.register_parameter(name, _ordinary(weight, weight.requires_grad))
        else:
            _bake(layer, name)
    note_change()
    return module


def _bake(layer: nn.Module, name: str) -> None:
    """Make a parametrized weight an ordinary parameter."""
    chains = cast(nn.ModuleDict, layer.parametrizations)
    trained = any(p.requires_grad for p in chains[name].parameters())
    weight = _ordinary(getattr(layer, name), trained)
    del chains[name]
    # parametrize swaps in a class that holds the weight's property, and deepcopy shares it: so the
    # layer gets one of its own.
    shared = type(layer)
    if chains:
        rest = {key: value for key, value in shared.__dict__.items() if key != name}
        layer.__class__ = type(shared.__name__, shared.__bases__, rest)
    else:
        del layer.parametrizations
        layer.__class__ = unparametrized_class(layer)
        take_no_plain_weights(layer)
    layer.register_parameter(name, weight)


def _ordinary(weight: Tensor, trained: bool) -> nn.Parameter:
    copy = weight.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copy, requires_grad=trained)


def find_weight(module: nn.Module, name: str) -> Tensor:
    """Return the parameter to constrain, or raise an error that states what is wrong with it."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"orthogonal: expected a torch.nn.Module, got {type(module).__name__}.")
    layer = type(module).__name__
    if parametrize.is_parametrized(module, name):
        raise ValueError(
            f"orthogonal: {layer}.{name} is parametrized already. Remove that first with "
            "torch.nn.utils.parametrize.remove_parametrizations, or cwy.bake."
        )
    if name in on_manifold(module):
        raise ValueError(
            f"orthogonal: {layer}.{name} lives on the manifold already. "
            "Free it first with cwy.bake."
        )
    own = dict(module.named_parameters(recurse=False))
    weight = own.get(name)
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise ValueError(f"orthogonal: {layer}.{name} has no shape yet. Run the module once first.")
    if weight is None:
        matrices = [key for key, parameter in own.items() if parameter.dim() > 1]
        hint = "It has no matrix parameter of its own. Pass the layer that has."
        if matrices:
            hint = f"It has {', '.join(matrices)}."
        raise ValueError(f"orthogonal: {layer} has no parameter {name!r}. {hint}")
    check_tensor("orthogonal", name, weight)
    if weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(
            f"orthogonal: {name} must be a matrix (*, rows, columns), "
            f"got shape {tuple(weight.shape)}."
        )
    return weight


def _check_method(method: Method, name: str, matrix: Tensor) -> None:
    """Raise unless a method serves matrices of this shape and dtype."""
    call = f"orthogonal: method {method.name!r} serves"
    rows, columns = matrix.shape[-2:]
    if rows == columns and method.kind == "tall":
        raise ValueError(
            f"{call} tall weights, but {name} is {rows} x {columns}. Use method='cwy' or 'tcwy'."
        )
    if rows != columns and method.kind == "square":
        raise ValueError(
            f"{call} square weights, but {name} is {rows} x {columns}. Use method='tcwy'."
        )
    if matrix.is_complex() and not method.complex:
        raise ValueError(f"{call} real weights, but {name} is {matrix.dtype}. Use method='cwy'.")
    if not matrix.is_complex() and not method.real:
        raise ValueError(
            f"{call} complex weights, but {name} is {matrix.dtype}. "
            "Make the weight complex, e.g. with dtype=torch.complex64, or use method='cwy'."
        )


def _check_memory(method: str, name: str, weight: Tensor) -> None:
    """Raise if entries of a weight share memory, so that none can be written to by itself."""
    strides = zip(weight.stride(), weight.shape, strict=True)
    if any(stride == 0 and length > 1 for stride, length in strides):
        raise ValueError(
            f"orthogonal: method {method!r} writes to {name}, whose entries share memory "
            f"(an expanded tensor). Make it a parameter of its own: "
            f"nn.Parameter({name}.detach().clone(memory_format=torch.contiguous_format))."
        )


# The options of torch's and geotorch's functions, and what to use here instead.
_ELSEWHERE = {
    "orthogonal_map": (
        "Name the map by method=, or call cwy.compat.orthogonal, which has torch's signature."
    ),
    "triv": "Name the map by method=, e.g. 'exprnn' or 'scornn'.",
    "use_trivialization": (
        "With it, use method='dtriv', without it 'exprnn', or call cwy.compat.orthogonal."
    ),
}


def _check_options(method: str, options: dict[str, Any]) -> None:
    """Raise if a method lacks one of these options."""
    parameters = inspect.signature(METHODS[method].build).parameters.values()
    takes = sorted(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    for key in options:
        if key in takes:
            continue
        hint = f"It takes {', '.join(takes) or 'no options'}."
        hint = did_you_mean(key, takes, count=1, cutoff=0.6) or hint
        hint = _ELSEWHERE.get(key, hint)
        raise TypeError(f"orthogonal: method {method!r} has no option {key!r}. {hint}")


def _initial(
    chart: OrthogonalMap,
    weight: Tensor,
    init: str | Tensor | _Array | None,
    reflections: int | None,
) -> Free:
    """Return the free parameters to start from."""
    if weight.is_meta:
        return chart.start()
    if init is None:
        return _kept(chart, weight.detach())
    if isinstance(init, Tensor):
        return chart.right_inverse(init)
    if not isinstance(init, str) and hasattr(init, "__array__"):
        # A copy has no negative strides, which torch refuses.
        return chart.right_inverse(torch.tensor(init.__array__().copy()))
    if init == "random":
        return chart.start()
    if init == "nearest":
        return chart.nearest(weight.detach())
    if isinstance(init, str) and init in inits.MATRICES:
        matrix = inits.MATRICES[init](
            chart.n,
            chart.m,
            reflections=reflections,
            batch=chart.batch,
            dtype=weight.dtype,
            device=weight.device,
        )
        if init == "haar" and chart.rotations_only:
            matrix = _rotation(matrix)
        return chart.free(matrix)
    known = ["random", "nearest", *inits.MATRICES]
    raise ValueError(
        sentences(
            f"orthogonal: unknown init {init!r}.",
            did_you_mean(init, known, cutoff=0.6),
            f"Known: {', '.join(known)}, or a matrix (a torch.Tensor or a NumPy array).",
        )
    )


def _rotation(matrix: Tensor) -> Tensor:
    """Flip the first column where the determinant is -1: Haar on O(N) becomes Haar on SO(N)."""
    signs = torch.linalg.det(double(matrix)).sign().to(matrix)
    first = matrix[..., :1] * signs[..., None, None]
    return torch.cat([first, matrix[..., 1:]], dim=-1)


def _kept(chart: OrthogonalMap, weight: Tensor) -> Free:
    """Return the free parameters of a weight, of its polar factor if near, or of a random start."""
    gap = gram_gap(chart.as_matrix(weight))
    error = gap.abs().max().item()
    # This is max rms(σ² - 1) of the singular values σ. A fresh torch.nn.Linear(64, 192) has small
    # entries in the gap, and σ from 0.4 to 1.6.
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
        f"orthogonal: the weight is nearly orthogonal (max|QᴴQ - I| is {error:.2g}) but is not "
        f"kept: random values replace it. The reason: {reason} "
        "To silence this warning pass init='random'. To take the nearest orthogonal matrix, or an "
        "error if the method can't reach it, pass init='nearest'.",
        UserWarning,
        stacklevel=4,
    )
    return chart.start()


def orthogonality_error(x: Tensor | nn.Module) -> float:
    r"""Return how far a matrix is from orthonormal columns (rows, if it is wide).

    Args:
        x: ``(*, N, M)``. A batch counts by its worst matrix. The kernel of a convolution is
            flattened from dimension 1, as in :func:`cwy.orthogonal`. A tensor of three or more
            dimensions may be a batch or a kernel: the smaller of both errors is returned. A module
            counts by the worst of the weights that :func:`cwy.named_constraints` yields.

    Returns:
        $\max|X^H X - I|$, the largest entry of the difference, computed in float64.

    Example:
        >>> orthogonality_error(torch.eye(5)[:, :3])
        0.0
        >>> model = torch.nn.Sequential(orthogonal(torch.nn.Conv2d(4, 8, 3)), torch.nn.ReLU())
        >>> orthogonality_error(model) < 1e-5, orthogonality_error(model[0].weight) < 1e-5
        (True, True)
    """
    if isinstance(x, nn.Module):
        return _worst_error(x)
    if not isinstance(x, Tensor):
        _refuse_to_measure(type(x).__name__)
    check_dense("orthogonality_error", "x", x)
    if x.is_meta:
        _refuse_to_measure("a tensor on the meta device, which has no values")
    if x.dim() < 2:
        _refuse_to_measure(f"shape {tuple(x.shape)}")
    error = matrix_error(x)
    if x.dim() > 2 and _may_be_kernel(x, error):
        return min(error, matrix_error(x.flatten(1)))
    return error


def _worst_error(module: nn.Module) -> float:
    """Return the largest orthogonality error of a module's constrained weights."""
    errors = []
    for constraint in named_constraints(module):
        weight = getattr(constraint.module, constraint.name).detach()
        errors.append(matrix_error(constraint.map.as_matrix(weight)))
    if not errors:
        raise ValueError(
            f"orthogonality_error: {type(module).__name__} has no weight that cwy.orthogonal "
            "constrains. Constrain one first, or pass a weight."
        )
    return max(errors)


def _refuse_to_measure(got: str) -> NoReturn:
    raise ValueError(f"orthogonality_error: x must be a module or a matrix (*, N, M), got {got}.")


def _may_be_kernel(x: Tensor, error: float) -> bool:
    """Return whether the flattened tensor can have a smaller error.

    The norms of its rows or columns decide that at low cost.
    """
    flat = double(x.flatten(1))
    if flat.numel() == 0:
        return False
    longer = 0
    if flat.shape[0] <= flat.shape[1]:
        longer = -1
    off = (flat.abs().square().sum(longer) - 1).abs().max().item()
    return off < error

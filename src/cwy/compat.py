"""torch's own ``orthogonal``, served by this library.

:func:`orthogonal` has torch's signature and starts from the weight that torch would start from.
:func:`patch_torch` makes code that calls torch's function call this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .api import find_weight
from .parametrizations.chain import register
from .registry import METHODS

__all__ = ["orthogonal", "patch_torch"]

M = TypeVar("M", bound=nn.Module)
_torch_orthogonal = parametrizations.orthogonal
_MAPS = ("matrix_exp", "cayley", "householder")


def orthogonal(
    module: M,
    name: str = "weight",
    orthogonal_map: str | None = None,
    *,
    use_trivialization: bool = True,
) -> M:
    r"""Constrain a weight as ``torch.nn.utils.parametrizations.orthogonal`` does, by our methods.

    The weight starts where torch would start it. As in torch, the last two dimensions are the
    matrix, of convolutions too. :func:`cwy.orthogonal` flattens their kernels instead.

    | ``orthogonal_map`` | method |
    |---|---|
    | None, "householder" | "cwy", all reflections at once |
    | "matrix_exp" | "dtriv", or "exprnn" without trivialization |
    | "cayley" | "scornn" |

    A weight that is not square, or is complex, takes CWY whatever the map: it covers the same set
    of matrices. As in torch, "householder" serves only real weights.

    Args:
        module: any module with a matrix parameter.
        name: the parameter's name.
        orthogonal_map: "matrix_exp", "cayley" or "householder".
        use_trivialization: whether a matrix exponential has a base of its own.

    Returns:
        The module, whose weight is now computed from free parameters.

    Example:
        >>> from cwy import compat
        >>> layer = compat.orthogonal(torch.nn.Linear(20, 40), orthogonal_map="householder")
        >>> orthogonality_error(layer.weight) < 1e-5
        True
    """
    weight = find_weight(module, name)
    if orthogonal_map is not None and orthogonal_map not in _MAPS:
        raise ValueError(
            f"orthogonal: orthogonal_map must be one of {', '.join(map(repr, _MAPS))}, "
            f"got {orthogonal_map!r}. "
            "For a method of cwy call cwy.orthogonal(module, method=...)."
        )
    rows, columns = weight.shape[-2:]
    method = _method(weight, orthogonal_map, use_trivialization)
    chart = METHODS[method].build(
        max(rows, columns),
        min(rows, columns),
        batch=weight.shape[:-2],
        dtype=weight.dtype,
        device=weight.device,
    )
    chart.wide = rows < columns
    if weight.is_meta:
        start = chart.start()
    else:
        start = chart.right_inverse(_initial(weight, orthogonal_map, use_trivialization))
    with torch.no_grad(), chart.starting_at(start):
        register(module, name, chart)
    # It was the gradient of the weight, not of the free parameters.
    weight.grad = None
    return module


@contextmanager
def patch_torch() -> Iterator[None]:
    """Replace torch's ``orthogonal`` by :func:`orthogonal` while the context lasts.

    Modules that imported torch's function by name before, or do so inside, are served too, and get
    it back at the end. Layers that were constrained inside stay as they are. The replacement holds
    for the whole process, all threads included.

    Example:
        >>> from cwy import compat
        >>> with compat.patch_torch():
        ...     layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 4))
        >>> layer.parametrizations.weight[0]
        CWY(n=4, m=4, reflections=4)
    """

    # A function of its own, so that nothing but what was patched is put back.
    @wraps(_torch_orthogonal)
    def patched(*arguments: Any, **options: Any) -> nn.Module:
        return orthogonal(*arguments, **options)

    _replace(_torch_orthogonal, patched)
    try:
        yield
    finally:
        _replace(patched, _torch_orthogonal)


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Bind a function in place of another in every module that has been imported, except here."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or names is globals():
            continue
        for name in [name for name, value in names.items() if value is old]:
            names[name] = new


def _method(weight: Tensor, orthogonal_map: str | None, use_trivialization: bool) -> str:
    """Return the method that computes torch's map."""
    if weight.shape[-2] != weight.shape[-1]:
        return "tcwy"
    if weight.is_complex() or orthogonal_map in (None, "householder"):
        return "cwy"
    if orthogonal_map == "cayley":
        return "scornn"
    if use_trivialization:
        return "dtriv"
    return "exprnn"


def _initial(weight: Tensor, orthogonal_map: str | None, use_trivialization: bool) -> Tensor:
    """Return the orthogonal weight that torch's function starts from."""
    twin = nn.Module()
    # LAPACK has no half precision.
    wide = torch.promote_types(weight.dtype, torch.float32)
    twin.weight = nn.Parameter(weight.detach().to(wide, copy=True))
    _torch_orthogonal(twin, "weight", orthogonal_map, use_trivialization=use_trivialization)
    return cast(Tensor, twin.weight).detach()

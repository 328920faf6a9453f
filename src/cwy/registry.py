"""METHODS: every constrained method by its name, filled by one decorator."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from .parametrizations.base import OrthogonalMap

    Map = TypeVar("Map", bound=type[OrthogonalMap])


# What torch and geotorch call a map, and the methods here that compute it.
ELSEWHERE = {
    "cayley": ("scornn",),
    "expm": ("exprnn", "dtriv"),
    "householder": ("hr", "cwy"),
    "matrix_exp": ("exprnn", "dtriv"),
}


@dataclass(frozen=True)
class Method:
    """A way to keep a matrix orthogonal.

    Attributes:
        name: what ``cwy.orthogonal(..., method=name)`` takes.
        domain: the set it covers.
        kind: the matrices it serves: "square", "tall" (N > M; wide ones by their transpose) or "any".
        complex: whether it serves complex weights.
        paper: where it comes from.
        build: ``build(n, m, *, batch=(), dtype=None, device=None, **options)`` makes the map.
        real: whether it serves real weights.
        on_manifold: whether the weight itself is the parameter, to be moved by an optimiser of ``cwy.optim``.
    """

    name: str
    domain: str
    kind: Literal["square", "tall", "any"]
    complex: bool
    paper: str
    build: type[OrthogonalMap]
    real: bool = True
    on_manifold: bool = False

    @property
    def about(self) -> str:
        """The first sentence of the map's docstring."""
        return (self.build.__doc__ or "").split("\n\n")[0].strip()


class UnknownMethod(KeyError, ValueError):
    """No method has this name; the message has the nearest ones."""

    def __str__(self) -> str:
        return self.args[0]


class Methods(Mapping[str, Method]):
    """The registered methods by name; an unknown name raises with the nearest ones."""

    def __init__(self) -> None:
        self._methods: dict[str, Method] = {}

    def __getitem__(self, name: str) -> Method:
        if name in self._methods:
            return self._methods[name]
        near = ELSEWHERE.get(str(name).lower())
        if near is None:
            near = difflib.get_close_matches(str(name).lower(), self._methods, cutoff=0.4)
        hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
        raise UnknownMethod(
            f"unknown method {name!r}. {hint}Registered: {', '.join(self._methods)}."
        )

    def __contains__(self, name: object) -> bool:
        return name in self._methods

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    def __repr__(self) -> str:
        return f"METHODS({', '.join(self._methods)})"

    def _add(self, method: Method) -> None:
        if method.name in self._methods:
            raise ValueError(f"a method named {method.name!r} is registered already.")
        self._methods[method.name] = method


METHODS = Methods()
"""Every registered method by its name."""


def register(
    name: str,
    *,
    domain: str,
    kind: Literal["square", "tall", "any"],
    paper: str,
    complex: bool = False,
    real: bool = True,
    on_manifold: bool = False,
) -> Callable[[Map], Map]:
    """Registers the decorated map class as a method; tests, docs table and command line follow from it."""

    def add(cls: Map) -> Map:
        METHODS._add(Method(name, domain, kind, complex, paper, cls, real, on_manifold))
        return cls

    return add

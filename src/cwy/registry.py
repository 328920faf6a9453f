"""METHODS: every constrained method by its name, filled by one decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from ._hints import did_you_mean, sentences, suggest

if TYPE_CHECKING:
    from .parametrizations.base import OrthogonalMap

    Map = TypeVar("Map", bound=type[OrthogonalMap])


# The names of maps in torch and geotorch, and the methods here that compute them.
ELSEWHERE = {
    "cayley": ("scornn",),
    "expm": ("exprnn", "dtriv"),
    "householder": ("hr", "cwy"),
    "matrix_exp": ("exprnn", "dtriv"),
}


@dataclass(frozen=True)
class Method:
    """Describe a way to keep a matrix orthogonal.

    Attributes:
        name: what ``cwy.orthogonal(..., method=name)`` takes.
        domain: the set it covers.
        kind: the matrices it serves: "square", "tall" (N > M, wide ones by their transpose) or
            "any".
        complex: whether it serves complex weights.
        paper: where it comes from.
        build: ``build(n, m, *, batch=(), dtype=None, device=None, **options)`` makes the map.
        real: whether it serves real weights.
        on_manifold: whether the weight itself is the parameter, to be moved by an optimizer of
            ``cwy.optim``.
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
        """Return the first sentence of the map's docstring."""
        return (self.build.__doc__ or "").split("\n\n")[0].strip()


class UnknownMethod(KeyError, ValueError):
    """Report that no method has this name. The message has the nearest ones."""

    def __str__(self) -> str:
        return self.args[0]


class Methods(Mapping[str, Method]):
    """Hold the registered methods by name. An unknown name raises with the nearest ones."""

    def __init__(self) -> None:
        self._methods: dict[str, Method] = {}

    def __getitem__(self, name: str) -> Method:
        if name in self._methods:
            return self._methods[name]
        hint = suggest(ELSEWHERE.get(str(name).lower(), ()))
        if not hint:
            hint = did_you_mean(name, self._methods, count=3, cutoff=0.4)
        registered = f"Registered: {', '.join(self._methods)}."
        raise UnknownMethod(sentences(f"unknown method {name!r}.", hint, registered))

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
    """Register the decorated map class as a method.

    Tests, the table in the docs and the command line follow from it.
    """

    def add(cls: Map) -> Map:
        METHODS._add(Method(name, domain, kind, complex, paper, cls, real, on_manifold))
        return cls

    return add

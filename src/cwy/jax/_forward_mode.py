"""A mark on arrays that reverse mode passes and forward mode refuses.

JAX cannot differentiate a function with a hand-written adjoint (``jax.custom_vjp``) forward, and
its error does not tell the user what to do. :func:`refuse` marks the inputs of such a function. The
tangent of a mark is a linear primitive. Reverse mode transposes it to nothing. Forward mode would
compute it, and gets an error with a remedy.

All inputs have one mark. Reverse mode with respect to some of them removes it from all: what
follows is the adjoint, which forward mode may differentiate.
"""

from __future__ import annotations

from typing import NoReturn, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_Tree = TypeVar("_Tree")


def refuse(remedy: str, tree: _Tree) -> _Tree:
    """Return arrays as they are. Differentiating them forward raises with this remedy."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _mark.bind(*leaves, remedy=remedy))


def _raise(*_, remedy: str, **__) -> NoReturn:
    raise TypeError(remedy)


_mark = Primitive("cwy_reverse_only")
_mark.multiple_results = True
_mark.def_impl(lambda *arrays, remedy: list(arrays))
_mark.def_abstract_eval(lambda *arrays, remedy: list(arrays))
mlir.register_lowering(_mark, lambda context, *arrays, remedy: list(arrays))
batching.primitive_batchers[_mark] = lambda arrays, axes, *, remedy: (
    _mark.bind(*arrays, remedy=remedy),
    axes,
)

_tangent = Primitive("cwy_reverse_only_tangent")
_tangent.def_impl(_raise)
_tangent.def_abstract_eval(lambda x, *, remedy: x)
mlir.register_lowering(_tangent, _raise)
# Reverse mode batches the mark before it has a tangent, so this is forward mode, as of jacfwd.
batching.primitive_batchers[_tangent] = _raise
ad.deflinear2(_tangent, lambda cotangent, x, *, remedy: [cotangent])


def _differentiate(primals, tangents, *, remedy: str):
    found = []
    for tangent in tangents:
        if not isinstance(tangent, ad.Zero):
            tangent = _tangent.bind(tangent, remedy=remedy)
        found.append(tangent)
    # Not marked again.
    return list(primals), found


ad.primitive_jvps[_mark] = _differentiate

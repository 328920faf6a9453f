"""A mark on arrays that reverse mode passes and forward mode refuses.

JAX cannot differentiate a function with a hand-written adjoint (``jax.custom_vjp``) forward, and
its error does not tell the user what to do. :func:`refuse` marks the inputs of such a function. The
tangent of a mark is a linear primitive. Reverse mode transposes it to nothing. Forward mode would
compute it, and gets an error with a remedy.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_Tree = TypeVar("_Tree")


def refuse(remedy: str, tree: _Tree) -> _Tree:
    """Return arrays as they are. Differentiating them forward raises with this remedy."""
    return jax.tree.map(partial(_mark.bind, remedy=remedy), tree)


def _raise(*_, remedy: str, **__) -> NoReturn:
    raise TypeError(remedy)


_mark = Primitive("cwy_reverse_only")
_mark.def_impl(lambda x, *, remedy: x)
_mark.def_abstract_eval(lambda x, *, remedy: x)
mlir.register_lowering(_mark, lambda context, x, *, remedy: [x])
batching.defvectorized(_mark)

_tangent = Primitive("cwy_reverse_only_tangent")
_tangent.def_impl(_raise)
_tangent.def_abstract_eval(lambda x, *, remedy: x)
mlir.register_lowering(_tangent, _raise)
# Reverse mode batches the mark before it has a tangent, so this is forward mode, as of jacfwd.
batching.primitive_batchers[_tangent] = _raise
ad.deflinear2(_tangent, lambda cotangent, x, *, remedy: [cotangent])


def _differentiate(primals, tangents, *, remedy: str):
    (x,) = primals
    (dx,) = tangents
    # Not marked again: what follows is the adjoint, which forward mode may differentiate.
    if isinstance(dx, ad.Zero):
        return x, dx
    return x, _tangent.bind(dx, remedy=remedy)


ad.primitive_jvps[_mark] = _differentiate

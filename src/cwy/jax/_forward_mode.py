"""A marker on tangents that reverse mode removes and forward mode refuses.

JAX cannot differentiate a function with a hand-written adjoint (``jax.custom_vjp``) forward, and
its error does not tell the user what to do. :func:`refuse` marks inputs of such a function. The
marker is a linear primitive: reverse mode transposes it to nothing, and forward mode, which would
compute it, gets an error with a remedy.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_Tree = TypeVar("_Tree")

_marker = Primitive("cwy_reverse_only")


def refuse(remedy: str, tree: _Tree) -> _Tree:
    """Return arrays as they are. Differentiating them forward raises with this remedy."""
    return jax.tree.map(partial(_refuse, remedy), tree)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refuse(remedy, x):
    return x


@_refuse.defjvp
def _refuse_jvp(remedy, primals, tangents):
    (x,) = primals
    (dx,) = tangents
    return x, _marker.bind(dx, remedy=remedy)


def _raise(*_, remedy: str, **__) -> NoReturn:
    raise TypeError(remedy)


_marker.def_impl(_raise)
_marker.def_abstract_eval(lambda x, *, remedy: x)
mlir.register_lowering(_marker, _raise)
ad.deflinear2(_marker, lambda cotangent, x, *, remedy: [cotangent])
batching.defvectorized(_marker)

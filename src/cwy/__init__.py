"""Neural networks with orthogonal, unitary and Stiefel weights, as cheap to train as free ones.

Names load when they are first used, so that ``cwy --help`` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from . import compat, cudagraph, init, manifolds, nn, ops, optim, parametrizations, testing
    from .api import bake, named_constraints, orthogonal, orthogonality_error
    from .many import constrain, together
    from .registry import METHODS

# The home of each name, empty for a module. METHODS is complete once its methods are imported.
_HOME = {
    "METHODS": "parametrizations",
    "bake": "api",
    "constrain": "many",
    "compat": "",
    "cudagraph": "",
    "init": "",
    "manifolds": "",
    "named_constraints": "api",
    "nn": "",
    "ops": "",
    "optim": "",
    "orthogonal": "api",
    "orthogonality_error": "api",
    "parametrizations": "",
    "testing": "",
    "together": "many",
}

__all__ = [
    "METHODS",
    "__version__",
    "bake",
    "compat",
    "constrain",
    "cudagraph",
    "init",
    "manifolds",
    "named_constraints",
    "nn",
    "ops",
    "optim",
    "orthogonal",
    "orthogonality_error",
    "parametrizations",
    "testing",
    "together",
]


# Hidden from type checkers, which would take any name for an attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module 'cwy' has no attribute {name!r}")
        home = _HOME[name]
        if home:
            value = getattr(import_module(f".{home}", __name__), name)
        else:
            value = import_module(f".{name}", __name__)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__

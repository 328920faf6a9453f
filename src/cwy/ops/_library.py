"""Registration of the library's ``torch.library`` ops."""

from collections.abc import Callable
from typing import Any

import torch

from .._torch import below_autograd, forward_mode_is_active, transform_is_active
from ._precision import in_full_precision

_library = torch.library.Library("cwy", "FRAGMENT")


def opaque() -> bool:
    """Return whether to call an opaque op: under a compiler, outside ``torch.func`` transforms."""
    return torch.compiler.is_compiling() and not transform_is_active()


def _unless_undifferentiated(name: str, autograd: Callable) -> Callable:
    """Return a call that goes past autograd where nothing is differentiated.

    A compiled program calls its ops so: it has its own backward pass.
    """

    def call(*given: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() or forward_mode_is_active():
            return autograd(*given, **options)
        with below_autograd():
            return getattr(torch.ops.cwy, name)(*given, **options)

    return call


def define(
    schema: str, compute: Callable, fake: Callable, autograd: Callable | None = None
) -> Callable[..., Any]:
    """Register an op ``cwy::name``.

    ``torch.library.custom_op`` would silently drop forward-mode tangents, so ``autograd`` has both
    derivatives.

    Args:
        schema: its signature, which begins with the name.
        compute: the kernel for every device. It runs in full precision.
        fake: the kernel for compilers, which returns empty tensors of the right shape.
        autograd: the differentiable call, if the op has derivatives.

    Returns:
        The op.
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, in_full_precision(compute), "CompositeExplicitAutograd")
    if autograd is not None:
        _library.impl(name, _unless_undifferentiated(name, autograd), "Autograd")
    torch.library.register_fake(f"cwy::{name}", fake, lib=_library)
    return getattr(torch.ops.cwy, name)

"""The loop as torch's own ``scan``: an exported program has ATen ops only and serves every length.

``torch.onnx.export(dynamo=True)`` makes it a Scan node, and AOTInductor a loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._torch import scan, scan_op
from . import reference
from .spec import Activation
from .transition import Transition


def rollout(
    x: Tensor,
    h0: Tensor,
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    nonlinearity: Activation,
    *,
    last: bool,
) -> tuple[Tensor | None, Tensor]:
    """Return the states of every step and the last states, as :mod:`.reference` defines them.

    Args:
        x: ``(T, B, ...)``, the inputs of every step.
        h0: ``(B, ...)``, the first states.
        transition: the map of the states.
        bias: added, or the threshold of the nonlinearity, or None.
        weight: maps the inputs, or None.
        nonlinearity: its name, or a function.
        last: whether only the last states are wanted. Then the first result is None.
    """
    optional = {"bias": bias, "weight": weight}
    named = {name: value for name, value in optional.items() if value is not None}
    kind = type(transition)
    tensors = transition.tensors
    parts = len(tensors)

    def after(h: Tensor, xt: Tensor, *given: Tensor) -> list[Tensor]:
        q = kind(*given[:parts])
        rest = dict(zip(named, given[parts:], strict=False))
        made = reference.step(xt, h, q, rest.get("bias"), rest.get("weight"), nonlinearity)
        if last:
            return [made]
        # The outputs of a step may not share memory.
        return [made, made.clone()]

    constants = [*tensors, *named.values()]
    h0 = h0.clone(memory_format=torch.contiguous_format)
    if torch.compiler.is_dynamo_compiling():
        made = _by_name(after, x, h0, constants)
    else:
        # The public function calls Dynamo, whose cache would fix the sizes of the export before.
        # AOTInductor finds the sizes that may change only among the arguments.
        sizes = [size for size in h0.shape if isinstance(size, torch.SymInt)]
        made = scan_op(after, [h0], [x], (*constants, *sizes))
    if last:
        return None, made[0]
    # The strides that scan predicts are an expression that no later view could be checked by.
    return made[1].clone(memory_format=torch.contiguous_format), made[0]


def _by_name(
    after: Callable[..., list[Tensor]], x: Tensor, h0: Tensor, constants: list[Tensor]
) -> list[Tensor]:
    """Run ``scan`` under Dynamo, which knows no other way in."""

    def combine(h: Tensor, xt: Tensor) -> tuple[Tensor, list[Tensor]]:
        made, *states = after(h, xt, *constants)
        return made, states

    hn, states = scan(combine, h0, x)
    return [hn, *states]

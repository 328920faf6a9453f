"""The nonlinearities of a recurrence: their definition, a step in place, and the adjoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import modrelu as kernels

aten = torch.ops.aten
SLOPE = 0.01
"""The slope of leaky_relu, torch's default."""


@dataclass(frozen=True)
class Nonlinearity:
    """Describe a pointwise f with $h = f(z)$, whose derivative is known from h (for abs: from z).

    Attributes:
        name: what ``nonlinearity=`` takes.
        define: ``define(z, bias)``, differentiable: the reference. The bias is None where it was
            added to z already.
        step_: the same in place.
        back: ``back(dh, h, z, bias)``, the gradient of z from that of h, differentiable. z is None
            unless it is kept.
        back_: the same in place, from z where that is kept.
        threshold: whether the bias is the nonlinearity's own (modReLU) rather than added to z.
        complex: whether it takes complex states.
        irreversible: why z can't be recovered from h, or None if it can.
        keeps_z: whether z is kept, because h has lost its sign or, complex, its size.
    """

    name: str
    define: Callable[[Tensor, Tensor | None], Tensor]
    step_: Callable[[Tensor, Tensor | None], object]
    back: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    back_: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], object]
    threshold: bool = False
    complex: bool = False
    irreversible: str | None = None
    keeps_z: bool = False


def modrelu(z: Tensor, bias: Tensor | None) -> Tensor:
    r"""Compute $\mathrm{sgn}(z)\,\mathrm{relu}(|z| + b)$, real or complex."""
    size = z.abs()
    if bias is not None:
        size = size + bias
    return torch.sgn(z) * torch.relu(size)


def _modrelu_step(z: Tensor, bias: Tensor | None) -> None:
    size = z.abs()
    if bias is not None:
        size += bias
    z.sgn_().mul_(size.relu_())


def _modrelu_back(dh: Tensor, h: Tensor, z: Tensor | None, bias: Tensor | None) -> Tensor:
    if not h.is_complex():
        return dh * (h != 0)
    # h = u (r + b) with z = u r: along u the derivative is 1, across it (r + b)/r.
    size = h.abs()
    live = size > 0
    ratio = 1
    if bias is not None:
        ratio = size / torch.where(live, size - bias, 1)
    u = torch.sgn(h)
    along = (u.conj() * dh).real * u
    return torch.where(live, along + ratio * (dh - along), 0)


def _modrelu_back_(dh: Tensor, h: Tensor, z: Tensor | None, bias: Tensor | None) -> None:
    # The same as dh * (h != 0), whose conversion of booleans is ten times slower on a CPU.
    aten.threshold_backward.grad_input(dh, h.abs(), 0, grad_input=dh)


def _complex_modrelu(z: Tensor, bias: Tensor | None) -> Tensor:
    if not torch.is_grad_enabled() and kernels.serves(z):
        return kernels.forward(z, bias)
    return modrelu(z, bias)


def _complex_modrelu_back_(dh: Tensor, h: Tensor, z: Tensor | None, bias: Tensor | None) -> None:
    # From z: the size of h less the bias would cancel where z is small.
    assert z is not None
    if kernels.serves(z) and kernels.serves(dh):
        kernels.backward_(dh, h, z, bias)
        return
    size = z.abs()
    ratio = 1
    if bias is not None:
        ratio = (size + bias) / torch.where(size == 0, 1, size)
    u = torch.sgn(z)
    along = (u.conj() * dh).real * u
    dh.copy_(torch.where((h != 0) & (size != 0), along + ratio * (dh - along), 0))


def _abs_back(dh: Tensor, h: Tensor, z: Tensor | None, bias: Tensor | None) -> Tensor:
    assert z is not None
    return dh * torch.sgn(z)


def _abs_back_(dh: Tensor, h: Tensor, z: Tensor | None, bias: Tensor | None) -> None:
    assert z is not None
    dh.mul_(torch.sgn(z))


def _leaky_relu_back_(dh: Tensor, h: Tensor, z: Tensor | None, bias: Tensor | None) -> None:
    aten.leaky_relu_backward.grad_input(dh, h, SLOPE, True, grad_input=dh)


_LOST = "{} maps different inputs to the same output, so that its input can't be recovered"

_ALL = (
    Nonlinearity(
        name="modrelu",
        define=modrelu,
        step_=_modrelu_step,
        back=_modrelu_back,
        back_=_modrelu_back_,
        threshold=True,
        complex=True,
        irreversible=_LOST.format("modrelu with a negative bias"),
    ),
    Nonlinearity(
        name="abs",
        define=lambda z, b: z.abs(),
        step_=lambda z, b: z.abs_(),
        back=_abs_back,
        back_=_abs_back_,
        keeps_z=True,
    ),
    Nonlinearity(
        name="relu",
        define=lambda z, b: z.relu(),
        step_=lambda z, b: z.relu_(),
        back=lambda dh, h, z, b: aten.threshold_backward(dh, h, 0),
        back_=lambda dh, h, z, b: aten.threshold_backward.grad_input(dh, h, 0, grad_input=dh),
        irreversible=_LOST.format("relu"),
    ),
    Nonlinearity(
        name="leaky_relu",
        define=lambda z, b: torch.nn.functional.leaky_relu(z, SLOPE),
        step_=lambda z, b: aten.leaky_relu_(z, SLOPE),
        back=lambda dh, h, z, b: aten.leaky_relu_backward(dh, h, SLOPE, True),
        back_=_leaky_relu_back_,
        irreversible=f"undoing leaky_relu multiplies rounding errors by {1 / SLOPE:g} a step",
    ),
    Nonlinearity(
        name="tanh",
        define=lambda z, b: z.tanh(),
        step_=lambda z, b: z.tanh_(),
        back=lambda dh, h, z, b: aten.tanh_backward(dh, h),
        back_=lambda dh, h, z, b: aten.tanh_backward.grad_input(dh, h, grad_input=dh),
        irreversible="undoing tanh loses all digits where it saturates",
    ),
    Nonlinearity(
        name="identity",
        define=lambda z, b: z,
        step_=lambda z, b: z,
        back=lambda dh, h, z, b: dh,
        back_=lambda dh, h, z, b: dh,
        complex=True,
    ),
)
NONLINEARITIES: dict[str, Nonlinearity] = {f.name: f for f in _ALL}
"""All nonlinearities by name, for real states."""

_COMPLEX_MODRELU = replace(
    NONLINEARITIES["modrelu"], define=_complex_modrelu, back_=_complex_modrelu_back_, keeps_z=True
)


def named(name: str, state: Tensor) -> Nonlinearity:
    """Return the nonlinearity of this name for states like this one."""
    if name == "modrelu" and state.is_complex():
        return _COMPLEX_MODRELU
    return NONLINEARITIES[name]

"""The public function ``rollout``: check, choose a form and a backend, run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .. import dispatch
from ..wy import WY
from . import scan
from .factors import Reflections, decide, first_tensor
from .nonlinearities import NONLINEARITIES
from .spec import (
    Activation,
    Request,
    RolloutSpec,
    StepSizes,
    check_choices,
    computed_in,
    equal_steps,
    exports_as_scan,
    name_of,
    rounded_to,
)
from .transition import Transition


def rollout(
    x: Tensor | PackedSequence,
    h0: Tensor,
    transition: Tensor | WY,
    bias: Tensor | None = None,
    nonlinearity: str | Callable[[Tensor], Tensor] = "modrelu",
    *,
    signs: Tensor | None = None,
    weight: Tensor | None = None,
    lengths: Tensor | None = None,
    output: str = "all",
    memory: str = "store",
    backend: str = "auto",
) -> tuple[Tensor | PackedSequence | None, Tensor]:
    r"""Compute a whole recurrence, $h_t = f(Q h_{t-1} + x_t + b)$, forward and backward.

    For "modrelu" the bias is the threshold: $h_t = \mathrm{sgn}(z_t)\,\mathrm{relu}(|z_t| + b)$,
    $z_t = Q h_{t-1} + x_t$.

    Args:
        x: ``(T, B, N)``, the inputs of every step, or a packed sequence of them. Then h0 and the
            last states are in its order.
        h0: ``(B, N)``, the first states.
        transition: Q ``(N, N)``, or the factors of :func:`~cwy.ops.wy_factors`: then the cheaper
            of the two forms is used.
        bias: ``(N,)`` or None.
        nonlinearity: "modrelu", "abs", "relu", "leaky_relu", "tanh", "identity", or a function,
            which takes the slow path.
        signs: ``(N,)``, ±1, for factors: $Q = (I - UTU^H)\,\mathrm{diag}(s)$. Complex ones have
            modulus 1.
        weight: ``(N, K)``, if given, maps x ``(T, B, K)`` first. In the memory modes, a chunk of
            steps at a time.
        lengths: ``(B,)``, where sequences end. States after that are zero, and no gradient comes
            from there.
        output: "all" states, or only the "last".
        memory: what is kept for the backward pass. "store" keeps every state. "checkpoint" keeps
            $\sqrt T$ of them and computes the rest again. "reversible" ("abs" and "identity")
            recovers them backwards, from one sign bit per unit and step. If z is exactly 0, its
            derivative is then that of z > 0.
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``(states, last)``: ``(T, B, N)`` (packed if x is, None for output="last") and ``(B, N)``.

    Example:
        >>> q = cwy_matrix(torch.randn(8, 8))
        >>> x = torch.zeros(100, 3, 8)
        >>> states, last = rollout(x, torch.randn(3, 8), q, nonlinearity="identity")
        >>> torch.allclose(last.norm(dim=-1), states[0].norm(dim=-1), rtol=1e-4)
        True
    """
    check_choices("rollout", nonlinearity, output, memory)
    packed = None
    if lengths is not None:
        packed = _pack(x, h0, lengths)
    given = x
    if packed is not None:
        given = PackedSequence(packed.data, packed.batch_sizes)
        h0 = h0[packed.sorted_indices]
    states, last = run(
        given,
        h0,
        transition,
        bias,
        nonlinearity,
        signs=signs,
        weight=weight,
        output=output,
        memory=memory,
        backend=backend,
    )
    if packed is None:
        return states, last
    assert isinstance(x, Tensor)
    return _pad(states, packed, x.shape[0]), last[packed.unsorted_indices]


def _pack(x: Tensor | PackedSequence, h0: Tensor, lengths: Tensor) -> PackedSequence | None:
    """Return sequences of these lengths packed, longest first, or None if there are none."""
    lengths = _checked_lengths(x, h0, lengths)
    if len(lengths) == 0:
        return None
    assert isinstance(x, Tensor)
    return pack_padded_sequence(x, lengths, enforce_sorted=False)


def _pad(
    states: Tensor | PackedSequence | None, packed: PackedSequence, steps: int
) -> Tensor | None:
    """Return states ``(T, B, N)`` in the order before :func:`_pack`."""
    if states is None:
        return None
    ordered = PackedSequence(
        states.data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
    )
    padded, _ = pad_packed_sequence(ordered, total_length=steps)
    return padded


def run(
    x: Tensor | PackedSequence,
    h0: Tensor,
    transition: Tensor | WY | Reflections,
    bias: Tensor | None,
    nonlinearity: Activation,
    *,
    signs: Tensor | None = None,
    weight: Tensor | None = None,
    output: str = "all",
    memory: str = "store",
    backend: str = "auto",
) -> tuple[Tensor | PackedSequence | None, Tensor]:
    """Run a recurrence whose choices are checked, without padding.

    Args:
        transition: as in :func:`rollout`, or reflections that are not computed yet.
        x, h0, bias, nonlinearity, signs, weight, output, memory, backend: as in :func:`rollout`.
    """
    inputs = _checked_inputs(x, h0, transition, bias, signs, weight)
    wanted = _common_dtype(inputs.rows, h0, transition, signs)
    dtype = computed_in(wanted)
    q = decide(transition, signs, inputs.rows.shape[0], dtype)
    h0 = h0.to(dtype)
    if weight is not None:
        weight = weight.to(dtype)
    bias = _checked_bias(bias, nonlinearity, dtype)
    last_only = output == "last"
    if exports_as_scan(backend) and isinstance(x, Tensor):
        steps = x.to(dtype)
        states, last = scan.rollout(steps, h0, q, bias, weight, nonlinearity, last=last_only)
    else:
        rows = inputs.rows
        if computed_in(rows.dtype) != dtype:
            rows = rows.to(dtype)
        sizes, count = inputs.steps
        spec = RolloutSpec(nonlinearity, sizes, count, memory, last_only, rounded_to(wanted))
        states, last = _serve(rows, h0, q, bias, weight, spec, backend)
    if last_only or states is None:
        return None, last.to(wanted)
    return _as_given(states.to(wanted), x, h0.shape[-1]), last.to(wanted)


def _serve(
    rows: Tensor,
    h0: Tensor,
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence by the backend that serves it."""
    sizes = spec.sizes
    request = Request(
        n=h0.shape[-1],
        batch=h0.shape[0],
        steps=spec.step_count,
        dtype=h0.dtype,
        device=rows.device.type,
        nonlinearity=name_of(spec.nonlinearity),
        reflections=transition.reflections,
        memory=spec.memory,
        equal_lengths=not sizes or sizes[0] == sizes[-1],
        transformed=dispatch.why_only_autograd(rows, h0, *transition.tensors, bias, weight),
        compiling=torch.compiler.is_compiling(),
        index=rows.device.index,
    )
    serve = dispatch.choose("rollout", backend, request).rollout
    return serve(rows, h0, transition, bias, weight, spec)


def _as_given(states: Tensor, x: Tensor | PackedSequence, n: int) -> Tensor | PackedSequence:
    """Return the states of all steps packed, or with the steps and sequences of x."""
    if isinstance(x, PackedSequence):
        return PackedSequence(states, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
    return states.reshape(*x.shape[:2], n)


class _Inputs(NamedTuple):
    """The inputs of all steps, ``rows (sum of sizes, N or K)``, and how many rows a step has."""

    rows: Tensor
    steps: StepSizes


def _checked_inputs(
    x: Tensor | PackedSequence,
    h0: Tensor,
    transition: Tensor | WY | Reflections,
    bias: Tensor | None,
    signs: Tensor | None,
    weight: Tensor | None,
) -> _Inputs:
    """Return the rows of x. Raise unless all shapes and devices fit."""
    _check_states("h0", h0, 2, "(B, N)")
    batch, n = h0.shape
    if isinstance(x, PackedSequence):
        _check_states("the data of x", x.data, 2, "(rows, N)")
        inputs = _Inputs(x.data, StepSizes(x.batch_sizes.tolist(), None))
    else:
        _check_states("x", x, 3, "(T, B, N)")
        inputs = _Inputs(x.flatten(0, 1), equal_steps(x))
    rows = inputs.rows
    _check_constant("bias", bias, (n,), n)
    _check_constant("signs", signs, (n,), n)
    _check_constant("weight", weight, (n, rows.shape[-1]), n)
    first, last = _transition_tensors(transition)
    _check_devices(
        x=rows, h0=h0, transition=first, factor_t=last, bias=bias, signs=signs, weight=weight
    )
    columns = n
    if weight is not None:
        columns = weight.shape[-1]
    sizes = inputs.steps.sizes
    if rows.shape[-1] != columns or (sizes and sizes[0] != batch):
        got = f"packed, {tuple(rows.shape)}"
        if isinstance(x, Tensor):
            got = str(tuple(x.shape))
        raise ValueError(
            f"rollout: x is {got} and h0 {tuple(h0.shape)}: expected x (T, {batch}, {columns})."
        )
    _check_transition_shape(transition, signs, n)
    return inputs


def _common_dtype(
    rows: Tensor, h0: Tensor, transition: Tensor | WY | Reflections, signs: Tensor | None
) -> torch.dtype:
    """Return the dtype of the results."""
    wanted = torch.promote_types(rows.dtype, h0.dtype)
    wanted = torch.promote_types(wanted, first_tensor(transition).dtype)
    if signs is not None:
        wanted = torch.promote_types(wanted, signs.dtype)
    return wanted


def _checked_bias(
    bias: Tensor | None, nonlinearity: Activation, dtype: torch.dtype
) -> Tensor | None:
    """Return the bias as it is computed with. Raise unless it and f fit the dtype."""
    f = name_of(nonlinearity)
    if dtype.is_complex and f in NONLINEARITIES and not NONLINEARITIES[f].complex:
        names = ", ".join(repr(name) for name, other in NONLINEARITIES.items() if other.complex)
        raise ValueError(f"rollout: nonlinearity {f!r} has no complex form. Use one of {names}.")
    if bias is None:
        return None
    if bias.is_complex() and (f == "modrelu" or not dtype.is_complex):
        raise ValueError(f"rollout: bias must be real here, got {bias.dtype}.")
    if f != "modrelu" or not dtype.is_complex:
        return bias.to(dtype)
    # The threshold of modReLU is real. Compilers do not know dtype.to_real.
    if dtype == torch.complex128:
        return bias.to(torch.float64)
    return bias.to(torch.float32)


def _checked_lengths(x: Tensor | PackedSequence, h0: Tensor, lengths: Tensor) -> Tensor:
    """Return the lengths on the CPU. Raise unless there is one for each sequence of x."""
    if isinstance(x, PackedSequence):
        raise ValueError("rollout: x is packed and has its lengths already; leave lengths out.")
    _check_states("x", x, 3, "(T, B, N)")
    _check_states("h0", h0, 2, "(B, N)")
    steps, batch, _ = x.shape
    lengths = torch.as_tensor(lengths).cpu()
    fit = lengths.shape == x.shape[1:2]
    if not fit or any(not 1 <= length <= steps for length in lengths.tolist()):
        raise ValueError(
            f"rollout: lengths must be {batch} numbers from 1 to T = {steps}, "
            f"got {lengths.tolist()}."
        )
    return lengths


def _check_states(name: str, x: Tensor, dims: int, shape: str) -> None:
    """Raise unless x is a floating-point or complex tensor with so many dimensions."""
    if not isinstance(x, Tensor):
        raise ValueError(f"rollout: {name} must be {shape}, got {type(x).__name__}.")
    if x.dim() != dims:
        raise ValueError(f"rollout: {name} must be {shape}, got shape {tuple(x.shape)}.")
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"rollout: {name} must be floating-point or complex, got {x.dtype}.")


def _check_constant(name: str, value: Tensor | None, shape: tuple[int, ...], n: int) -> None:
    """Raise unless a value is None or a tensor of a shape."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"rollout: {name} must be a torch.Tensor, got {type(value).__name__}.")
    if tuple(value.shape) != shape:
        raise ValueError(
            f"rollout: {name} must be {shape} for states of {n}, got {tuple(value.shape)}."
        )


def _transition_tensors(transition: Tensor | WY | Reflections) -> tuple[Tensor, Tensor]:
    """Return the first and the last tensor of a transition. Raise unless they are tensors."""
    if isinstance(transition, WY):
        first, last = transition
    else:
        first = last = first_tensor(transition)
    if not (isinstance(first, Tensor) and isinstance(last, Tensor)):
        raise TypeError(
            "rollout: transition must be a matrix, or what wy_factors returns, "
            f"got {type(transition).__name__}."
        )
    return first, last


def _check_devices(**tensors: Tensor | None) -> None:
    """Raise unless all tensors are on one device."""
    places = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(places.values())) > 1:
        got = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise ValueError(f"rollout: all tensors must be on one device, got {got}.")


def _check_transition_shape(
    transition: Tensor | WY | Reflections, signs: Tensor | None, n: int
) -> None:
    """Raise unless a transition maps states of n units, and signs come with factors."""
    if isinstance(transition, Tensor):
        if transition.shape != (n, n):
            raise ValueError(
                f"rollout: transition must be ({n}, {n}) for states of {n}, "
                f"got {tuple(transition.shape)}."
            )
        if signs is not None:
            raise ValueError(
                "rollout: signs belong to factors; multiply a formed transition by them instead."
            )
    if isinstance(transition, WY):
        u, t = transition
        if u.shape[:-1] != (n,) or t.shape != (u.shape[-1], u.shape[-1]):
            got = f"{tuple(u.shape)} and {tuple(t.shape)}"
            raise ValueError(
                f"rollout: the factors must be u ({n}, L) and t (L, L) for states of {n}, "
                f"got {got}."
            )

"""The public function ``rollout``: check, choose a form and a backend, run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .. import dispatch
from ..wy import WY
from . import scan
from .factors import Reflections, decide, first_tensor, takes_low_rank
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
            derivative is then that of z > 0. It needs an orthogonal Q: a Q that was formed in half
            precision is not, and its gradients drift. Pass factors.
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
    call = _Call(x, h0, transition, bias, nonlinearity, signs, weight, output, memory, backend)
    signature = _signature(call)
    route = None
    # A compiler must not see the routes: it would guard its program by them.
    if signature is not None:
        route = _ROUTES.get(signature)
    if route is None:
        route = _find_route(call)
    dtype = route.dtype
    q = decide(transition, signs, dtype, low_rank=route.low_rank)
    h0 = h0.to(dtype)
    if weight is not None:
        weight = weight.to(dtype)
    if bias is not None:
        bias = bias.to(route.bias_dtype)
    if exports_as_scan(backend) and isinstance(x, Tensor):
        last_only = route.spec.last
        steps = x.to(dtype)
        states, last = scan.rollout(steps, h0, q, bias, weight, nonlinearity, last=last_only)
    else:
        rows = _rows(x)
        if route.converts:
            rows = rows.to(dtype)
        serve = route.serve
        if serve is None:
            serve = _backend_for(rows, h0, q, bias, weight, route.spec, backend)
            if signature is not None:
                _remember(signature, replace(route, serve=serve))
        states, last = serve(rows, h0, q, bias, weight, route.spec)
    last = last.to(route.wanted)
    if route.spec.last or states is None:
        return None, last
    return _as_given(states.to(route.wanted), x, h0.shape[-1]), last


class _Call(NamedTuple):
    """Hold the arguments of :func:`run`."""

    x: Tensor | PackedSequence
    h0: Tensor
    transition: Tensor | WY | Reflections
    bias: Tensor | None
    nonlinearity: Activation
    signs: Tensor | None
    weight: Tensor | None
    output: str
    memory: str
    backend: str


@dataclass(frozen=True)
class _Route:
    """Hold what follows from shapes, dtypes, devices and choices, apart from values.

    Attributes:
        wanted: the dtype of the results.
        dtype: that of the computation.
        bias_dtype: that of the bias.
        converts: whether the inputs are converted before a backend gets them.
        low_rank: whether a transition by reflections is used in low-rank form.
        spec: how it runs.
        serve: the backend's function, or None if it must be chosen at each call.
    """

    wanted: torch.dtype
    dtype: torch.dtype
    bias_dtype: torch.dtype
    converts: bool
    low_rank: bool
    spec: RolloutSpec
    serve: Callable[..., tuple[Tensor, Tensor]] | None


_ROUTES: dict[Hashable, _Route] = {}
_MOST_ROUTES = 4096


def _remember(signature: Hashable, route: _Route) -> None:
    if len(_ROUTES) >= _MOST_ROUTES:
        _ROUTES.clear()
    _ROUTES[signature] = route


def _signature(call: _Call) -> Hashable:
    """Return all that a route depends on, or None for a call whose route is found each time.

    Checks, the form of the transition and the backend are found once for each signature.
    """
    if not isinstance(call.x, Tensor) or not isinstance(call.nonlinearity, str):
        return None
    tensors = (
        call.x,
        call.h0,
        *_transition_tensors(call.transition),
        call.bias,
        call.signs,
        call.weight,
    )
    if not dispatch.is_plain_eager(*tensors):
        return None
    parts: list[Hashable] = [
        type(call.transition),
        call.nonlinearity,
        call.output,
        call.memory,
        call.backend,
    ]
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
        else:
            parts += [tensor.shape, tensor.dtype, tensor.device]
    return tuple(parts)


def _find_route(call: _Call) -> _Route:
    """Return the route of a call. Raise unless all of its arguments fit together."""
    inputs = _checked_inputs(call.x, call.h0, call.transition, call.bias, call.signs, call.weight)
    wanted = _common_dtype(inputs.rows, call.h0, call.transition, call.signs)
    dtype = computed_in(wanted)
    low_rank = takes_low_rank(call.transition, inputs.rows.shape[0], dtype)
    bias_dtype = _bias_dtype(call.bias, call.nonlinearity, dtype)
    sizes, count = inputs.steps
    last_only = call.output == "last"
    rounded = rounded_to(wanted)
    spec = RolloutSpec(call.nonlinearity, sizes, count, call.memory, last_only, rounded)
    return _Route(
        wanted=wanted,
        dtype=dtype,
        bias_dtype=bias_dtype,
        converts=computed_in(inputs.rows.dtype) != dtype,
        low_rank=low_rank,
        spec=spec,
        serve=None,
    )


def _rows(x: Tensor | PackedSequence) -> Tensor:
    """Return the inputs of all steps."""
    if isinstance(x, PackedSequence):
        return x.data
    return x.flatten(0, 1)


def _backend_for(
    rows: Tensor,
    h0: Tensor,
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
    backend: str,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function of the backend that serves."""
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
    return dispatch.choose("rollout", backend, request).rollout


def _as_given(states: Tensor, x: Tensor | PackedSequence, n: int) -> Tensor | PackedSequence:
    """Return the states of all steps packed, or with the steps and sequences of x."""
    if isinstance(x, PackedSequence):
        return PackedSequence(states, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
    return states.reshape(*x.shape[:2], n)


class _Inputs(NamedTuple):
    """Hold the inputs of all steps, ``rows (sum of sizes, N or K)``, and the rows of each step."""

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


def _bias_dtype(bias: Tensor | None, nonlinearity: Activation, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the bias. Raise unless it and f fit that of the computation."""
    f = name_of(nonlinearity)
    if dtype.is_complex and f in NONLINEARITIES and not NONLINEARITIES[f].complex:
        names = ", ".join(repr(name) for name, other in NONLINEARITIES.items() if other.complex)
        raise ValueError(f"rollout: nonlinearity {f!r} has no complex form. Use one of {names}.")
    if bias is not None and bias.is_complex() and (f == "modrelu" or not dtype.is_complex):
        raise ValueError(f"rollout: bias must be real here, got {bias.dtype}.")
    if f != "modrelu" or not dtype.is_complex:
        return dtype
    # The threshold of modReLU is real. Compilers do not know dtype.to_real.
    if dtype == torch.complex128:
        return torch.float64
    return torch.float32


def _checked_lengths(x: Tensor | PackedSequence, h0: Tensor, lengths: Tensor) -> Tensor:
    """Return the lengths on the CPU. Raise unless there is one for each sequence of x."""
    if isinstance(x, PackedSequence):
        raise ValueError("rollout: x is packed and has its lengths already. Leave lengths out.")
    _check_states("x", x, 3, "(T, B, N)")
    _check_states("h0", h0, 2, "(B, N)")
    steps, batch, _ = x.shape
    lengths = torch.as_tensor(lengths).cpu()
    whole = not (lengths.is_floating_point() or lengths.is_complex())
    fit = whole and lengths.shape == x.shape[1:2]
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
                "rollout: signs belong to factors. Multiply a formed transition by them."
            )
    if isinstance(transition, WY):
        u, t = transition
        if u.shape[:-1] != (n,) or t.shape != (u.shape[-1], u.shape[-1]):
            got = f"{tuple(u.shape)} and {tuple(t.shape)}"
            raise ValueError(
                f"rollout: the factors must be u ({n}, L) and t (L, L) for states of {n}, "
                f"got {got}."
            )

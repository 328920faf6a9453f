"""The public function ``rollout``: check, choose how, run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .. import dispatch
from ..wy import WY
from . import autograd, cuda, cudnn, factors, reference, scan
from .nonlinearities import NONLINEARITIES

MEMORY = ("store", "checkpoint", "reversible")


class Request(NamedTuple):
    """What a backend must know to say whether it can serve a rollout."""

    n: int
    batch: int
    steps: int
    dtype: torch.dtype
    device: str
    nonlinearity: str
    factors: int | None = None
    memory: str = "store"
    last: bool = False
    equal_lengths: bool = True
    transformed: str | None = None
    compiling: bool = False
    index: int | None = None


def by_hand(request: Request) -> str | None:
    """Why the adjoint written by hand can't serve, or None if it can."""
    if request.transformed is not None:
        return request.transformed
    if request.nonlinearity not in NONLINEARITIES:
        return "the nonlinearity is a callable, whose derivative only autograd knows"
    return None


def by_autograd(request: Request) -> str | None:
    """Why autograd can't serve, or None if it can."""
    return (
        None
        if request.memory == "store"
        else f"autograd stores every state, and memory is {request.memory!r}"
    )


dispatch.provide(
    "rollout",
    dispatch.Backend(
        "cuda", cuda, "float32 up to N = 1024 on a GPU: kernels that hold Q on chip", cuda.why_not
    ),
    dispatch.Backend(
        "cudnn", cudnn, "relu and tanh on a GPU: torch's fused RNN", cudnn.why_not, cudnn.why_pass
    ),
    dispatch.Backend(
        "torch", autograd, "the loop and its adjoint by hand; CUDA graphs on a GPU", by_hand
    ),
    dispatch.Backend(
        "reference",
        reference,
        "a loop and autograd: the definition; torch.func, callables",
        by_autograd,
    ),
)


def factors_are_cheaper(
    n: int, reflections: int, rows: int, device: str, dtype: torch.dtype, index: int | None = None
) -> bool:
    """Whether a training step of ``rows`` states in all is cheaper by factors than by a formed Q."""
    if cuda.why_not(Request(n, 1, 1, dtype, device, "abs", index=index)) is None:
        return cuda.prefers_factors(n, reflections)
    if torch.compiler.is_compiling():
        # One program serves every length: a choice by the length would be a guard on it. This is the limit of many rows.
        return 16 * reflections < 6 * n
    return 16 * n * reflections * rows < 6 * n * n * rows + 12 * n * n * reflections


def equal_steps(x: Tensor) -> tuple[list[int], int | None]:
    """Return the rows of each step of ``x (T, B, ...)``, and None; under a compiler the rows of one step, and T.

    A list of T numbers would be a new program for each T.
    """
    if torch.compiler.is_compiling():
        return [x.shape[1]], x.shape[0]
    return [x.shape[1]] * x.shape[0], None


def exports_plainly(backend: str) -> bool:
    """Return whether an exporter is tracing and is to see ATen ops only: ``scan``, for the definition's loop over time."""
    return backend == "reference" and torch.compiler.is_exporting()


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
    r"""A whole recurrence, $h_t = f(Q h_{t-1} + x_t + b)$, forward and backward.

    For "modrelu" the bias is the threshold: $h_t = \mathrm{sgn}(z_t)\,\mathrm{relu}(|z_t| + b)$, $z_t = Q h_{t-1} + x_t$.

    Args:
        x: ``(T, B, N)``, the inputs of every step; or a packed sequence of them, h0 and the last states in its order.
        h0: ``(B, N)``, the first states.
        transition: Q ``(N, N)``, or the factors of :func:`~cwy.ops.wy_factors`: then the cheaper of the two forms is used.
        bias: ``(N,)`` or None.
        nonlinearity: "modrelu", "abs", "relu", "leaky_relu", "tanh", "identity"; or a function, which takes the slow path.
        signs: ``(N,)``, ±1, for factors: $Q = (I - UTU^H)\,\mathrm{diag}(s)$; complex ones are of modulus 1.
        weight: ``(N, K)``, if given, maps x ``(T, B, K)`` first; in the memory modes a chunk of steps at a time.
        lengths: ``(B,)``, where sequences end; states after that are zero, and no gradient comes from there.
        output: "all" states, or only the "last".
        memory: "store" every state for the backward; "checkpoint" $\sqrt T$ of them and compute the rest again;
            "reversible" ("abs" and "identity"): recover them backwards, from a sign bit a unit (where z is exactly 0, its
            derivative is then taken as that of z > 0).
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``(states, last)``: ``(T, B, N)`` (packed if x is; None for output="last") and ``(B, N)``.

    Example:
        >>> q = cwy_matrix(torch.randn(8, 8))
        >>> states, last = rollout(torch.zeros(100, 3, 8), torch.randn(3, 8), q, nonlinearity="identity")
        >>> torch.allclose(last.norm(dim=-1), states[0].norm(dim=-1), rtol=1e-4)
        True
    """
    check_choices("rollout", nonlinearity, output, memory)
    if lengths is not None:
        if isinstance(x, PackedSequence):
            raise ValueError("rollout: x is packed and has its lengths already; leave lengths out.")
        _check_shape("x", x, 3, "(T, B, N)")
        _check_shape("h0", h0, 2, "(B, N)")
        lengths = torch.as_tensor(lengths).cpu()
        if lengths.shape != x.shape[1:2] or any(
            not 1 <= length <= x.shape[0] for length in lengths.tolist()
        ):
            raise ValueError(
                f"rollout: lengths must be {x.shape[1]} numbers from 1 to T = {x.shape[0]}, got {lengths.tolist()}."
            )
    if lengths is not None and len(lengths) > 0:
        assert isinstance(x, Tensor)
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        order, back = packed.sorted_indices, packed.unsorted_indices
        assert order is not None
        assert back is not None
        states, last = rollout(
            PackedSequence(packed.data, packed.batch_sizes), h0[order], transition, bias, nonlinearity, signs=signs,
            weight=weight, output=output, memory=memory, backend=backend,
        )  # fmt: skip
        if states is not None:
            states = PackedSequence(states.data, packed.batch_sizes, order, back)
            states, _ = pad_packed_sequence(states, total_length=x.shape[0])
        return states, last[back]
    _check_shape("h0", h0, 2, "(B, N)")
    n = h0.shape[-1]
    if isinstance(x, PackedSequence):
        _check_shape("the data of x", x.data, 2, "(rows, N)")
        rows, sizes, steps = x.data, x.batch_sizes.tolist(), None
    else:
        _check_shape("x", x, 3, "(T, B, N)")
        rows = x.flatten(0, 1)
        sizes, steps = equal_steps(x)
    for name, value, shape in (
        ("bias", bias, (n,)),
        ("signs", signs, (n,)),
        ("weight", weight, (n, rows.shape[-1])),
    ):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"rollout: {name} must be a torch.Tensor, got {type(value).__name__}.")
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"rollout: {name} must be {shape} for states of {n}, got {tuple(value.shape)}."
            )
    parts = transition if isinstance(transition, WY) else (transition,)
    if not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(
            f"rollout: transition must be a matrix, or what wy_factors returns, got {type(transition).__name__}."
        )
    _check_devices(
        x=rows,
        h0=h0,
        transition=parts[0],
        factor_t=parts[-1],
        bias=bias,
        signs=signs,
        weight=weight,
    )
    columns = n if weight is None else weight.shape[-1]
    if rows.shape[-1] != columns or (sizes and sizes[0] != h0.shape[0]):
        raise ValueError(
            f"rollout: x is {tuple(x.shape) if isinstance(x, Tensor) else f'packed, {tuple(rows.shape)}'} and h0 "
            f"{tuple(h0.shape)}: expected x (T, {h0.shape[0]}, {columns})."
        )
    wanted = torch.promote_types(torch.promote_types(rows.dtype, h0.dtype), parts[0].dtype)
    wanted = wanted if signs is None else torch.promote_types(wanted, signs.dtype)
    # Half precision would lose the norm within hundreds of steps: it is computed in float32 and rounded at the end.
    dtype = torch.float32 if wanted in (torch.float16, torch.bfloat16) else wanted
    q = _transition(transition, signs, n, rows.shape[0], dtype)
    rows, h0, weight = rows.to(dtype), h0.to(dtype), None if weight is None else weight.to(dtype)
    f = nonlinearity if isinstance(nonlinearity, str) else "callable"
    if dtype.is_complex and f in NONLINEARITIES and not NONLINEARITIES[f].complex:
        names = ", ".join(repr(k) for k, v in NONLINEARITIES.items() if v.complex)
        raise ValueError(f"rollout: nonlinearity {f!r} has no complex form. Use one of {names}.")
    if bias is not None:
        if bias.is_complex() and not (dtype.is_complex and f != "modrelu"):
            raise ValueError(f"rollout: bias must be real here, got {bias.dtype}.")
        # Compilers do not know dtype.to_real.
        real = (
            (torch.float64 if dtype == torch.complex128 else torch.float32)
            if dtype.is_complex and f == "modrelu"
            else dtype
        )
        bias = bias.to(real)
    if exports_plainly(backend) and isinstance(x, Tensor):
        states, last = scan.rollout(
            x.to(dtype), h0, q, bias, weight, nonlinearity, output == "last"
        )
        return None if states is None else states.to(wanted), last.to(wanted)
    request = Request(
        n, h0.shape[0], len(sizes) if steps is None else steps, dtype, rows.device.type, f,
        q[0].shape[1] if len(q) > 1 else None, memory,
        output == "last", not sizes or sizes[0] == sizes[-1], dispatch.why_only_autograd(rows, h0, *q, bias, weight),
        torch.compiler.is_compiling(), rows.device.index,
    )  # fmt: skip
    serve = dispatch.choose("rollout", backend, request).rollout
    states, last = serve(
        rows, h0, q, bias, weight, nonlinearity, sizes, memory, output == "last", steps
    )
    states, last = states.to(wanted), last.to(wanted)
    if output == "last":
        return None, last
    if isinstance(x, PackedSequence):
        return PackedSequence(states, x.batch_sizes, x.sorted_indices, x.unsorted_indices), last
    return states.reshape(*x.shape[:2], n), last


def _transition(
    transition: Tensor | WY, signs: Tensor | None, n: int, rows: int, dtype: torch.dtype
) -> list[Tensor]:
    """Q, or its factors w, y, d with $Q = \\mathrm{diag}(d) - w y^H$."""
    if not isinstance(transition, WY):
        if transition.shape != (n, n):
            raise ValueError(
                f"rollout: transition must be ({n}, {n}) for states of {n}, got {tuple(transition.shape)}."
            )
        if signs is not None:
            raise ValueError(
                "rollout: signs belong to factors; multiply a formed transition by them instead."
            )
        return [transition.to(dtype)]
    u, t = (factor.to(dtype) for factor in transition)
    if u.shape[:-1] != (n,) or t.shape != (u.shape[-1], u.shape[-1]):
        got = f"{tuple(u.shape)} and {tuple(t.shape)}"
        raise ValueError(
            f"rollout: the factors must be u ({n}, L) and t (L, L) for states of {n}, got {got}."
        )
    signs = None if signs is None else signs.to(dtype)
    if factors_are_cheaper(n, u.shape[-1], rows, u.device.type, dtype, u.device.index):
        d = torch.ones(n, dtype=dtype, device=u.device) if signs is None else signs
        return [*factors.split(u, t, signs), d]
    return [factors.formed(u, t, signs)]


def check_choices(call: str, nonlinearity: str | Callable, output: str, memory: str) -> None:
    """Raises unless the three name something that exists and fits together."""
    if not callable(nonlinearity) and nonlinearity not in NONLINEARITIES:
        raise ValueError(
            f"{call}: unknown nonlinearity {nonlinearity!r}. Known: {', '.join(NONLINEARITIES)}, or a function."
        )
    if output not in ("all", "last"):
        raise ValueError(f"{call}: output must be 'all' or 'last', got {output!r}.")
    if memory not in MEMORY:
        raise ValueError(
            f"{call}: memory must be one of {', '.join(map(repr, MEMORY))}, got {memory!r}."
        )
    if memory != "store" and callable(nonlinearity):
        raise ValueError(
            f"{call}: a function has memory='store' alone, for autograd stores every state; got memory={memory!r}."
        )
    if memory == "reversible":
        reason = NONLINEARITIES[str(nonlinearity)].irreversible
        if reason is not None:
            raise ValueError(
                f"{call}: memory='reversible' is not for this nonlinearity: {reason}. Use memory='checkpoint'."
            )


def _check_devices(**tensors: Tensor | None) -> None:
    places = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(places.values())) > 1:
        raise ValueError(
            f"rollout: all tensors must be on one device, got {', '.join(f'{name} on {at}' for name, at in places.items())}."
        )


def _check_shape(name: str, x: Tensor, dims: int, shape: str) -> None:
    if not isinstance(x, Tensor) or x.dim() != dims:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"rollout: {name} must be {shape}, got {got}.")
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"rollout: {name} must be floating-point or complex, got {x.dtype}.")

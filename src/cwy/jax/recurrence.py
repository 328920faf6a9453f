"""A whole recurrence over time, with a hand-written adjoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ._checks import (
    as_array,
    checked_flag,
    checked_signs,
    checked_whole,
    computed_in,
    is_traced,
)
from ._forward_mode import refuse
from ._linalg import adjoint, product, real_dtype
from .wy import WY, checked_factors

SLOPE = 0.01
"""The slope of leaky_relu, torch's default."""
UNROLL = 8
"""Steps of a scan that are compiled as one, unless told otherwise."""

_REMEDY = (
    "rollout: its hand-written adjoint supports only reverse mode (grad, vjp, jacrev). For forward "
    "mode (jvp, jacfwd, linearize) pass forward_mode=True, which uses a plain lax.scan."
)


@dataclass(frozen=True)
class Nonlinearity:
    """Describe a pointwise f with $h = f(z)$.

    Attributes:
        define: ``define(z, bias)``. The bias is None where it was added to z already.
        back: ``back(g, h, kept, bias)``, the cotangent of z from that of h.
        keep: ``keep(z)``, what the derivative needs besides h. None needs nothing.
        threshold: whether the bias is the nonlinearity's own (modReLU) rather than added to z.
        complex: whether it takes complex states.
    """

    define: Callable[[Array, Array | None], Array]
    back: Callable[[Array, Array, Any, Array | None], Array]
    keep: Callable[[Array], Any] = lambda z: None
    threshold: bool = False
    complex: bool = False


def modrelu(z: Array, bias: Array | None) -> Array:
    r"""Compute $\mathrm{sgn}(z)\,\mathrm{relu}(|z| + b)$, real or complex."""
    if bias is None:
        # The derivative at zero is zero, as with a bias.
        return jnp.where(z != 0, z, 0)
    if not jnp.iscomplexobj(z):
        return jnp.sign(z) * jax.nn.relu(jnp.abs(z) + bias)
    square = z.real**2 + z.imag**2
    live = square > 0
    size = jnp.sqrt(jnp.where(live, square, 1))
    return jnp.where(live, z / size * jax.nn.relu(size + bias), 0)


def _complex_modrelu_back(g: Array, h: Array, z: Array, bias: Array | None) -> Array:
    # From z: the size of h less the bias would cancel where z is small.
    return jax.vjp(lambda z: modrelu(z, bias), z)[1](g)[0]


NONLINEARITIES: dict[str, Nonlinearity] = {
    "modrelu": Nonlinearity(
        modrelu, lambda g, h, kept, b: jnp.where(h != 0, g, 0), threshold=True, complex=True
    ),
    "abs": Nonlinearity(
        # The derivative at zero is zero, as torch has it. That of jnp.abs is one.
        lambda z, b: z * lax.stop_gradient(jnp.sign(z)),
        lambda g, h, sign, b: g * sign.astype(g.dtype),
        keep=lambda z: jnp.sign(z).astype(jnp.int8),
    ),
    "relu": Nonlinearity(lambda z, b: jax.nn.relu(z), lambda g, h, kept, b: jnp.where(h > 0, g, 0)),
    "leaky_relu": Nonlinearity(
        lambda z, b: jnp.where(z > 0, z, SLOPE * z),
        lambda g, h, kept, b: jnp.where(h > 0, g, SLOPE * g),
    ),
    "tanh": Nonlinearity(lambda z, b: jnp.tanh(z), lambda g, h, kept, b: g * (1 - h * h)),
    "identity": Nonlinearity(lambda z, b: z, lambda g, h, kept, b: g, complex=True),
}
"""All nonlinearities by name, for real states."""

_COMPLEX_MODRELU = Nonlinearity(
    modrelu, _complex_modrelu_back, keep=lambda z: z, threshold=True, complex=True
)


class Formed(NamedTuple):
    """Hold the transition Q itself, ``(N, N)``."""

    q: Array


class LowRank(NamedTuple):
    r"""Hold the transition $\mathrm{diag}(d) - W Y^H$: ``w, y (N, L)``, ``d (N,)``."""

    w: Array
    y: Array
    d: Array


Transition = Formed | LowRank


def rollout(
    x: Any,
    h0: Any,
    transition: Any,
    bias: Any = None,
    nonlinearity: str | Callable[[Array], Array] = "modrelu",
    *,
    signs: Any = None,
    weight: Any = None,
    lengths: Any = None,
    output: str = "all",
    forward_mode: bool = False,
    unroll: int = UNROLL,
) -> tuple[Array | None, Array]:
    r"""Compute a whole recurrence, $h_t = f(Q h_{t-1} + x_t + b)$.

    For "modrelu" the bias is the threshold: $h_t = \mathrm{sgn}(z_t)\,\mathrm{relu}(|z_t| + b)$,
    $z_t = Q h_{t-1} + x_t$. The adjoint runs the recurrence backwards. One matrix product over all
    steps gives the gradient of the transition.

    Args:
        x: ``(T, B, N)``, the inputs of every step.
        h0: ``(B, N)``, the first states.
        transition: Q ``(N, N)``, or the factors of :func:`~cwy.jax.wy_factors`: then the cheaper
            of the two forms is used.
        bias: ``(N,)`` or None.
        nonlinearity: "modrelu", "abs", "relu", "leaky_relu", "tanh", "identity", or a function,
            which uses a plain ``lax.scan``.
        signs: ``(N,)``, ±1, for factors: $Q = (I - UTU^H)\,\mathrm{diag}(s)$. Complex ones have
            modulus 1.
        weight: ``(N, K)``, if given, maps x ``(T, B, K)`` first.
        lengths: ``(B,)``, where sequences end. States after that are zero, and no gradient comes
            from there.
        output: "all" states, or only the "last".
        forward_mode: use a plain ``lax.scan``, which ``jvp`` and ``jacfwd`` differentiate, too.
            Without it they raise.
        unroll: steps that ``lax.scan`` compiles as one.

    Returns:
        ``(states, last)``: ``(T, B, N)`` (None for output="last") and ``(B, N)``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from cwy.jax import init, rollout
        >>> q = init.haar(jax.random.key(0), 8)
        >>> h0 = jax.random.normal(jax.random.key(1), (3, 8))
        >>> _, last = rollout(jnp.zeros((100, 3, 8)), h0, q, nonlinearity="identity")
        >>> bool(jnp.allclose(jnp.linalg.norm(last), jnp.linalg.norm(h0), rtol=1e-4))
        True
    """
    x, h0 = _checked_states(x, h0)
    transition, wanted = _checked_transition(transition, h0.shape[-1])
    n = h0.shape[-1]
    signs = checked_signs("rollout", signs, (n,))
    if signs is not None:
        if not isinstance(transition, WY):
            raise ValueError(
                "rollout: signs belong to factors. Multiply a formed transition by them instead."
            )
        wanted = jnp.promote_types(wanted, signs.dtype)
    weight = _checked_constant("weight", weight, (n, x.shape[-1]))
    columns = n
    if weight is not None:
        columns = weight.shape[-1]
    if x.shape[1:] != (h0.shape[0], columns):
        raise ValueError(
            f"rollout: x is {x.shape} and h0 {h0.shape}: expected x (T, {h0.shape[0]}, {columns})."
        )
    if output not in ("all", "last"):
        raise ValueError(f"rollout: output must be 'all' or 'last', got {output!r}.")
    wanted = jnp.promote_types(jnp.promote_types(x.dtype, h0.dtype), wanted)
    dtype = computed_in(wanted)
    f = _checked_nonlinearity(nonlinearity, dtype)
    bias = _checked_bias(bias, n, f, dtype)
    live = _checked_lengths(lengths, x)
    plain = checked_flag("rollout", "forward_mode", forward_mode) or callable(nonlinearity)
    unroll = checked_whole("rollout", "unroll", unroll, least=1)

    x = x.astype(dtype)
    if live is not None:
        x = jnp.where(live[..., None], x, 0)
    if weight is not None:
        x = product(x, weight.astype(dtype).mT)
    threshold = None
    if bias is not None:
        if f.threshold:
            threshold = bias
        else:
            x = x + bias
    form = _form(transition, signs, dtype)
    states = _states(x, h0.astype(dtype), form, threshold, f, plain, unroll)
    last = h0.astype(dtype)
    if live is not None:
        end = jnp.sum(live, 0) - 1
        last = jnp.take_along_axis(states, end[None, :, None], 0)[0]
        states = jnp.where(live[..., None], states, 0)
    elif x.shape[0] > 0:
        last = states[-1]
    if output == "last":
        return None, last.astype(wanted)
    return states.astype(wanted), last.astype(wanted)


def _checked_states(x: Any, h0: Any) -> tuple[Array, Array]:
    x = as_array("rollout", "x", x)
    h0 = as_array("rollout", "h0", h0)
    if x.ndim != 3:
        raise ValueError(f"rollout: x must be (T, B, N), got shape {x.shape}.")
    if h0.ndim != 2:
        raise ValueError(f"rollout: h0 must be (B, N), got shape {h0.shape}.")
    return x, h0


def _checked_transition(transition: Any, n: int) -> tuple[Array | WY, jnp.dtype]:
    """Return the transition and its dtype, or raise unless it maps states of n units."""
    if not isinstance(transition, WY):
        q = as_array("rollout", "transition", transition)
        if q.shape != (n, n):
            raise ValueError(
                f"rollout: transition must be ({n}, {n}) for states of {n}, got {q.shape}."
            )
        return q, q.dtype
    factors = checked_factors("rollout", transition, n)
    return factors, factors.u.dtype


def _checked_constant(name: str, value: Any, shape: tuple[int, ...]) -> Array | None:
    if value is None:
        return None
    value = as_array("rollout", name, value)
    if value.shape != shape:
        raise ValueError(f"rollout: {name} must be {shape}, got {value.shape}.")
    return value


def _checked_nonlinearity(
    nonlinearity: str | Callable[[Array], Array], dtype: jnp.dtype
) -> Nonlinearity:
    if callable(nonlinearity):
        function = nonlinearity
        return Nonlinearity(lambda z, b: function(z), lambda g, h, kept, b: g, complex=True)
    if not isinstance(nonlinearity, str) or nonlinearity not in NONLINEARITIES:
        names = ", ".join(map(repr, NONLINEARITIES))
        raise ValueError(
            f"rollout: nonlinearity must be one of {names} or a function, got {nonlinearity!r}."
        )
    f = NONLINEARITIES[nonlinearity]
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return f
    if not f.complex:
        names = ", ".join(repr(name) for name, other in NONLINEARITIES.items() if other.complex)
        raise ValueError(
            f"rollout: nonlinearity {nonlinearity!r} has no complex form. Use one of {names}."
        )
    if nonlinearity == "modrelu":
        return _COMPLEX_MODRELU
    return f


def _checked_bias(bias: Any, n: int, f: Nonlinearity, dtype: jnp.dtype) -> Array | None:
    bias = _checked_constant("bias", bias, (n,))
    if bias is None:
        return None
    real = f.threshold or not jnp.issubdtype(dtype, jnp.complexfloating)
    if real and jnp.iscomplexobj(bias):
        raise ValueError(f"rollout: bias must be real here, got {bias.dtype}.")
    if f.threshold:
        return bias.astype(real_dtype(dtype))
    return bias.astype(dtype)


def _checked_lengths(lengths: Any, x: Array) -> Array | None:
    """Return ``(T, B)``, which steps belong to a sequence, or None if all do."""
    if lengths is None:
        return None
    steps, batch = x.shape[:2]
    allowed = f"{batch} whole numbers from 1 to T = {steps}"
    try:
        ends = jnp.asarray(lengths)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"rollout: lengths must be {allowed}, got {lengths!r}.") from error
    right = ends.shape == (batch,) and jnp.issubdtype(ends.dtype, jnp.integer)
    if right and not is_traced(ends):
        values = np.asarray(ends)
        right = bool(np.all((values >= 1) & (values <= steps)))
    if not right:
        raise ValueError(f"rollout: lengths must be {allowed}, got {lengths}.")
    return jnp.arange(steps)[:, None] < ends


def _form(transition: Array | WY, signs: Array | None, dtype: jnp.dtype) -> Transition:
    """Return the cheaper form of a transition: in low-rank form for few reflections."""
    if not isinstance(transition, WY):
        return Formed(transition.astype(dtype))
    u = transition.u.astype(dtype)
    w = product(u, transition.t.astype(dtype))
    d = jnp.ones(u.shape[0], dtype)
    if signs is not None:
        d = signs.astype(dtype)
    y = u * d.conj()[:, None]
    if 2 * u.shape[1] >= u.shape[0]:
        return Formed(jnp.diag(d) - product(w, adjoint(y)))
    return LowRank(w, y, d)


def multiply(transition: Transition, h: Array) -> Array:
    """Return Q h for each row of ``h (..., N)``."""
    if isinstance(transition, Formed):
        return product(h, transition.q.mT)
    inner = product(h, transition.y.conj())
    return h * transition.d - product(inner, transition.w.mT)


def _pull_back(transition: Transition, g: Array) -> Array:
    """Return the cotangent of h from that of Q h."""
    if isinstance(transition, Formed):
        return product(g, transition.q)
    inner = product(g, transition.w)
    return g * transition.d - product(inner, adjoint(transition.y))


def _gradient(transition: Transition, deltas: Array, before: Array) -> Transition:
    """Return the cotangent of the transition, by products over the rows of all steps at once."""
    if isinstance(transition, Formed):
        return _transposed(lambda q: multiply(q, before), transition, deltas)
    y = transition.y.conj()
    inner = product(before, y)
    of_w = _transposed(lambda w: product(inner, w.mT), transition.w, -deltas)
    of_y = _transposed(lambda y: product(before, y), y, -product(deltas, transition.w))
    of_d = _transposed(lambda d: before * d, transition.d, deltas)
    return LowRank(of_w, of_y.conj(), of_d)


def _transposed(linear: Callable[[Any], Array], like: Any, cotangent: Array) -> Any:
    """Return the cotangent of the argument of a linear function, of the type of ``like``.

    JAX's own transposition knows how arrays are divided among devices.
    """
    return jax.linear_transpose(linear, like)(cotangent)[0]


def _varying_axes(x: Array) -> frozenset[str]:
    """Return the mesh axes over which an array varies. Versions of JAX name them differently."""
    kind = jax.typeof(x)
    if hasattr(kind, "vma"):
        return kind.vma
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return frozenset()


def _vary_alike(tree: Any) -> Any:
    """Return arrays that vary over the same mesh axes, inside of ``jax.shard_map``.

    A cotangent must vary as its array does, and a scan's carry as what is added to it.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset().union(*map(_varying_axes, leaves))
    alike = []
    for leaf in leaves:
        missing = axes - _varying_axes(leaf)
        if missing:
            leaf = lax.pcast(leaf, tuple(missing), to="varying")
        alike.append(leaf)
    return jax.tree.unflatten(structure, alike)


def _states(
    x: Array,
    h0: Array,
    transition: Transition,
    threshold: Array | None,
    f: Nonlinearity,
    plain: bool,
    unroll: int,
) -> Array:
    """Return the states of every step."""
    if x.shape[0] == 0:
        return x
    x, h0, transition, threshold = _vary_alike((x, h0, transition, threshold))
    if plain:
        return _scan(x, h0, transition, threshold, f, unroll)[0]
    inputs = refuse(_REMEDY, (x, h0, transition, threshold))
    return _with_adjoint(f, unroll, *inputs)


def _scan(
    x: Array,
    h0: Array,
    transition: Transition,
    threshold: Array | None,
    f: Nonlinearity,
    unroll: int,
) -> tuple[Array, Any]:
    """Return the states, and what the derivative needs besides them."""

    def step(h: Array, xt: Array) -> tuple[Array, tuple[Array, Any]]:
        z = multiply(transition, h) + xt
        h = f.define(z, threshold)
        return h, (h, f.keep(z))

    return lax.scan(step, h0, x, unroll=unroll)[1]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_adjoint(f, unroll, x, h0, transition, threshold):
    return _scan(x, h0, transition, threshold, f, unroll)[0]


def _forward(f, unroll, x, h0, transition, threshold):
    states, kept = _scan(x, h0, transition, threshold, f, unroll)
    return states, (states, kept, h0, transition, threshold)


def _backward(f, unroll, saved, cotangent):
    states, kept, h0, transition, threshold = saved

    def step(g: Array, now: tuple[Array, Array, Any]) -> tuple[Array, Array]:
        above, h, kept = now
        delta = f.back(g + above, h, kept, threshold)
        return _pull_back(transition, delta), delta

    first, deltas = lax.scan(
        step, jnp.zeros_like(h0), (cotangent, states, kept), reverse=True, unroll=unroll
    )
    before = jnp.concatenate([h0[None], states[:-1]])
    of_transition = _gradient(transition, deltas, before)
    of_threshold = None
    if threshold is not None:
        direction = _direction(states)
        of_threshold = _transposed(lambda b: direction * b, threshold, deltas)
    return deltas, first, of_transition, of_threshold


_with_adjoint.defvjp(_forward, _backward)


def _direction(h: Array) -> Array:
    """Return h/|h|, and 0 for zero."""
    if not jnp.iscomplexobj(h):
        return jnp.sign(h)
    size = jnp.abs(h)
    live = size > 0
    return jnp.where(live, h / jnp.where(live, size, 1), 0)

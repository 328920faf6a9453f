"""The benchmark ``jax``: ``cwy.jax`` next to other maps in JAX, and to ``cwy.ops`` in torch.

The harness times torch functions. A function of JAX becomes one by a bridge without copies. It
blocks until its result is ready, so a time on a GPU includes one synchronization per pass. Each
pass is one jitted program. Peers run at highest precision, as ``cwy.jax`` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...api import orthogonality_error
from ..harness.entry import Case, Entry, gaussian
from . import Size, Suite
from .rnn import Lengths, draw_states, off_kinks


def baseline(size: Size, device: str) -> str:
    """Name the entry that the others are compared with."""
    names = {1: "cwy jax", 2: "tcwy jax", 3: "rollout jax"}
    return names[len(size)]


def entries(size: Size) -> list[Entry]:
    """List functions of JAX for a matrix N or N x M, or for a recurrence N x B x T."""
    if len(size) == 3:
        return _recurrences(size)
    return _matrices(size)


@cache
def _jax() -> Any:
    """Import JAX, which takes its memory as it needs it."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


class _Program:
    """Wrap a function of JAX as a function of tensors, forward and backward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        jax = _jax()
        self.value = jax.jit(function)
        self.forward = jax.jit(lambda *arrays: jax.vjp(function, *arrays))
        self.backward = jax.jit(lambda pull, cotangent: pull(cotangent))

    def __call__(self, *tensors: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Bridge.apply(self, *tensors)
        return _to_torch(self.value(*map(_to_jax, tensors)))


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, program, *tensors):
        out, ctx.pull = program.forward(*map(_to_jax, tensors))
        ctx.program = program
        return _to_torch(out)

    @staticmethod
    def backward(ctx, cotangent):
        gradients = ctx.program.backward(ctx.pull, _to_jax(cotangent))
        return None, *map(_to_torch, gradients)


def _to_jax(x: Tensor) -> Any:
    return _jax().numpy.from_dlpack(x.detach().contiguous())


def _to_torch(x: Any) -> Tensor:
    return torch.from_dlpack(x.block_until_ready())


def _why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why JAX cannot take part, None if it can."""
    if dtype != torch.float32:
        return "the bridge to JAX takes only float32"
    if device.type == "cuda" and not any(d.platform == "gpu" for d in _jax().devices()):
        return 'this JAX has no GPU: pip install "jax[cuda13]"'
    return None


def _entry(
    name: str,
    about: str,
    make: Callable[[], Callable[..., Any]],
    inputs: Callable[[torch.dtype, torch.device], tuple[Tensor, ...]],
    truth: Callable[..., Tensor],
    group: Any = "peer",
    orthogonality: Callable[[Tensor], float] | None = orthogonality_error,
) -> Entry:
    """Time a function of JAX, which ``make`` returns."""

    def case(dtype: torch.dtype, device: torch.device) -> Case:
        return Case(_Program(make()), inputs(dtype, device), truth, orthogonality)

    return Entry(name, about, case, group=group, package="jax", why_not=_why_not)


def _matrices(size: Size) -> list[Entry]:
    shape = size
    if len(size) == 1:
        shape = size * 2
    n, m = shape
    # The largest angle of a Gaussian skew matrix is then about 1.
    small = 0.5 / n**0.5

    def vectors(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return (gaussian(n, m, dtype=dtype, device=device),)

    def skew(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return (gaussian(n, m, std=small, dtype=dtype, device=device),)

    def well_conditioned(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        noise = gaussian(n, m, std=small, dtype=dtype, device=device)
        return (torch.eye(n, m, dtype=dtype, device=device) + noise,)

    kind, form = "cwy", "cwy_matrix"
    if m < n:
        kind, form = "tcwy", "tcwy_matrix"
    in_torch = getattr(ops, form)
    return [
        _floor(n, m),
        _entry(f"{kind} jax", f"cwy.jax.{form}", partial(_ours, form), vectors, in_torch, "ours"),
        Entry(
            f"{kind} torch",
            f"cwy.ops.{form}",
            lambda dtype, device: Case(
                in_torch, vectors(dtype, device), in_torch, orthogonality_error
            ),
            group="ours",
            package="cwy",
        ),
        _entry(
            "expm",
            "jax.scipy.linalg.expm of a skew matrix, its first M columns",
            partial(_expm, m),
            skew,
            lambda x: torch.matrix_exp(_skew(x))[:, :m],
        ),
        _entry(
            "cayley solve",
            "jnp.linalg.solve(I + A/2, I - A/2) of a skew matrix, its first M columns",
            partial(_cayley, m),
            skew,
            partial(_torch_cayley, m),
        ),
        _entry(
            "qr",
            "the Q of jnp.linalg.qr, of a well-conditioned matrix",
            _qr,
            well_conditioned,
            lambda x: torch.linalg.qr(x).Q,
        ),
    ]


def _floor(n: int, m: int) -> Entry:
    def make() -> Callable[..., Any]:
        return partial(_jax().numpy.matmul, precision="highest")

    def inputs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        left = gaussian(n, m, dtype=dtype, device=device)
        return left, gaussian(m, m, dtype=dtype, device=device)

    about = f"one product in JAX, {n} x {m} by {m} x {m}"
    return _entry("matmul", about, make, inputs, torch.matmul, "floor", None)


def _ours(form: str) -> Callable[..., Any]:
    _jax()
    from ... import jax as cwy_jax

    return getattr(cwy_jax, form)


def _skew(x: Tensor) -> Tensor:
    n, m = x.shape
    square = torch.nn.functional.pad(x, (0, n - m))
    return square - square.mT


def _torch_cayley(m: int, x: Tensor) -> Tensor:
    half = _skew(x) / 2
    eye = torch.eye(len(half), dtype=x.dtype, device=x.device)
    return torch.linalg.solve(eye + half, eye[:, :m] - half[:, :m])


def _jax_skew(x: Any) -> Any:
    n, m = x.shape
    square = _jax().numpy.pad(x, ((0, 0), (0, n - m)))
    return square - square.T


def _at_highest_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose products, forward and backward, have the highest precision."""
    jax = _jax()

    def call(*arrays: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*arrays)

    return call


def _expm(m: int) -> Callable[..., Any]:
    from jax.scipy.linalg import expm

    return _at_highest_precision(lambda x: expm(_jax_skew(x))[:, :m])


def _cayley(m: int) -> Callable[..., Any]:
    jnp = _jax().numpy

    def cayley(x: Any) -> Any:
        half = _jax_skew(x) / 2
        eye = jnp.eye(len(half), dtype=x.dtype)
        return jnp.linalg.solve(eye + half, eye[:, :m] - half[:, :m])

    return _at_highest_precision(cayley)


def _qr() -> Callable[..., Any]:
    return _at_highest_precision(lambda x: _jax().numpy.linalg.qr(x)[0])


def _recurrences(size: Size) -> list[Entry]:
    n, batch, steps = size

    def inputs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        x, h0, bias = draw_states(Lengths(n, None, batch, steps), "modrelu", dtype, device)
        q = ops.cwy_matrix(gaussian(n, n, dtype=dtype, device=device))
        return off_kinks("modrelu", x, h0, [q], bias), h0, q, bias

    def in_torch(x: Tensor, h0: Tensor, q: Tensor, bias: Tensor) -> Tensor:
        states, _ = ops.rollout(x, h0, q, bias)
        assert isinstance(states, Tensor)
        return states

    return [
        _entry(
            "rollout jax",
            "cwy.jax.rollout(x, h0, Q, b, 'modrelu')",
            _rollout,
            inputs,
            in_torch,
            "ours",
            None,
        ),
        Entry(
            "rollout torch",
            "cwy.ops.rollout(x, h0, Q, b, 'modrelu')",
            lambda dtype, device: Case(in_torch, inputs(dtype, device), in_torch, None),
            group="ours",
            package="cwy",
        ),
        _entry(
            "lax.scan",
            "the same recurrence as a plain jax.lax.scan, differentiated by JAX",
            _plain_scan,
            inputs,
            in_torch,
            orthogonality=None,
        ),
    ]


def _rollout() -> Callable[..., Any]:
    rollout = _ours("rollout")
    return lambda *given: rollout(*given)[0]


def _plain_scan() -> Callable[..., Any]:
    jax = _jax()
    jnp = jax.numpy

    def recurrence(x: Any, h0: Any, q: Any, bias: Any) -> Any:
        def step(h: Any, xt: Any) -> tuple[Any, Any]:
            z = h @ q.T + xt
            h = jnp.sign(z) * jax.nn.relu(jnp.abs(z) + bias)
            return h, h

        return jax.lax.scan(step, h0, x)[1]

    return _at_highest_precision(recurrence)


SUITE = Suite(entries, baseline)

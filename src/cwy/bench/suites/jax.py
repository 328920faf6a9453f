"""The benchmark ``jax``: ``cwy.jax`` next to other maps in JAX, and to ``cwy.ops`` in torch.

JAX is timed by itself. Each pass is one program, compiled before. On a GPU calls in a row are
dispatched without waiting, and the clock stops when the last result is ready. Peers run at highest
precision, as ``cwy.jax`` does. The programs of an entry compile within a budget.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...api import orthogonality_error
from ..harness.entry import Case, Entry, Skipped, gaussian
from . import Size, Suite
from .rnn import Lengths, draw_states, off_kinks

COMPILE_SECONDS = 150.0
"""What the programs of an entry may take to compile. An entry that takes longer is skipped."""
TINY = 1e-30
"""The step from one repetition to the next. It changes no input, which the compiler cannot know."""


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


class _Program(NamedTuple):
    """Hold a function of JAX, and what describes its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class _Compilation:
    """Compile programs one after another, in a thread that is left behind if it takes too long.

    XLA tries several kernels for each product, on the GPU. What it finds for one program serves
    the next one too.
    """

    def __init__(self, *programs: _Program) -> None:
        self._programs = programs
        self._compiled: list[Any] = []
        self._error: Exception | None = None
        # Not a daemon: the process must not end during a compilation, which cannot be stopped.
        self._thread = threading.Thread(target=self._compile)
        self._thread.start()

    def _compile(self) -> None:
        try:
            for program in self._programs:
                lowered = _jax().jit(program.function).lower(*program.arguments)
                self._compiled.append(lowered.compile())
        except Exception as error:
            self._error = error

    def results(self) -> list[Any]:
        """Wait for the compiled programs."""
        self._thread.join(COMPILE_SECONDS)
        if self._thread.is_alive():
            raise Skipped(f"compiling it took more than {COMPILE_SECONDS:g} s")
        if self._error is not None:
            raise self._error
        return self._compiled


@dataclass(frozen=True)
class _Shape:
    """Hold the shapes of a case, and how often one program repeats both passes."""

    inputs: tuple[Size, ...]
    result: Size
    repetitions: int


class _Programs:
    """Hold the compiled passes of a function of JAX, for inputs of given shapes.

    Attributes:
        forward, both: the passes.
        repeated: a program that repeats both passes, or None.
        repetitions: how often it does.
    """

    def __init__(self, function: Callable[..., Any], shape: _Shape, place: Any) -> None:
        self._function = function
        self.repetitions = shape.repetitions
        inputs = tuple(_described(one, place) for one in shape.inputs)
        result = _described(shape.result, place)
        programs = [_Program(function, inputs), _Program(self._both, (result, *inputs))]
        if shape.repetitions:
            programs.append(_Program(self._repeated, (result, *inputs)))
        self.forward, self.both, *repeated = _Compilation(*programs).results()
        self.repeated = next(iter(repeated), None)

    def _both(self, cotangent: Any, *inputs: Any) -> Any:
        return _jax().vjp(self._function, *inputs)[1](cotangent)

    def _repeated(self, cotangent: Any, *inputs: Any) -> Any:
        lax = _jax().lax

        def once(_: Any, inputs: Any) -> Any:
            # The barrier keeps the whole gradient from being simplified away.
            gradients = lax.optimization_barrier(self._both(cotangent, *inputs))
            return tuple(x + TINY * g for x, g in zip(inputs, gradients, strict=True))

        return lax.fori_loop(0, self.repetitions, once, inputs)


class _Passes:
    """Hold the compiled passes of a case, as the harness times them."""

    def __init__(self, programs: _Programs, inputs: tuple[Tensor, ...]) -> None:
        self._forward = programs.forward
        self._both = programs.both
        self.repetitions = programs.repetitions
        self._repeated = programs.repeated
        self._inputs = tuple(map(_to_jax, inputs))
        self._cotangent: Any = None
        used = self._both.memory_analysis()
        self.memory = used.temp_size_in_bytes + used.output_size_in_bytes

    def receive(self, cotangent: Tensor) -> None:
        self._cotangent = _to_jax(cotangent)

    def forward(self) -> Any:
        return self._forward(*self._inputs)

    def both(self) -> Any:
        return self._both(self._cotangent, *self._inputs)

    def repeated(self) -> Any:
        assert self._repeated is not None
        return self._repeated(self._cotangent, *self._inputs)

    def wait(self, result: Any) -> Any:
        return _jax().block_until_ready(result)

    def tensors(self, result: Any) -> tuple[Tensor, ...]:
        arrays = _jax().tree.leaves(self.wait(result))
        return tuple(map(torch.from_dlpack, arrays))


def _described(shape: Size, place: Any) -> Any:
    """Describe an array of float32 on a device."""
    jax = _jax()
    sharding = jax.sharding.SingleDeviceSharding(place)
    return jax.ShapeDtypeStruct(shape, jax.numpy.float32, sharding=sharding)


def _place(device: torch.device) -> Any:
    """Return the device of JAX that is a device of torch."""
    kind = "cpu"
    if device.type == "cuda":
        kind = "gpu"
    return _jax().devices(kind)[device.index or 0]


def _to_jax(x: Tensor) -> Any:
    return _jax().numpy.from_dlpack(x.detach().contiguous())


def _why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why JAX cannot take part, None if it can."""
    if dtype != torch.float32:
        return "the benchmark of JAX takes only float32"
    if device.type == "cuda" and not any(d.platform == "gpu" for d in _jax().devices()):
        return 'this JAX has no GPU: pip install "jax[cuda13]"'
    return None


def _entry(
    name: str,
    about: str,
    make: Callable[[], Callable[..., Any]],
    shape: _Shape,
    inputs: Callable[[torch.dtype, torch.device], tuple[Tensor, ...]],
    truth: Callable[..., Tensor],
    group: Any = "peer",
    orthogonality: Callable[[Tensor], float] | None = orthogonality_error,
) -> Entry:
    """Time a function of JAX, which ``make`` returns."""

    def case(dtype: torch.dtype, device: torch.device) -> Case:
        kept = shape
        if device.type != "cuda":
            # On a CPU a call takes no time to begin.
            kept = replace(shape, repetitions=0)
        programs = _Programs(make(), kept, _place(device))
        given = inputs(dtype, device)
        return Case(truth, given, truth, orthogonality, foreign=_Passes(programs, given))

    return Entry(name, about, case, group=group, package="jax", why_not=_why_not)


def _matrices(size: Size) -> list[Entry]:
    n = size[0]
    m = size[-1]
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
    shape = _Shape(((n, m),), (n, m), _repetitions(n))
    return [
        _floor(n, m),
        _entry(
            f"{kind} jax",
            f"cwy.jax.{form}",
            partial(_ours, form),
            shape,
            vectors,
            in_torch,
            "ours",
        ),
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
            shape,
            skew,
            lambda x: torch.matrix_exp(_skew(x))[:, :m],
        ),
        _entry(
            "cayley solve",
            "jnp.linalg.solve(I + A/2, I - A/2) of a skew matrix, its first M columns",
            partial(_cayley, m),
            shape,
            skew,
            partial(_torch_cayley, m),
        ),
        _entry(
            "qr",
            "the Q of jnp.linalg.qr, of a well-conditioned matrix",
            _qr,
            shape,
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
    shape = _Shape(((n, m), (m, m)), (n, m), _repetitions(n))
    return _entry("matmul", about, make, shape, inputs, torch.matmul, "floor", None)


def _repetitions(n: int) -> int:
    """Return how often one program repeats both passes, so that it ends within seconds."""
    if n <= 1024:
        return 10
    return 3


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

    states = (steps, batch, n)
    # A recurrence repeats its steps already.
    shape = _Shape((states, (batch, n), (n, n), (n,)), states, 0)
    return [
        _entry(
            "rollout jax",
            "cwy.jax.rollout(x, h0, Q, b, 'modrelu')",
            _rollout,
            shape,
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
            shape,
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

"""The benchmark ``rnn``: T steps of a recurrence of N units for a batch of B.

The timed call is the op :func:`~cwy.ops.rollout` over mapped inputs ``x (T, B, N)``. It has
gradients of x, of the transition (Q, or the factors u and t of L reflections) and of the bias.

The gate compares with float64, and at a kink of a nonlinearity float32 may round to the other side.
One such sign changes the gradient of every step before it. So the inputs are moved before the
timing, until no z is within ``MARGIN`` of a kink. The tolerance stays that of every benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from ... import init, ops
from ...ops import dispatch
from ...ops._linalg import double
from ...ops._precision import CUDNN_RNN
from ...ops.recurrence.factors import factors_are_cheaper
from ...ops.recurrence.nonlinearities import NONLINEARITIES
from ...ops.recurrence.spec import Request
from ..harness.entry import Case, Entry, gaussian
from . import Size, Suite

MARGIN = 0.01
"""The least distance of z from a kink."""
FEATURES = 8
"""Inputs of the entries that show memory. x and its gradient, which every mode holds, are small."""
REFLECTIONS = 4000
"""The most reflections that are multiplied one at a time."""
LONG = 2000
"""Steps from which the float64 truth is the op, not autograd's loop, which keeps more states."""
SMOOTH = ("tanh", "identity")
"""Nonlinearities without a kink."""
REDUCED = ("tf32", "float16", "bfloat16")
"""Precisions of the GPU's own networks apart from full float32."""
MODES = ("store", "checkpoint", "reversible")
"""How the memory of a rollout is used."""


@dataclass(frozen=True)
class Lengths:
    """Hold the numbers of a size.

    Attributes:
        units: N.
        reflections: L, None where Q is given whole.
        batch: B.
        steps: T.
    """

    units: int
    reflections: int | None
    batch: int
    steps: int


def lengths(size: Size) -> Lengths:
    """Read a size of the form NxBxT or NxLxBxT."""
    if len(size) == 3:
        n, batch, steps = size
        return Lengths(n, None, batch, steps)
    n, count, batch, steps = size
    return Lengths(n, count, batch, steps)


def baseline(size: Size, device: str) -> str:
    """Name the entry that the others are compared with."""
    if device == "cuda":
        return "cuda"
    return "torch"


def entries(size: Size) -> list[Entry]:
    """List every backend, memory mode and loop of each nonlinearity, and torch's own networks."""
    found = [_products(size)]
    for f in NONLINEARITIES:
        found += [_backend(size, backend, f) for backend in rollout_backends()]
        found += _modes(size, f)
        found += [_eager(size, f), _eager(size, f, indexed=True), one_at_a_time(size, f)]
    for name in ("RNN", "GRU", "LSTM"):
        found.append(_fused(size, name))
        found += [_reduced(size, name, precision) for precision in REDUCED]
    return found


def rollout_backends() -> Sequence[dispatch.Backend]:
    """Return every backend of the recurrence."""
    return dispatch.backends("rollout")["rollout"]


def rollout(x: Tensor, h0: Tensor, transition, bias: Tensor | None, f: str, backend: str) -> Tensor:
    """Run a recurrence, and return all states."""
    states, _ = ops.rollout(x, h0, transition, bias, f, backend=backend)
    assert isinstance(states, Tensor)
    return states


def step(f: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return ``(z, b) -> h``: a nonlinearity with its bias, which is added or a threshold."""
    define = NONLINEARITIES[f].define
    if NONLINEARITIES[f].threshold:
        return define
    return lambda z, b: define(z + b, None)


def _backend(size: Size, backend: dispatch.Backend, f: str) -> Entry:
    given = lengths(size)
    truth = "reference"
    if given.steps > LONG:
        truth = "torch"

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        inner = torch.promote_types(dtype, torch.float32)
        factors = given.reflections
        if factors is not None:
            numbers = given.batch * given.steps
            if not factors_are_cheaper(given.units, factors, numbers, device.type, inner):
                factors = None
        request = Request(given.units, given.batch, given.steps, inner, device.type, f, factors)
        return backend.why_not(request)

    def call(h0: Tensor, served: str, x: Tensor, *rest: Tensor) -> Tensor:
        *q, b = rest
        transition = q[0]
        if given.reflections is not None:
            transition = ops.WY(*q)
        return rollout(x, h0, transition, b, f, served)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        inputs, h0 = _problem(size, f, dtype, device, torch.initial_seed())
        timed = partial(call, h0, backend.name)
        return Case(timed, inputs, partial(call, double(h0), truth), None)

    form = "Q"
    if given.reflections is not None:
        form = "factors u, t"
    return Entry(
        f"{backend.name}, {f}",
        f"ops.rollout(x, h0, {form}, b, {f!r}, backend={backend.name!r})",
        make,
        group="ours",
        package="cwy",
        nonlinearity=f,
        why_not=why_not,
    )


def _modes(size: Size, f: str) -> list[Entry]:
    """List the memory modes where only the last state is wanted, if f has all of them."""
    given = lengths(size)
    if given.reflections is not None or NONLINEARITIES[f].irreversible is not None:
        return []
    about = f"ops.rollout of {FEATURES} input features, map included, output='last', {f!r}"
    return [
        Entry(
            f"{f}, last, {mode}",
            f"{about}, memory={mode!r}",
            partial(_mode_case, given, f, mode),
            group="ours",
            package="cwy",
            nonlinearity=f,
        )
        for mode in MODES
    ]


def _mode_case(given: Lengths, f: str, mode: str, dtype: torch.dtype, device: torch.device) -> Case:
    n = given.units
    like = {"dtype": dtype, "device": device}

    def run(h0: Tensor, memory: str, x: Tensor, weight: Tensor, q: Tensor, b: Tensor) -> Tensor:
        if memory == "store":
            # As in OrthogonalRNN: the input map is one product over all steps.
            mapped = nn.functional.linear(x, weight)
            return ops.rollout(mapped, h0, q, b, f, output="last")[1]
        return ops.rollout(x, h0, q, b, f, weight=weight, output="last", memory=memory)[1]

    # A permutation with signs, and inputs too small in sum to reach a kink: few features cannot
    # move x off it.
    order = torch.randperm(n, device=device)
    signs = torch.randint(0, 2, (n, 1), device=device) * 2 - 1
    q = (torch.eye(n, device=device)[order] * signs).to(dtype)
    h0 = 1 + torch.rand(given.batch, n, **like)
    x = gaussian(given.steps, given.batch, FEATURES, **like)
    weight = gaussian(n, FEATURES, std=0.05 * (FEATURES * given.steps) ** -0.5, **like)
    bias = gaussian(n, std=0.05 / given.steps, **like)
    truth = partial(run, double(h0), "store")
    return Case(partial(run, h0, mode), (x, weight, q, bias), truth, None)


def _eager(size: Size, f: str, indexed: bool = False) -> Entry:
    """Time a loop and autograd.

    ``indexed`` reads x[t], as loops are mostly written. Its gradient is as large as x at each step.
    """
    activate = step(f)

    def call(h: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
        *q, b = rest
        times = _times(q)
        inputs: Iterable[Tensor] = x
        if indexed:
            inputs = (x[t] for t in range(x.shape[0]))
        states = []
        for xt in inputs:
            h = activate(times(h) + xt, b)
            states.append(h)
        return torch.stack(states)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        inputs, h0 = _problem(size, f, dtype, device, torch.initial_seed())
        return Case(partial(call, h0), inputs, partial(call, double(h0)), None)

    name = "eager loop"
    over = "for xt in x:"
    if indexed:
        name = "eager loop of x[t]"
        over = "for t in range(T): xt = x[t];"
    about = f"{over} h = {f}(h @ Q.mT + xt + b), stacked, with autograd"
    if lengths(size).reflections is not None:
        about += ", Q h as h - (h @ u) @ (u @ t).mT"
    return Entry(f"{name}, {f}", about, make, nonlinearity=f)


def _products(size: Size) -> Entry:
    given = lengths(size)

    def call(h: Tensor, d: Tensor, q: Tensor) -> Tensor:
        states = [h]
        deltas = [d]
        for _ in range(given.steps - 1):
            states.append(states[-1] @ q.mT)
            deltas.append(deltas[-1] @ q)
        return torch.cat(deltas).mT @ torch.cat(states)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        q = _haar(given.units, dtype, device)
        h = gaussian(given.batch, given.units, dtype=dtype, device=device)
        d = gaussian(given.batch, given.units, dtype=dtype, device=device)
        return Case(call, (h, d, q), call, None)

    about = (
        "the products with a formed Q that forward and backward need, alone: T each way, and one "
        "for the gradient of Q"
    )
    return Entry("products", about, make, group="floor", differentiable=False)


def one_at_a_time(size: Size, f: str) -> Entry:
    """Time HR: every step multiplies by one reflection after another."""
    given = lengths(size)
    count = given.reflections or given.units
    activate = step(f)

    def call(h: Tensor, x: Tensor, v: Tensor, b: Tensor) -> Tensor:
        states = []
        for xt in x:
            z = ops.cwy_multiply(v, h, backend="reference") + xt
            h = activate(z, b)
            states.append(h)
        return torch.stack(states)

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        total = count * given.steps
        if total <= REFLECTIONS:
            return None
        return f"{total:,} reflections, one after another, are above the {REFLECTIONS:,} tried"

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        v = gaussian(given.units, count, dtype=dtype, device=device)
        x, h0, b = draw_states(given, f, dtype, device)
        x = off_kinks(f, x, h0, [ops.cwy_matrix(double(v))], b)
        return Case(partial(call, h0), (x, v, b), partial(call, double(h0)), None)

    return Entry(
        f"HR, {f}",
        f"each step: ops.cwy_multiply(v, h, backend='reference'), + x[t] and {f}, with autograd",
        make,
        group="ours",
        method="hr",
        package="cwy",
        nonlinearity=f,
        why_not=why_not,
    )


_FUSED: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "RNN": torch.rnn_relu,
    "GRU": torch.gru,
    "LSTM": torch.lstm,
}


def _fused(size: Size, kind: str) -> Entry:
    """Time a recurrent network of torch."""
    n = lengths(size).units
    relu = ", relu" * (kind == "RNN")
    about = f"torch.nn.{kind}({n}, {n}), free weights{relu}. Its input map, N x N, is timed too"
    make = partial(_fused_case, lengths(size), kind)
    return Entry(f"nn.{kind}", about, make, within=lambda: CUDNN_RNN)


def _reduced(size: Size, kind: str, precision: str) -> Entry:
    """Time the same in reduced precision, on a GPU, where its vendor's kernels run."""
    full = _fused(size, kind)
    half = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(precision)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        return full.make(half or dtype, device)

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        if (device.type, dtype) == ("cuda", torch.float32):
            return None
        return "only on a GPU, next to float32"

    allowed = precision == "tf32"
    return replace(
        full,
        name=f"{full.name}, {precision}",
        about=f"{full.about}, in {precision}",
        make=make,
        why_not=why_not,
        gate=torch.bfloat16,
        within=partial(torch.backends.cudnn.flags, enabled=True, allow_tf32=allowed),
    )


def _fused_case(given: Lengths, kind: str, dtype: torch.dtype, device: torch.device) -> Case:
    n = given.units
    options = {}
    if kind == "RNN":
        options["nonlinearity"] = "relu"
    module = getattr(nn, kind)(n, n, **options, dtype=dtype, device=device)
    x, h0, _ = draw_states(given, "relu", dtype, device)
    if kind == "RNN":
        with torch.no_grad():
            # The product with the map stays. As the identity it leaves x where it was moved to.
            module.weight_ih_l0.copy_(torch.eye(n, dtype=dtype, device=device))
            module.weight_hh_l0.copy_(init.haar(n, device=device))
            bias = module.bias_ih_l0 + module.bias_hh_l0
            x = off_kinks("relu", x, h0, [module.weight_hh_l0], bias)
    # Detached, the weights still lie in the one piece of memory that cuDNN wants.
    weights = [weight.detach() for weight in module.all_weights[0]]

    def call(h0: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        first = h0[None]
        if kind == "LSTM":
            first = (first, torch.zeros_like(first))
        return _FUSED[kind](x, first, list(weights), True, 1, 0.0, True, False, False)[0]

    return Case(partial(call, h0), (x, *weights), partial(call, double(h0)), None)


@lru_cache(maxsize=4)
def _problem(
    size: Size, f: str, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return ``(x, Q, b)`` or ``(x, u, t, b)``, and h0.

    All entries that compute the same share it, because x may be large.
    """
    given = lengths(size)
    if given.reflections is None:
        q = [_haar(given.units, dtype, device)]
    else:
        v = gaussian(given.units, given.reflections, dtype=dtype, device=device)
        q = [factor.to(dtype) for factor in ops.wy_factors(v.float())]
    x, h0, b = draw_states(given, f, dtype, device)
    return (off_kinks(f, x, h0, q, b), *q, b), h0


def _haar(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return init.haar(n, dtype=wide, device=device).to(dtype)


def draw_states(
    given: Lengths, f: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x, h0 and b so that states neither vanish nor grow.

    A nonlinearity that keeps the norm adds up its inputs, so these are small. One that damps
    forgets them.
    """
    like = {"dtype": dtype, "device": device}
    std = 1.0
    if f in ("abs", "identity"):
        std = given.steps**-0.5
    if f == "modrelu":
        b = -0.1 * torch.rand(given.units, **like)
    else:
        b = gaussian(given.units, std=0.1 * std, **like)
    x = gaussian(given.steps, given.batch, given.units, std=std, **like)
    h0 = gaussian(given.batch, given.units, **like)
    return x, h0, b


def off_kinks(f: str, x: Tensor, h0: Tensor, q: list[Tensor], b: Tensor) -> Tensor:
    """Change x where z would come within the margin of a kink: 0, for modReLU -b."""
    if f in SMOOTH:
        return x
    threshold = NONLINEARITIES[f].threshold
    activate = step(f)
    times = _times([double(part) for part in q])
    h = double(h0)
    b = double(b)
    added = b
    edge = torch.zeros_like(b)
    if threshold:
        added = torch.zeros_like(b)
        edge = -b.clamp(max=0)
    for xt in x:
        # In the dtype under test, so that what is rounded is what follows.
        product = times(h)
        rest = product + added
        z = rest + xt.double()
        away = torch.where(z < 0, -1, 1) * (edge + 2 * MARGIN) - rest
        xt.copy_(torch.where((z.abs() - edge).abs() < MARGIN, away, xt.double()))
        h = activate(product + xt.double(), b)
    return x


def _times(q: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the product of each row with Q, given whole or by its factors u and t."""
    if len(q) == 1:
        return lambda h: h @ q[0].mT
    u, t = q
    w = u @ t
    return lambda h: h - (h @ u) @ w.mT


SUITE = Suite(entries, baseline)

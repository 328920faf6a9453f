"""The benchmark ``rnn``: T steps of a recurrence of N units for a batch of B, from Q or from L reflections.

On the clock is the op :func:`~cwy.ops.rollout` over inputs that are mapped already, ``x (T, B, N)``; x, the transition (Q, or
the factors u and t) and the bias are differentiated.

The gate compares with float64, and at a kink of a nonlinearity float32 may round to the other side: one such sign changes
the gradient of every step before it. So the inputs are moved, off the clock, until no z is within ``MARGIN`` of a kink;
the tolerance stays that of every benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from .. import init, ops
from ..ops import dispatch
from ..ops.precision import CUDNN_RNN
from ..ops.recurrence.functions import Request, factors_are_cheaper
from ..ops.recurrence.nonlinearities import NONLINEARITIES
from ..testing import double
from .entry import Case, Entry, gaussian
from .sizes import Size

MARGIN = 0.01
FEATURES = 8
"""Inputs of the entries that show memory: x and its gradient, which every mode holds, are small beside N states a step."""
REFLECTIONS = 4000
"""The most that are multiplied one at a time."""
LONG = 2000
"""Steps from which the float64 truth is the op by hand, not autograd's loop, which would keep several copies of all states."""
SMOOTH = ("tanh", "identity")
REDUCED = ("tf32", "float16", "bfloat16")
"""Precisions of the GPU's own networks beside full float32."""


def baseline(size: Size, device: str) -> str:
    return "cuda" if device == "cuda" else "torch"


def entries(size: Size) -> list[Entry]:
    """For each nonlinearity every backend, the memory modes, an eager loop and HR, one reflection at a time; torch's RNNs."""
    n, *count, batch, steps = size
    found = [_products(n, batch, steps)]
    for f in NONLINEARITIES:
        found += [_backend(size, backend, f) for backend in dispatch.backends("rollout")["rollout"]]
        if not count:
            found += _modes(n, batch, steps, f)
        found += [_eager(size, f), _eager(size, f, indexed=True), one_at_a_time(size, f)]
    fused = [_fused(n, batch, steps, name, how) for name in ("RNN", "GRU", "LSTM") for how in (None, *REDUCED)]
    return [*found, *fused]


def _backend(size: Size, backend: dispatch.Backend, f: str) -> Entry:
    n, *count, batch, steps = size
    truth = "torch" if steps > LONG else "reference"

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        inner = dtype if dtype.itemsize > 2 else torch.float32
        cheaper = count and factors_are_cheaper(n, count[0], batch * steps, device.type, inner)
        factors = count[0] if cheaper else None
        return backend.why_not(Request(n, batch, steps, inner, device.type, f, factors))

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        inputs, h0 = _problem(size, f, dtype, device, torch.initial_seed())

        def call(h0: Tensor, served: str, x: Tensor, *rest: Tensor) -> Tensor:
            *q, b = rest
            states, _ = ops.rollout(x, h0, ops.WY(*q) if count else q[0], b, f, backend=served)
            assert isinstance(states, Tensor)
            return states

        return Case(partial(call, h0, backend.name), inputs, partial(call, double(h0), truth), None)

    form = "factors u, t" if count else "Q"
    about = f"ops.rollout(x, h0, {form}, b, {f!r}, backend={backend.name!r})"
    return Entry(f"{backend.name}, {f}", about, make, group="ours", package="cwy", nonlinearity=f, why_not=why_not)


def _modes(n: int, batch: int, steps: int, f: str) -> list[Entry]:
    """What each memory mode takes where only the last state is wanted, for the nonlinearities that have all of them."""
    if NONLINEARITIES[f].irreversible is not None:
        return []

    def run(h0: Tensor, memory: str, x: Tensor, weight: Tensor, q: Tensor, b: Tensor) -> Tensor:
        if memory == "store":
            # As in OrthogonalRNN: the input map is one product over all steps.
            return ops.rollout(nn.functional.linear(x, weight), h0, q, b, f, output="last")[1]
        return ops.rollout(x, h0, q, b, f, weight=weight, output="last", memory=memory)[1]

    def make(memory: str, dtype: torch.dtype, device: torch.device) -> Case:
        like = {"dtype": dtype, "device": device}
        # A permutation with signs, and inputs too small in sum to reach a kink: with few features x can't be moved off it.
        order, signs = torch.randperm(n, device=device), torch.randint(0, 2, (n, 1), device=device) * 2 - 1
        q = (torch.eye(n, device=device)[order] * signs).to(dtype)
        h0 = 1 + torch.rand(batch, n, **like)
        inputs = (
            gaussian(steps, batch, FEATURES, **like),
            gaussian(n, FEATURES, std=0.05 * (FEATURES * steps) ** -0.5, **like),
            q,
            gaussian(n, std=0.05 / steps, **like),
        )
        return Case(partial(run, h0, memory), inputs, partial(run, double(h0), "store"), None)

    about = f"ops.rollout of {FEATURES} input features, map included, output='last', {f!r}, memory={{!r}}"
    return [
        Entry(f"{f}, last, {mode}", about.format(mode), partial(make, mode), group="ours", package="cwy", nonlinearity=f)
        for mode in ("store", "checkpoint", "reversible")
    ]


def _eager(size: Size, f: str, indexed: bool = False) -> Entry:
    """A loop and autograd; of x[t], as loops are mostly written, the gradient is as large as x at each step."""
    define, threshold = NONLINEARITIES[f].define, NONLINEARITIES[f].threshold

    def call(h: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
        *q, b = rest
        times, states = _times(q), []
        for xt in (x[t] for t in range(x.shape[0])) if indexed else x:
            z = times(h) + xt
            h = define(z, b) if threshold else define(z + b, None)
            states.append(h)
        return torch.stack(states)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        inputs, h0 = _problem(size, f, dtype, device, torch.initial_seed())
        return Case(partial(call, h0), inputs, partial(call, double(h0)), None)

    over = "for t in range(T): xt = x[t];" if indexed else "for xt in x:"
    about = f"{over} h = {f}(h @ Q.mT + xt + b), stacked; autograd" + ", Q h as h - (h @ u) @ (u @ t).mT" * (len(size) > 3)
    return Entry(f"eager loop{' of x[t]' if indexed else ''}, {f}", about, make, nonlinearity=f)


def _products(n: int, batch: int, steps: int) -> Entry:
    def call(h: Tensor, d: Tensor, q: Tensor) -> Tensor:
        states, deltas = [h], [d]
        for _ in range(steps - 1):
            states.append(states[-1] @ q.mT)
            deltas.append(deltas[-1] @ q)
        return torch.cat(deltas).mT @ torch.cat(states)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        like = {"dtype": dtype, "device": device}
        q = init.haar(n, dtype=torch.promote_types(dtype, torch.float32), device=device).to(dtype)
        return Case(call, (gaussian(batch, n, **like), gaussian(batch, n, **like), q), call, None)

    about = "the products with a formed Q that forward and backward need, alone: T each way, and one for the gradient of Q"
    return Entry("products", about, make, group="floor", differentiable=False)


def one_at_a_time(size: Size, f: str) -> Entry:
    n, *given, batch, steps = size
    count = given[0] if given else n
    define, threshold = NONLINEARITIES[f].define, NONLINEARITIES[f].threshold

    def call(h: Tensor, x: Tensor, v: Tensor, b: Tensor) -> Tensor:
        states = []
        for xt in x:
            z = ops.cwy_multiply(v, h, backend="reference") + xt
            h = define(z, b) if threshold else define(z + b, None)
            states.append(h)
        return torch.stack(states)

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        if count * steps <= REFLECTIONS:
            return None
        return f"{count * steps:,} reflections, one after another, are above the {REFLECTIONS:,} tried"

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        v = gaussian(n, count, dtype=dtype, device=device)
        x, h0, b = draw_states(n, batch, steps, f, dtype, device)
        x = off_kinks(f, x, h0, [ops.cwy_matrix(double(v))], b)
        return Case(partial(call, h0), (x, v, b), partial(call, double(h0)), None)

    about = f"each step: ops.cwy_multiply(v, h, backend='reference'), then + x[t] and {f}; autograd"
    return Entry(f"HR, {f}", about, make, group="ours", method="hr", package="cwy", nonlinearity=f, why_not=why_not)


def _fused(n: int, batch: int, steps: int, kind: str, reduced: str | None = None) -> Entry:
    """A recurrent network of torch; on a GPU, where its vendor's kernels run, also in reduced precision."""
    half = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(reduced or "")

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        return "only on a GPU, beside float32" if reduced and (device.type, dtype) != ("cuda", torch.float32) else None

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        like = {"dtype": half or dtype, "device": device}
        module = getattr(nn, kind)(n, n, **({"nonlinearity": "relu"} if kind == "RNN" else {}), **like)
        x, h0, _ = draw_states(n, batch, steps, "relu", **like)
        with torch.no_grad():
            if kind == "RNN":
                # The map is still multiplied by; as the identity it leaves x where it was moved to.
                module.weight_ih_l0.copy_(torch.eye(n, **like))
                module.weight_hh_l0.copy_(init.haar(n, device=device))
                x = off_kinks("relu", x, h0, [module.weight_hh_l0], module.bias_ih_l0 + module.bias_hh_l0)
        run: Callable[..., tuple[Tensor, ...]] = {"RNN": torch.rnn_relu, "GRU": torch.gru, "LSTM": torch.lstm}[kind]
        # Detached, the weights still lie in the one piece of memory that cuDNN wants.
        weights = [weight.detach() for weight in module.all_weights[0]]

        def call(h0: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
            h = h0[None]
            first = (h, torch.zeros_like(h)) if kind == "LSTM" else h
            return run(x, first, list(weights), True, 1, 0.0, True, False, False)[0]

        return Case(partial(call, h0), (x, *weights), partial(call, double(h0)), None)

    about = f"torch.nn.{kind}({n}, {n}), free weights{', relu' * (kind == 'RNN')}; its input map, N x N, is on the clock too"
    name = f"nn.{kind}" + (f", {reduced}" if reduced else "")
    about += f"; in {reduced}" if reduced else ""
    if reduced:
        tf32 = partial(torch.backends.cudnn.flags, enabled=True, allow_tf32=reduced == "tf32")
        return Entry(name, about, make, why_not=why_not, gate=torch.bfloat16, within=tf32)
    return Entry(name, about, make, within=lambda: CUDNN_RNN)


@lru_cache(maxsize=4)
def _problem(size: Size, f: str, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """``(x, Q, b)`` or ``(x, u, t, b)``, and h0; shared by all entries that compute the same, for x may be large."""
    n, *count, batch, steps = size
    if count:
        q = [factor.to(dtype) for factor in ops.wy_factors(gaussian(n, count[0], dtype=dtype, device=device).float())]
    else:
        q = [init.haar(n, dtype=torch.promote_types(dtype, torch.float32), device=device).to(dtype)]
    x, h0, b = draw_states(n, batch, steps, f, dtype, device)
    return (off_kinks(f, x, h0, q, b), *q, b), h0


def draw_states(
    n: int, batch: int, steps: int, f: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x, h0 and b, so that states neither vanish nor grow: what keeps the norm adds up its inputs, what damps forgets them."""
    like = {"dtype": dtype, "device": device}
    std = steps**-0.5 if f in ("abs", "identity") else 1.0
    b = -0.1 * torch.rand(n, **like) if f == "modrelu" else gaussian(n, std=0.1 * std, **like)
    return gaussian(steps, batch, n, std=std, **like), gaussian(batch, n, **like), b


def off_kinks(f: str, x: Tensor, h0: Tensor, q: list[Tensor], b: Tensor) -> Tensor:
    """x, changed where z would come within the margin of a kink: 0, for modReLU -b."""
    if f in SMOOTH:
        return x
    define, threshold = NONLINEARITIES[f].define, NONLINEARITIES[f].threshold
    times, h, b = _times([double(part) for part in q]), double(h0), double(b)
    edge = -b.clamp(max=0) if threshold else torch.zeros_like(b)
    for xt in x:
        # In the dtype under test, so that what is rounded is what follows.
        rest = times(h) if threshold else times(h) + b
        z = rest + xt.double()
        away = torch.where(z < 0, -1, 1) * (edge + 2 * MARGIN) - rest
        xt.copy_(torch.where((z.abs() - edge).abs() < MARGIN, away, xt.double()))
        h = define(rest + xt.double(), b if threshold else None)
    return x


def _times(q: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Multiplies each row by Q, given whole or by its factors u and t."""
    if len(q) == 1:
        return lambda h: h @ q[0].mT
    u, w = q[0], q[0] @ q[1]
    return lambda h: h - (h @ u) @ w.mT

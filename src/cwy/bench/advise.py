"""``cwy bench advise``: which method, how many reflections and which backend are fastest here, for one size.

Without steps, N x N weights are multiplied by a batch of B vectors; with T steps, they are the transition of a recurrence. On
the clock is all that a training step computes anew: the weight from its free parameters, and what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import init, ops
from ..ops import dispatch
from ..ops.recurrence.functions import Request
from ..parametrizations import HR, OrthogonalMap
from ..parametrizations.reflections import ReflectionMap
from ..registry import Method
from ..testing import double
from .entry import Case, Entry, gaussian
from .multiply import norm_error
from .ours import case, multiplies_unformed, serving, takes
from .rnn import draw_states, off_kinks
from .sizes import Size

KEPT = 2**28
"""Numbers that forming Q one reflection at a time may keep for its gradient, an N x N matrix each: more take too long."""


@dataclass(frozen=True)
class Candidate:
    """A way to use a method: with L reflections or all, by ``how`` it is multiplied, and the backend of the recurrence."""

    method: Method
    reflections: int | None
    how: str
    backend: str = ""

    @property
    def name(self) -> str:
        count = f" L={self.reflections}" if self.reflections else ""
        return ", ".join(part for part in (f"{self.method.name}{count}", self.how, self.backend) if part)

    @property
    def options(self) -> dict[str, int]:
        return {"reflections": self.reflections} if self.reflections else {}

    def code(self, size: Size, nonlinearity: str, dtype: torch.dtype, device: torch.device) -> str:
        """How a user asks for it."""
        n, _, *steps = size
        count = "".join(f", {key}={value}" for key, value in self.options.items())
        given = f"method={self.method.name!r}{count}"
        like = f", dtype={dtype}" * (dtype != torch.float32) + f", device={str(device)!r}" * (device.type != "cpu")
        if self.how == "unformed":
            chart = f"chart = cwy.METHODS[{self.method.name!r}].build({n}{count}{like})"
            return f"{chart}\nfree = torch.nn.Parameter(chart.sample())\ny = chart.multiply(free, x)"
        if not steps:
            return f"cwy.orthogonal(torch.nn.Linear({n}, {n}{like}), {given})"
        return f"cwy.nn.OrthogonalRNN(inputs, {n}, nonlinearity={nonlinearity!r}, {given}, backend={self.backend!r}{like})"

    def served(self, size: Size, dtype: torch.dtype, device: torch.device) -> str:
        """The backend of the op ``wy`` that multiplies its reflections; empty for a method that has none."""
        if not issubclass(self.method.build, ReflectionMap):
            return ""
        # Half precision is computed in float32.
        v = torch.empty(size[0], self.reflections or size[0], dtype=torch.promote_types(dtype, torch.float32), device=device)
        module = dispatch.choose("wy", "reference" if issubclass(self.method.build, HR) else "auto", v)
        return next(backend.name for backend in dispatch.backends("wy")["wy"] if backend.module is module)


def candidates(size: Size, reflections: Sequence[int]) -> list[Candidate]:
    """Every real square method, with all reflections and with fewer, by each way to use it; HR only while it keeps little."""
    n, _, *steps = size
    found = []
    for method in serving(n, n).values():
        if not method.real or method.name == "tcwy":
            continue
        counts = [None, *(count for count in reflections if count < n)] if takes(method, "reflections") else [None]
        for count in counts:
            formed = ["Q formed"] if method.name != "hr" or n * n * (count or n) <= KEPT else []
            if not steps:
                ways = [*formed, *(["unformed"] if multiplies_unformed(method) else [])]
                found += [Candidate(method, count, how) for how in ways]
                continue
            ways = [*formed, *(["factors"] if method.name == "cwy" and count else [])]
            served = [backend.name for backend in dispatch.backends("rollout")["rollout"] if backend.name != "reference"]
            found += [Candidate(method, count, how, backend) for how in ways for backend in served]
    return found


def entries(size: Size, nonlinearity: str, reflections: Sequence[int]) -> list[Entry]:
    """A free weight as the floor, and every candidate."""
    return [_free(size, nonlinearity), *(_entry(one, size, nonlinearity) for one in candidates(size, reflections))]


def _entry(one: Candidate, size: Size, f: str) -> Entry:
    n, batch, *steps = size

    def product(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(batch, n, dtype=dtype, device=device)
        use = (lambda chart: chart.multiply) if one.how == "unformed" else _formed
        return case(one.method, n, n, use, partial(norm_error, x), dtype, device, x, **one.options)

    def recurrence(dtype: torch.dtype, device: torch.device) -> Case:
        found = case(one.method, n, n, lambda chart: chart, None, dtype, device, **one.options)
        x, h0, b = draw_states(n, batch, steps[0], f, dtype, device)
        with torch.no_grad():
            off_kinks(f, x, h0, [found.truth(*map(double, found.inputs))], b)
        call = partial(_rollout, one.how, f, one.backend, found.call, h0, b)
        truth = partial(_rollout, one.how, f, "torch", found.truth, double(h0), double(b))
        return Case(call, (*found.inputs, x), truth, None)

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        backend = next((found for found in dispatch.backends("rollout")["rollout"] if found.name == one.backend), None)
        factors = one.reflections if one.how == "factors" else None
        return backend.why_not(Request(n, batch, steps[0], dtype, device.type, f, factors)) if backend else None

    about = f"cwy.METHODS[{one.method.name!r}], from its free parameters"
    make = recurrence if steps else product
    return Entry(one.name, about, make, group="ours", method=one.method.name, package="cwy", why_not=why_not)


def _free(size: Size, f: str) -> Entry:
    n, batch, *steps = size

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        like = {"dtype": dtype, "device": device}
        if not steps:
            call = lambda w, x: x @ w.mT
            return Case(call, (gaussian(n, n, **like), gaussian(batch, n, **like)), call, None)
        q = init.haar(n, **like)
        x, h0, b = draw_states(n, batch, steps[0], f, **like)
        call = partial(_rollout, "", f, "auto", lambda q: q)
        return Case(partial(call, h0, b), (q, off_kinks(f, x, h0, [q], b)), partial(call, double(h0), double(b)), None)

    return Entry("free weight", "the same with a free N x N weight", make, group="floor")


def _formed(chart: OrthogonalMap) -> Callable[..., Tensor]:
    return lambda *given: given[-1] @ chart(*given[:-1]).mT


def _rollout(how: str, f: str, backend: str, chart: Callable[..., Tensor], h0: Tensor, b: Tensor, *given: Tensor) -> Tensor:
    *free, x = given
    transition = ops.wy_factors(free[0]) if how == "factors" else chart(*free)
    states, _ = ops.rollout(x, h0, transition, b, f, backend=backend)
    assert isinstance(states, Tensor)
    # Factors are float32 where the vectors are half as wide.
    return states.to(x.dtype)

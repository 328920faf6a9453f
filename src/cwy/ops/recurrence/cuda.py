"""The loops as kernels that hold the transition on chip: one launch runs all steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _nvrtc
from . import autograd, loops, tiling
from .nonlinearities import NONLINEARITIES, Nonlinearity
from .product import product
from .tiling import ADJOINT, FORWARD, RECOVER
from .transition import Formed, Matrix, Signed

if TYPE_CHECKING:
    from .functions import Request

CHUNK = 1024


def why_not(request: Request) -> str | None:
    """Why the kernels can't serve, or None if they can."""
    reasons = []
    missing = _nvrtc.why_not()
    if missing:
        reasons.append(missing)
    if request.device != "cuda":
        reasons.append(f"x is on {request.device}")
    else:
        wide = request.n > tiling.BLOCK_UNITS
        if _capability(request.index) < (8, 0):
            reasons.append("it needs an NVIDIA GPU of capability 8.0")
        elif wide and _capability(request.index)[0] not in (9, 10):
            reasons.append(
                f"for N = {request.n} it needs the shared memory of an NVIDIA GPU of capability 9.0 or 10.0"
            )
    if request.nonlinearity not in tiling.NONLINEARITIES:
        reasons.append("the nonlinearity is a callable")
    if request.dtype != torch.float32:
        reasons.append(f"it computes in float32, and this is {request.dtype}")
    if request.n == 0:
        reasons.append("there is no unit")
    # A compiler would hold its program to the answer, as a guard on the length.
    if not request.compiling and max(request.steps, request.n) * request.batch >= 2**31:
        reasons.append("it counts rows and states of a step in 31 bits")
    if request.n > tiling.CLUSTER_UNITS:
        reasons.append(f"N = {request.n} is above the {tiling.CLUSTER_UNITS} that a cluster holds")
    if request.factors is not None and request.factors > tiling.CLUSTER_REFLECTIONS:
        reasons.append(
            f"L = {request.factors} is above the {tiling.CLUSTER_REFLECTIONS} that a cluster holds as factors"
        )
    if request.steps == 0 or request.batch == 0:
        reasons.append("there is no step")
    if request.transformed is not None:
        reasons.append(request.transformed)
    return "; ".join(reasons) or None


def _capability(index: int | None) -> tuple[int, int]:
    """Of an NVIDIA GPU, by default the current one; (0, 0) if there is none."""
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(index)
    if not (torch.cuda.is_initialized() or torch.cuda.is_available()):
        return 0, 0
    return _capability_of(torch.cuda.current_device() if index is None else index)


@functools.cache
def _capability_of(device: int) -> tuple[int, int]:
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def prefers_factors(n: int, reflections: int) -> bool:
    """Whether a cluster runs faster by factors than by a formed Q; a block never does."""
    return n > tiling.BLOCK_UNITS and reflections <= min(n // 4, tiling.CLUSTER_REFLECTIONS)


def rollout(
    x: Tensor, h0: Tensor, q: list[Tensor], bias: Tensor | None, weight: Tensor | None, nonlinearity: str, sizes: list[int],
    memory: str, last: bool, steps: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return autograd.rollout(
        x, h0, q, bias, weight, nonlinearity, sizes, memory, last, steps, "cuda"
    )


def run(
    x: Tensor, h: Tensor, states: Tensor | None, z: Tensor | None, sizes: list[int], q: Matrix, f: Nonlinearity,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """As :func:`loops.run`."""
    end = h.new_empty(h.shape)
    _launch(FORWARD, q, f, sizes, one=x, bias=bias, start=h, out=states, extra=z, end=end)
    return end


def adjoint(
    g: Tensor | None, carry: Tensor, gn: Tensor | None, deltas: Tensor, states: Tensor, before: Tensor, z: Tensor | None,
    sizes: list[int], q: Matrix, f: Nonlinearity, bias: Tensor | None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:  # fmt: skip
    """As :func:`loops.adjoint`."""
    tail = None if gn is None and not carry.shape[0] else loops.ending(carry, gn, sizes[0])
    end = deltas.new_empty(sizes[0], deltas.shape[1])
    dbias = None if bias is None else torch.empty_like(end)
    one = states if z is None else z
    inner = deltas.new_empty(deltas.shape[0], 0 if isinstance(q, Formed) else q.w.shape[1])
    _launch(
        ADJOINT, q, f, sizes, inner, one=one, two=g, start=tail, out=deltas, end=end, dbias=dbias
    )
    return (
        end,
        None if dbias is None else dbias.sum(0),
        _gradient(q, deltas, inner, states, before, sizes),
    )


def recover(
    x: Tensor,
    h: Tensor,
    hn: Tensor,
    negative: Tensor | None,
    sizes: list[int],
    q: Matrix,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As :func:`loops.recover`."""
    tail = torch.cat([h, hn[h.shape[0] : sizes[0]]])
    z, end = hn.new_empty(sum(sizes), hn.shape[-1]), tail.new_empty(tail.shape)
    signs = None if negative is None else torch.where(negative, -1.0, 1.0)
    _launch(
        RECOVER,
        q,
        NONLINEARITIES["identity"],
        sizes,
        one=x,
        two=signs,
        bias=bias,
        start=tail,
        out=z,
        end=end,
    )
    return z, end


def _gradient(
    q: Matrix, deltas: Tensor, inner: Tensor, states: Tensor, before: Tensor, sizes: list[int]
) -> tuple[Tensor | None, ...]:
    r"""Of the transition's tensors; ``inner`` is $W^\top\delta$ of each row, for factors."""
    rest, heads = (
        (states, before)
        if sizes[0] == sizes[-1]
        else (states[:0], loops.previous(states, before, sizes))
    )
    if isinstance(q, Formed):
        return (product(deltas, rest, heads),)
    minus = -q.y
    dw = product(deltas, rest @ minus, heads @ minus)
    dy = torch.neg(product(inner, rest, heads).mT, out=minus.new_empty(minus.shape))
    if isinstance(q, Signed):
        return dw, dy, None
    held = heads.shape[0]
    return (
        dw,
        dy,
        (deltas[:held] * heads).sum(0) + (deltas[held:] * rest[: deltas.shape[0] - held]).sum(0),
    )


def _launch(
    mode: int,
    q: Matrix,
    f: Nonlinearity,
    sizes: list[int],
    inner: Tensor | None = None,
    **tensors: Tensor | None,
) -> None:
    given = {name: t.contiguous() for name, t in tensors.items() if t is not None}
    assert all(
        given[name] is tensors[name] for name in ("out", "extra", "end", "dbias") if name in given
    )
    n, batch, device = given["end"].shape[-1], sizes[0], given["one"].get_device()
    packed, down = sizes[0] != sizes[-1], mode != FORWARD
    if packed:
        given["offsets"], given["lengths"] = _kept(_packing(tuple(sizes), given["one"].device))
    addresses = {name: t.data_ptr() for name, t in given.items()}
    fields = tiling.Tensors(n=n, batch=batch, steps=len(sizes), **addresses)
    if isinstance(q, Formed):
        reflections, arguments = None, [(q.q.mT if down else q.q).contiguous(), fields]
    else:
        a, b = (q.y, q.w) if down else (q.w, q.y)
        reflections, arguments = (
            a.shape[1],
            [a.contiguous(), b.contiguous(), q.d.contiguous(), fields, a.shape[1], inner],
        )
    variant = tiling.Variant(
        mode=mode,
        nonlinearity=f.name,
        packed=packed,
        reads_two="two" in given,
        writes_out="out" in given,
        writes_extra="extra" in given,
    )
    _prepared(n, reflections, batch, variant, device)(*arguments)


@functools.lru_cache(maxsize=256)
def _prepared(
    n: int, reflections: int | None, batch: int, variant: tiling.Variant, device: int
) -> Callable[..., None]:
    """Return the launch of the kernel that this needs."""
    with torch.cuda.device(device):
        if reflections is not None:
            chosen = tiling.factored(n, reflections, batch, device)
        elif n <= tiling.BLOCK_UNITS:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            chosen = tiling.block(n, batch, processors)
        else:
            chosen = tiling.cluster(n, batch, variant.mode, device)
        kernel = chosen.kernel(variant)
    grid = (chosen.blocks(batch), 1)
    return kernel.prepare(grid, chosen.threads, cluster=chosen.cluster)


_recorded: list[tuple[Tensor, Tensor]] = []


def _kept(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same, which outlive what is launched now: a graph reads them at every replay."""
    if torch.cuda.is_current_stream_capturing():
        _recorded.append(tensors)
    else:
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensors


@functools.lru_cache(maxsize=64)
def _packing(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each step's rows begin, and how long each sequence is."""
    rows = torch.tensor(sizes)
    lengths = (rows[:, None] > torch.arange(sizes[0])).sum(0)
    return (rows.cumsum(0) - rows).int().to(device), lengths.int().to(device)

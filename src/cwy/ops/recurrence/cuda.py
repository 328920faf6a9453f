"""The loops as kernels that hold the transition on chip: one launch runs all steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _nvrtc
from .._precision import full_precision
from . import tiling
from . import torch as torch_backend
from .nonlinearities import NONLINEARITIES, Nonlinearity
from .product import product
from .spec import Request, RolloutSpec
from .steps import Adjoint, Cell, Chunk, Recovered, StepLoops, join, previous_states, register
from .tiling import ADJOINT, FORWARD, RECOVER
from .transition import FixedDiagonal, Formed, LowRank, Transition


def why_not(request: Request) -> str | None:
    """Return why the kernels can't serve, or None if they can."""
    reasons = []
    missing = _nvrtc.why_not()
    if missing:
        reasons.append(missing)
    if request.device != "cuda":
        reasons.append(f"x is on {request.device}")
    else:
        capability = _capability(request.index)
        if capability < (8, 0):
            reasons.append("it needs an NVIDIA GPU of capability 8.0")
        elif request.n > tiling.BLOCK_UNITS and capability[0] not in (9, 10):
            reasons.append(
                f"for N = {request.n} it needs the shared memory of an NVIDIA GPU "
                "of capability 9.0 or 10.0"
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
    most = tiling.CLUSTER_UNITS
    if request.reflections is not None:
        most = tiling.LOW_RANK_UNITS
    if request.n > most:
        reasons.append(f"N = {request.n} is above the {most} that a cluster holds")
    if request.reflections is not None and request.reflections > tiling.CLUSTER_REFLECTIONS:
        reasons.append(
            f"L = {request.reflections} is above the {tiling.CLUSTER_REFLECTIONS} "
            "that a cluster holds as factors"
        )
    if request.steps == 0 or request.batch == 0:
        reasons.append("there is no step")
    if request.transformed is not None:
        reasons.append(request.transformed)
    return "; ".join(reasons) or None


def _capability(index: int | None) -> tuple[int, int]:
    """Return the capability of a GPU, by default the current one, or (0, 0) without a GPU."""
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(index)
    if not (torch.cuda.is_initialized() or torch.cuda.is_available()):
        return 0, 0
    if index is None:
        index = torch.cuda.current_device()
    return _capability_of(index)


@functools.cache
def _capability_of(device: int) -> tuple[int, int]:
    if torch.version.hip:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def prefers_low_rank(n: int, reflections: int, rows: int) -> bool:
    """Return whether a cluster is faster in low-rank form than with a formed Q.

    A block never is. The number of rows does not matter.
    """
    return n > tiling.BLOCK_UNITS and reflections <= min(n // 4, tiling.CLUSTER_REFLECTIONS)


def rollout(
    x: Tensor,
    h0: Tensor,
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
) -> tuple[Tensor, Tensor]:
    """Return the states of every step and the last ones, as :func:`.torch.rollout`."""
    return torch_backend.rollout(x, h0, transition, bias, weight, spec, CUDA)


class CudaSteps(StepLoops):
    """Run loops of one launch each."""

    name = "cuda"
    chunk = 1024
    projects = True
    in_kernels = True

    def run(
        self,
        cell: Cell,
        sizes: list[int],
        x: Tensor,
        h: Tensor,
        *,
        states: Tensor | None,
        z: Tensor | None,
        rounded: Tensor | None = None,
        projected: Tensor | None = None,
    ) -> Tensor:
        end = h.new_empty(h.shape)
        _launch(
            FORWARD,
            cell.transition,
            cell.f,
            sizes,
            projected,
            one=x,
            bias=cell.bias,
            start=h,
            out=states,
            rounded=rounded,
            extra=z,
            end=end,
        )
        return end

    def adjoint(
        self,
        cell: Cell,
        chunk: Chunk,
        *,
        before: Tensor,
        carry: Tensor,
        grad_last: Tensor | None,
    ) -> Adjoint:
        q = cell.transition
        deltas = chunk.deltas
        batch = chunk.sizes[0]
        tail = None
        if grad_last is not None or carry.shape[0]:
            tail = join(carry, grad_last, batch)
        end = deltas.new_empty(batch, deltas.shape[1])
        dbias = None
        if cell.bias is not None:
            dbias = torch.empty_like(end)
        one = chunk.states
        if chunk.z is not None:
            one = chunk.z
        inner = None
        if q.reflections is not None:
            inner = deltas.new_empty(deltas.shape[0], q.reflections)
        _launch(
            ADJOINT,
            q,
            cell.f,
            chunk.sizes,
            inner,
            one=one,
            two=chunk.grad_states,
            start=tail,
            out=deltas,
            rounded=chunk.rounded,
            end=end,
            dbias=dbias,
        )
        if dbias is not None:
            dbias = dbias.sum(0)
        return Adjoint(end, dbias, _transition_gradient(q, chunk, inner, before))

    def recover(
        self,
        cell: Cell,
        sizes: list[int],
        *,
        x: Tensor,
        h: Tensor,
        hn: Tensor,
        negative: Tensor | None,
    ) -> Recovered:
        tail = torch.cat([h, hn[h.shape[0] : sizes[0]]])
        z = hn.new_empty(sum(sizes), hn.shape[-1])
        end = tail.new_empty(tail.shape)
        flips = None
        if negative is not None:
            flips = torch.where(negative, -1.0, 1.0)
        _launch(
            RECOVER,
            cell.transition,
            NONLINEARITIES["identity"],
            sizes,
            one=x,
            two=flips,
            bias=cell.bias,
            start=tail,
            out=z,
            end=end,
        )
        return Recovered(z, end)


CUDA = register(CudaSteps())
loops = CUDA
"""Who runs the steps."""


def _transition_gradient(
    q: Transition, chunk: Chunk, inner: Tensor | None, before: Tensor
) -> tuple[Tensor | None, ...]:
    r"""Return the gradients of the transition's tensors.

    In low-rank form ``inner`` is $W^\top\delta$ of each row.
    """
    deltas = chunk.deltas
    rest = chunk.states
    heads = before
    if chunk.sizes[0] != chunk.sizes[-1]:
        rest = chunk.states[:0]
        heads = previous_states(chunk.states, before, chunk.sizes)
    if isinstance(q, Formed):
        return (product(deltas, rest, heads),)
    assert isinstance(q, LowRank)
    assert inner is not None
    projected = chunk.projected
    if projected is None:
        with full_precision("cuda"):
            dw = product(deltas, rest @ q.y, heads @ q.y)
    else:
        first = chunk.sizes[0]
        dw = product(deltas, projected[first:], projected[:first])
    dw = dw.neg_()
    dy = torch.neg(product(inner, rest, heads).mT, out=q.y.new_empty(q.y.shape))
    if isinstance(q, FixedDiagonal):
        return dw, dy, None
    headed = heads.shape[0]
    first = (deltas[:headed] * heads).sum(0)
    others = (deltas[headed:] * rest[: deltas.shape[0] - headed]).sum(0)
    return dw, dy, first + others


def _launch(
    mode: int,
    q: Transition,
    f: Nonlinearity,
    sizes: list[int],
    inner: Tensor | None = None,
    **tensors: Tensor | None,
) -> None:
    """Launch the kernel of a mode with the tensors of :data:`.tiling.Tensors`."""
    addresses = {}
    # Copies must live until the launch.
    given = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            given[name] = laid_out = tensor.contiguous()
            addresses[name] = laid_out.data_ptr()
            assert laid_out is tensor or name not in _WRITTEN, "what is written must be contiguous"
    one = given["one"]
    n = given["end"].shape[-1]
    batch = sizes[0]
    packed = batch != sizes[-1]
    if packed:
        offsets, lengths = _kept(_packing(tuple(sizes), one.device))
        addresses["offsets"] = offsets.data_ptr()
        addresses["lengths"] = lengths.data_ptr()
    fields = tiling.Tensors(n=n, batch=batch, steps=len(sizes), **addresses)
    variant = tiling.Variant(
        mode=mode,
        nonlinearity=f.name,
        packed=packed,
        reads_two="two" in given,
        writes_out="out" in given,
        writes_extra="extra" in given,
        one=one.dtype,
        two=_dtype_of(given.get("two")),
        rounded=_dtype_of(given.get("rounded")),
    )
    launch = _prepared(n, q.reflections, batch, variant, one.get_device())
    launch(*_arguments(mode, q, fields, inner))


_WRITTEN = frozenset(("out", "rounded", "extra", "end", "dbias"))
"""The tensors that kernels write to."""


def _dtype_of(x: Tensor | None) -> torch.dtype:
    """Return the dtype of a tensor. An absent one counts as float32."""
    if x is None:
        return torch.float32
    return x.dtype


def _arguments(mode: int, q: Transition, fields: object, inner: Tensor | None) -> list[object]:
    """Return the arguments of a kernel. Backwards it multiplies by the adjoint of Q."""
    backwards = mode != FORWARD
    if isinstance(q, Formed):
        matrix = q.q
        if backwards:
            matrix = matrix.mT
        return [matrix.contiguous(), fields]
    assert isinstance(q, LowRank)
    left = q.w
    right = q.y
    if backwards:
        left, right = right, left
    factors = [left.contiguous(), right.contiguous(), q.d.contiguous()]
    return [*factors, fields, q.reflections, inner]


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
    """Return the same, kept while a graph may replay: it reads them every time."""
    if torch.cuda.is_current_stream_capturing():
        _recorded.append(tensors)
    else:
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensors


@functools.lru_cache(maxsize=64)
def _packing(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where the rows of each step begin, and the length of each sequence."""
    rows = torch.tensor(sizes)
    lengths = (rows[:, None] > torch.arange(sizes[0])).sum(0)
    return (rows.cumsum(0) - rows).int().to(device), lengths.int().to(device)

"""Capture work in CUDA graphs, so that hundreds of small launches become one."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._torch import tree_map_only

_suspensions = 0


class CaptureError(RuntimeError):
    """Report that a call cannot be captured, for example because it synchronizes with the host."""


@contextmanager
def suspended() -> Iterator[None]:
    """Keep the recurrences of the library from capturing graphs of their own, in every thread.

    A graph cannot hold another one. Code that is about to capture a whole step runs its warm-up
    steps in this context, so that they take the path that the capture will take.
    """
    global _suspensions
    _suspensions += 1
    try:
        yield
    finally:
        _suspensions -= 1


def may_capture() -> bool:
    """Return whether a capture may start here: none is running, and none is :func:`suspended`."""
    return _suspensions == 0 and not torch.cuda.is_current_stream_capturing()


class CapturedCall:
    """Replay one call, captured in a CUDA graph for the shapes of its inputs.

    Args:
        call: ``call(*inputs)``. It reads its inputs and tensors that stay where they are, and does
            not synchronize with the host.
        inputs: the tensors to capture with. The graph keeps copies of them.
        warmup: calls that run before the capture, on a stream of their own. With two or more, the
            last one raises if torch synchronizes in it.
        pool: the memory pool of graphs that never run at the same time.

    Attributes:
        outputs: what the call returned. Each replay overwrites it.

    Raises:
        CaptureError: the call cannot be captured. The device can be used as before.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        inputs: tuple[Tensor, ...] = (),
        *,
        warmup: int = 2,
        pool: Any = None,
    ) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        generator = _generator().clone_state()
        try:
            with suspended():
                self._warm_up(call, warmup)
                with torch.cuda.graph(self._graph, pool=pool):
                    self.outputs = call(*self._inputs)
        except RuntimeError as error:
            _recover(stream, generator)
            reason = str(error).strip().partition("\n")[0]
            raise CaptureError(reason or "the call cannot be captured") from error

    def __call__(self, *inputs: Tensor) -> Any:
        """Copy the inputs into the graph's own, replay it and return :attr:`outputs`."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)
        self.replay()
        return self.outputs

    def replay(self) -> None:
        """Replay the graph on the inputs that it holds."""
        self._graph.replay()

    def _warm_up(self, call: Callable[..., Any], times: int) -> None:
        """Run the call on another stream, as a capture does."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for index in range(times):
                if index > 0 and index == times - 1:
                    with _synchronization_refused():
                        call(*self._inputs)
                else:
                    call(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)


class CapturedStep:
    """Capture a step at its first call with each shape of its inputs. See :func:`capture`."""

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        warmup: int,
        max_graphs: int,
        enabled: bool,
        on_failure: Callable[[CaptureError], None] | None,
    ) -> None:
        self._step = step
        self._enabled = enabled and torch.cuda.is_available()
        self._warmup = warmup
        self._max_graphs = max_graphs
        self._on_failure = on_failure
        self._calls: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, CapturedCall] = {}
        self._pool: Any = None

    @property
    def settled(self) -> bool:
        """Return whether a graph was captured, or never will be."""
        return bool(self._captured) or not self._enabled

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the step, or replay the graph of these shapes."""
        for position, tensor in enumerate(inputs):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    "cudagraph.capture: a captured step takes tensors only, "
                    f"but argument {position} is {type(tensor).__name__}. "
                    "Bind it with functools.partial."
                )
        if not self._enabled:
            return tree_map_only(Tensor, Tensor.detach, self._step(*inputs))
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs)
        if key not in self._captured and self._is_due(key):
            self._capture(key, inputs)
        self._calls[key] += 1
        if key in self._captured:
            outputs = self._captured[key](*inputs)
            return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), outputs)
        with suspended():
            outputs = self._step(*inputs)
        # A caller who keeps a loss would keep its graph of autograd, and with it the stream of the
        # gradients. A capture runs on another stream and would fail.
        return tree_map_only(Tensor, Tensor.detach, outputs)

    def _is_due(self, key: Hashable) -> bool:
        return self._calls[key] >= self._warmup and len(self._captured) < self._max_graphs

    def _capture(self, key: Hashable, inputs: tuple[Tensor, ...]) -> None:
        if self._pool is None:
            # One step is over before the next begins, so the graphs share their memory.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._captured[key] = CapturedCall(self._step, inputs, warmup=0, pool=self._pool)
        except CaptureError as error:
            if self._on_failure is None:
                raise
            self._enabled = False
            self._on_failure(error)


def capture(
    step: Callable[..., Any],
    *,
    warmup: int = 3,
    max_graphs: int = 64,
    enabled: bool = True,
    on_failure: Callable[[CaptureError], None] | None = None,
) -> CapturedStep:
    """Capture a training step in CUDA graphs, one for each shape of its inputs.

    The first calls of each shape run eagerly and train as usual. Then the step is captured, and
    later calls copy their inputs and replay the graph. On a machine without a GPU the step always
    runs eagerly, so a program need not tell the two apart.

    A captured graph fixes all shapes and every number that is not a tensor. Give the learning rate
    as a tensor if you want to change it, and make the optimizer with ``capturable=True``. Gradients
    must be cleared inside the step.

    Args:
        step: ``step(*tensors)``, a whole training step. It must not synchronize with the host.
        warmup: calls of each shape that run eagerly first.
        max_graphs: further shapes run eagerly.
        enabled: whether to capture at all. If not, every call runs eagerly.
        on_failure: called with the error if the step cannot be captured. It drops the gradients
            that the capture left behind, and every further call runs eagerly. The default raises
            the error.

    Returns:
        A callable in place of ``step``. The tensors that it returns are copies, without a gradient.

    Example:
        >>> layer = orthogonal(torch.nn.Linear(4, 4))
        >>> optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        >>> def step(x):
        ...     loss = layer(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> train = cudagraph.capture(step)
        >>> train(torch.randn(3, 4)).shape
        torch.Size([])
    """
    if warmup < 1:
        raise ValueError(f"cudagraph.capture: warmup must be at least 1, got {warmup}.")
    if max_graphs < 1:
        raise ValueError(f"cudagraph.capture: max_graphs must be at least 1, got {max_graphs}.")
    return CapturedStep(
        step,
        warmup=warmup,
        max_graphs=max_graphs,
        enabled=enabled,
        on_failure=on_failure,
    )


@contextmanager
def _synchronization_refused() -> Iterator[None]:
    """Raise where torch synchronizes: a capture that fails for it leaves much to mend."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch warns that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _generator() -> torch.Generator:
    """Return the random generator of the current GPU."""
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _recover(stream: torch.cuda.Stream, generator: torch.Generator) -> None:
    """Take back what a failed capture leaves behind.

    These are its stream, and a random generator that believes it is still captured.
    """
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    _generator().graphsafe_set_state(generator)

"""The base of recurrent networks over images: layouts, sizes, the ends of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import check_counts, check_input, check_switches, name_of
from .settings import Settings

State = tuple[Tensor, ...]
"""The tensors that make a state: one, or two for an LSTM."""


def check_sizes(call: str, kernel_size: int, **sizes: int) -> None:
    """Raise unless sizes are positive and images keep theirs."""
    check_counts(call, **sizes, kernel_size=kernel_size)
    if kernel_size % 2 == 0:
        raise ValueError(
            f"{call}: kernel_size must be odd, so that images keep their size. Got {kernel_size}."
        )


class Images(Settings):
    """Run the layers of a convolutional recurrence.

    A subclass has the weights, and runs one layer in :meth:`_layer`.

    Args:
        in_channels, hidden_channels, kernel_size, num_layers: sizes. Kernels are square and odd.
        batch_first: whether input and output are ``(B, T, C, H, W)`` and not ``(T, B, C, H, W)``.
        output: "all" states of the last layer, or only the "last".
    """

    parts: int = 1
    """Tensors that make a state."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int,
        num_layers: int,
        batch_first: bool,
        output: str,
    ) -> None:
        super().__init__()
        call = type(self).__name__
        check_sizes(
            call,
            kernel_size,
            in_channels=in_channels,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
        )
        check_switches(call, batch_first=batch_first)
        if output not in ("all", "last"):
            raise ValueError(f"{call}: output must be 'all' or 'last', got {output!r}.")
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.kernel_size = kernel_size
        self.num_layers = num_layers
        self.batch_first = batch_first
        self.output = output

    def _layer_channels(self, layer: int) -> int:
        """Return the channels of a layer's input."""
        if layer == 0:
            return self.in_channels
        return self.hidden_channels

    def _layer(
        self, x: Tensor, state: State, suffix: str, ends: Tensor | None, output: str
    ) -> tuple[Tensor | None, State]:
        """Return a layer's states ``(T, B, C, H, W)``, and the last state of each sequence.

        The states are None if only the last are wanted.
        """
        raise NotImplementedError

    def _run(self, input: Tensor, hx: State | None, lengths: Tensor | None) -> tuple[Tensor, State]:
        """Return the output, laid out like the input, and the last state of each sequence."""
        self._check_layout(input)
        unbatched = input.dim() == 4
        x = self._time_first(input)
        check_input(self, input, next(self.parameters()), x.shape[0])
        first = self._first(hx, unbatched, x)
        if lengths is None:
            x, hn = self._run_layers(x, first, None)
        else:
            x, hn = self._run_until(self._ends(lengths, x), x, first)
        if unbatched:
            hn = tuple(part.squeeze(1) for part in hn)
        if unbatched and self.output == "last":
            return x.squeeze(0), hn
        if unbatched:
            return x.squeeze(1), hn
        if self.batch_first and self.output == "all":
            return x.transpose(0, 1), hn
        return x, hn

    def _run_until(self, ends: Tensor, x: Tensor, first: State) -> tuple[Tensor, State]:
        """Run all layers on sequences that end at different steps. Output beyond an end is 0."""
        steps = torch.arange(x.shape[0], device=x.device)
        inside = (steps[:, None] < ends)[..., None, None, None]
        # Whatever lies beyond an end, NaN even, must not reach a gradient as 0 times itself.
        x, hn = self._run_layers(torch.where(inside, x, 0), first, ends)
        if self.output == "all":
            x = torch.where(inside, x, 0)
        return x, hn

    def _run_layers(self, x: Tensor, first: State, ends: Tensor | None) -> tuple[Tensor, State]:
        """Return what the last layer gives, and the last states of every layer."""
        last = []
        for layer in range(self.num_layers):
            wanted = "all"
            if layer == self.num_layers - 1:
                wanted = self.output
            state = tuple(part[layer] for part in first)
            states, ended = self._layer(x, state, f"_l{layer}", ends, wanted)
            last.append(ended)
            x = ended[0]
            if states is not None:
                x = states
        hn = tuple(torch.stack([state[part] for state in last]) for part in range(self.parts))
        return x, hn

    def _check_layout(self, x: Tensor) -> None:
        if x.dim() in (4, 5) and x.shape[-3] == self.in_channels:
            return
        layout = "(T, B, C, H, W)"
        if self.batch_first:
            layout = "(B, T, C, H, W)"
        raise ValueError(
            f"{name_of(self)}: expected input {layout}, or (T, C, H, W) unbatched, "
            f"with C = {self.in_channels}. Got shape {tuple(x.shape)}."
        )

    def _time_first(self, x: Tensor) -> Tensor:
        """Return the input as ``(T, B, C, H, W)``."""
        if x.dim() == 4:
            return x.unsqueeze(1)
        if self.batch_first:
            return x.transpose(0, 1)
        return x

    def _first(self, hx: State | None, unbatched: bool, x: Tensor) -> State:
        """Return the first states of every layer, zero by default."""
        shape = (self.num_layers, x.shape[1], self.hidden_channels, *x.shape[-2:])
        dtype = next(self.parameters()).dtype
        if hx is None:
            return (torch.zeros(shape, dtype=dtype, device=x.device),) * self.parts
        given = tuple(hx)
        expected = shape
        if unbatched:
            given = tuple(part.unsqueeze(1) for part in hx)
            expected = (shape[0], *shape[2:])
        if [part.shape for part in given] != [torch.Size(shape)] * self.parts:
            got = ", ".join(str(tuple(part.shape)) for part in hx)
            raise ValueError(f"{name_of(self)}: expected hx of shape {expected}, got {got}.")
        return tuple(part.to(dtype) for part in given)

    def _ends(self, lengths: Tensor, x: Tensor) -> Tensor:
        """Return the step after the last of each sequence, or raise if the lengths do not fit."""
        lengths = torch.as_tensor(lengths)
        steps, batch = x.shape[:2]
        # Lengths on a GPU are not read: that would synchronize. A compiler has none to read.
        readable = not lengths.is_cuda and not torch.compiler.is_compiling()
        fit = lengths.shape == (batch,) and not lengths.is_floating_point()
        if fit and readable:
            fit = not bool((lengths < 1).any() | (lengths > steps).any())
        if not fit:
            got: object = tuple(lengths.shape)
            if readable:
                got = lengths.tolist()
            raise ValueError(
                f"{name_of(self)}: lengths must be {batch} whole numbers from 1 to T = {steps}, "
                f"got {got}."
            )
        return lengths.to(x.device)

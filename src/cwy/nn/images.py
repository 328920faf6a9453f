"""What recurrent networks over images share: layouts, sizes, the ends of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .inputs import check_counts, check_input, check_switches, name_of
from .settings import Settings


def check_sizes(call: str, kernel_size: int, **sizes: int) -> None:
    """Raises unless sizes are positive and images keep theirs."""
    check_counts(call, **sizes, kernel_size=kernel_size)
    if kernel_size % 2 == 0:
        raise ValueError(
            f"{call}: kernel_size must be odd, so that images keep their size; got {kernel_size}."
        )


class Images(Settings):
    """Layers of a convolutional recurrence; a subclass has the weights, and runs one layer in :meth:`_layer`.

    Args:
        in_channels, hidden_channels, kernel_size, num_layers: sizes; kernels are square and odd.
        batch_first: whether input and output are ``(B, T, C, H, W)`` rather than ``(T, B, C, H, W)``.
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
        self.in_channels, self.hidden_channels, self.kernel_size = (
            in_channels,
            hidden_channels,
            kernel_size,
        )
        self.num_layers, self.batch_first, self.output = num_layers, batch_first, output

    def _layer(
        self, x: Tensor, state: tuple[Tensor, ...], suffix: str, ends: Tensor | None, output: str
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """States ``(T, B, C, H, W)`` of a layer (None if only the last is wanted), and each sequence's last state."""
        raise NotImplementedError

    def _run(
        self, input: Tensor, hx: tuple[Tensor, ...] | None, lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        call = name_of(self)
        if input.dim() not in (4, 5) or input.shape[-3] != self.in_channels:
            layout = "(B, T, C, H, W)" if self.batch_first else "(T, B, C, H, W)"
            raise ValueError(
                f"{call}: expected input {layout}, or (T, C, H, W) unbatched, with C = {self.in_channels}; "
                f"got shape {tuple(input.shape)}."
            )
        unbatched = input.dim() == 4
        x = (
            input.unsqueeze(1)
            if unbatched
            else input.transpose(0, 1)
            if self.batch_first
            else input
        )
        check_input(self, input, next(self.parameters()), x.shape[0])
        first = self._first(hx, unbatched, x)
        ends = None if lengths is None else self._ends(lengths, x)
        inside = None if ends is None else torch.arange(x.shape[0], device=x.device)[:, None] < ends
        if inside is not None:
            # Whatever lies beyond an end, NaN even, must not reach a gradient as 0 times itself.
            x = torch.where(inside[..., None, None, None], x, 0)
        last = []
        for layer in range(self.num_layers):
            wanted = self.output if layer == self.num_layers - 1 else "all"
            states, ended = self._layer(
                x, tuple(part[layer] for part in first), f"_l{layer}", ends, wanted
            )
            x = ended[0] if states is None else states
            last.append(ended)
        hn = tuple(torch.stack([state[part] for state in last]) for part in range(self.parts))
        if unbatched:
            hn = tuple(part.squeeze(1) for part in hn)
        if self.output == "last":
            return x.squeeze(0) if unbatched else x, hn
        if inside is not None:
            x = torch.where(inside[..., None, None, None], x, 0)
        return x.squeeze(1) if unbatched else x.transpose(0, 1) if self.batch_first else x, hn

    def _first(
        self, hx: tuple[Tensor, ...] | None, unbatched: bool, x: Tensor
    ) -> tuple[Tensor, ...]:
        shape = (self.num_layers, x.shape[1], self.hidden_channels, *x.shape[-2:])
        like: Any = {"dtype": next(self.parameters()).dtype, "device": x.device}
        if hx is None:
            return (torch.zeros(shape, **like),) * self.parts
        given = tuple(part.unsqueeze(1) if unbatched else part for part in hx)
        if [part.shape for part in given] != [torch.Size(shape)] * self.parts:
            expected = (shape[0], *shape[2:]) if unbatched else shape
            got = ", ".join(str(tuple(part.shape)) for part in hx)
            raise ValueError(f"{name_of(self)}: expected hx of shape {expected}, got {got}.")
        return tuple(part.to(like["dtype"]) for part in given)

    def _ends(self, lengths: Tensor, x: Tensor) -> Tensor:
        lengths = torch.as_tensor(lengths)
        # Those on a GPU are not looked at: that would wait for it. A compiler has none to look at.
        seen = not lengths.is_cuda and not torch.compiler.is_compiling()
        fit = lengths.shape == x.shape[1:2] and not lengths.is_floating_point()
        if not fit or (seen and bool((lengths < 1).any() | (lengths > x.shape[0]).any())):
            got = lengths.tolist() if seen else tuple(lengths.shape)
            raise ValueError(
                f"{name_of(self)}: lengths must be {x.shape[1]} whole numbers from 1 to T = {x.shape[0]}, got {got}."
            )
        return lengths.to(x.device)

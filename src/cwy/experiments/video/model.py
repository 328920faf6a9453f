"""The network of video prediction: recurrent units in a bottleneck, with skip connections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pixel_shuffle, pixel_unshuffle
from torch.utils.checkpoint import checkpoint

from ...nn import ConvLSTM, ConvNERU
from ...nn.conv import FREE
from ...ops.recurrence.transition import by_rows
from ..recurrent import raw_length

GROUP = 2
"""Squares of so many pixels a side become channels."""
SHRINK = 16
"""The side of a frame is a multiple of this: it is halved four times."""
FRAMES = 32
"""Frames that are shown at once."""


class Block(nn.Module):
    """A strided convolution, or a deconvolution, of images ``(R, C, H, W)``; normalised, if asked; ReLU."""

    def __init__(
        self, inputs: int, outputs: int, up: bool, normalize: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if up:
            self.map = nn.ConvTranspose2d(inputs, outputs, 3, 2, 1, 1, dtype=dtype)
        else:
            self.map = nn.Conv2d(inputs, outputs, 3, 2, 1, dtype=dtype)
        self.norm = nn.InstanceNorm2d(outputs, affine=True, dtype=dtype) if normalize else None

    def forward(self, x: Tensor) -> Tensor:
        x = by_rows(self.map, x, self.map.weight)
        return torch.relu_(x if self.norm is None else self.norm(x))


class Predictor(nn.Module):
    r"""Predicts each next frame from those before it.

    Frames of side S are seen as $S/2\times S/2\times 4$. Recurrent units of f, 2f, 4f, 2f and f channels work at sides S/4,
    S/8, S/16, S/8 and S/4, with strided convolutions before and deconvolutions after them. The last two units, and the last
    map, see also what lies across the bottleneck. Every map runs over all time steps at once, the units' input kernels too.

    Args:
        method: design of the recurrent units: of :class:`cwy.nn.ConvNERU`, or "convlstm", which has instance normalisation
            after every convolution but the last.
        channels: f.
        kernel_size: q, of the units.
        dtype: of the weights.
        backend: of the recurrences, as in :class:`cwy.nn.ConvNERU`.

    Returns:
        From ``frames (B, T, S, S)`` the predictions of the frames after them, of the same shape.
    """

    def __init__(
        self,
        method: str,
        channels: int = 32,
        kernel_size: int = 3,
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        lstm, f = method == "convlstm", channels

        def unit(inputs: int, outputs: int) -> ConvNERU | ConvLSTM:
            if lstm:
                return ConvLSTM(inputs, outputs, kernel_size, dtype=dtype)
            length = None if method in FREE else raw_length(method)
            return ConvNERU(
                inputs,
                outputs,
                kernel_size,
                dtype=dtype,
                method=method,
                length=length,
                backend=backend,
            )

        self.down = nn.ModuleList(
            Block(a, b, False, lstm, dtype) for a, b in ((GROUP**2, f), (f, 2 * f), (2 * f, 4 * f))
        )
        self.up = nn.ModuleList(
            Block(a, b, True, lstm, dtype) for a, b in ((4 * f, 2 * f), (2 * f, f), (f, f))
        )
        self.units = nn.ModuleList(
            unit(a, b)
            for a, b in ((f, f), (2 * f, 2 * f), (4 * f, 4 * f), (4 * f, 2 * f), (2 * f, f))
        )
        self.last = nn.Conv2d(f + GROUP**2, GROUP**2, 3, padding=1, dtype=dtype)
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Glorot's uniform values and no biases, as the paper's framework starts convolutions; transitions stay as they are.

        They depend on the seed alone, not on what the transitions drew: so methods differ in these only.
        """
        random = torch.Generator().manual_seed(torch.initial_seed())
        for name, parameter in self.named_parameters():
            if "bias" in name:
                parameter.zero_()
            elif parameter.dim() == 4:
                nn.init.xavier_uniform_(parameter, generator=random)

    def forward(self, frames: Tensor) -> Tensor:
        batch, steps = frames.shape[:2]
        first = pixel_unshuffle(frames.transpose(0, 1).reshape(-1, 1, *frames.shape[2:]), GROUP)

        def recur(index: int, x: Tensor) -> Tensor:
            states, _ = self.units[index](x.unflatten(0, (steps, batch)))
            return states.flatten(0, 1)

        a = recur(0, self.down[0](first))
        b = recur(1, self.down[1](a))
        x = recur(2, self.down[2](b))
        x = recur(3, torch.cat([self.up[0](x), b], 1))
        x = recur(4, torch.cat([self.up[1](x), a], 1))
        # At full size a channel is the largest tensor of all: some frames at a time, made again when they are needed.
        rows = zip(x.split(FRAMES), first.split(FRAMES), strict=True)
        x = torch.cat(
            [
                checkpoint(self._show, *row, use_reentrant=False, preserve_rng_state=False)
                for row in rows
            ]
        )
        return pixel_shuffle(x, GROUP).view(steps, batch, *frames.shape[2:]).transpose(0, 1)

    def _show(self, x: Tensor, first: Tensor) -> Tensor:
        x, weight = self.up[2](x), self.last.weight
        return conv2d(x, weight[:, : x.shape[1]], self.last.bias, padding=1) + conv2d(
            first, weight[:, x.shape[1] :], padding=1
        )

"""The network of video prediction: recurrent units in a bottleneck, with skip connections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pixel_shuffle, pixel_unshuffle
from torch.utils.checkpoint import checkpoint

from ...nn import ConvLSTM, ConvNERU
from ...nn.conv import FREE
from ...ops.recurrence.convolved import by_rows
from ..recurrent import raw_length

GROUP = 2
"""Side of the squares of pixels that become channels."""
SHRINK = 16
"""The side of a frame is a multiple of this, because it is halved four times."""
FRAMES = 32
"""Frames that the last map computes at once."""


class Block(nn.Module):
    """Apply a strided convolution or deconvolution and ReLU to images ``(R, C, H, W)``.

    Args:
        inputs, outputs: channels.
        up: whether to double the side of the images by a deconvolution, instead of halving it.
        normalize: whether to normalize each image before ReLU.
        dtype: of the weights.
    """

    def __init__(
        self, inputs: int, outputs: int, up: bool, normalize: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if up:
            self.map = nn.ConvTranspose2d(inputs, outputs, 3, 2, 1, 1, dtype=dtype)
        else:
            self.map = nn.Conv2d(inputs, outputs, 3, 2, 1, dtype=dtype)
        self.norm = None
        if normalize:
            self.norm = nn.InstanceNorm2d(outputs, affine=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = by_rows(self.map, x, self.map.weight)
        if self.norm is not None:
            x = self.norm(x)
        return torch.relu_(x)


class Predictor(nn.Module):
    r"""Predict each next frame from those before it.

    Frames of side S enter as $S/2\times S/2\times 4$. Recurrent units of f, 2f, 4f, 2f and f
    channels work at sides S/4, S/8, S/16, S/8 and S/4. Strided convolutions lead down to them,
    deconvolutions lead up. Skip connections across the bottleneck feed the last two units and the
    last map. Every map runs over all time steps at once, the units' input kernels too.

    Args:
        method: design of the recurrent units, of :class:`cwy.nn.ConvNERU` or "convlstm". The
            latter has instance normalization after every convolution but the last.
        channels: f.
        kernel_size: q, of the units.
        dtype: of the weights.
        backend: of the recurrences, as in :class:`cwy.nn.ConvNERU`.

    Returns:
        Predictions of the frames after ``frames (B, T, S, S)``, of the same shape.
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
        f = channels
        squares = GROUP**2
        block = partial(Block, normalize=method == "convlstm", dtype=dtype)
        unit = _unit(method, kernel_size, dtype, backend)
        self.down = nn.ModuleList(
            [
                block(squares, f, up=False),
                block(f, 2 * f, up=False),
                block(2 * f, 4 * f, up=False),
            ]
        )
        self.up = nn.ModuleList(
            [
                block(4 * f, 2 * f, up=True),
                block(2 * f, f, up=True),
                block(f, f, up=True),
            ]
        )
        self.units = nn.ModuleList(
            [
                unit(f, f),
                unit(2 * f, 2 * f),
                unit(4 * f, 4 * f),
                unit(4 * f, 2 * f),
                unit(2 * f, f),
            ]
        )
        self.last = nn.Conv2d(f + squares, squares, 3, padding=1, dtype=dtype)
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Draw Glorot's uniform kernels and zero the biases, as the paper's framework does.

        Transitions keep their initial values. The kernels depend only on the seed, not on the
        transitions' draws, so that methods differ only in their transitions.
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
        # A channel at full size is the largest tensor of all: compute it for some frames at a
        # time, and again in the backward pass.
        parts = [
            checkpoint(self._show, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(x.split(FRAMES), first.split(FRAMES), strict=True)
        ]
        shown = pixel_shuffle(torch.cat(parts), GROUP)
        return shown.view(steps, batch, *frames.shape[2:]).transpose(0, 1)

    def _show(self, x: Tensor, first: Tensor) -> Tensor:
        """Apply the last deconvolution, and the last map to its result and the input frames."""
        x = self.up[2](x)
        weight = self.last.weight
        ours = conv2d(x, weight[:, : x.shape[1]], self.last.bias, padding=1)
        skipped = conv2d(first, weight[:, x.shape[1] :], padding=1)
        return ours + skipped


def _unit(
    method: str, kernel_size: int, dtype: torch.dtype, backend: str
) -> Callable[[int, int], ConvNERU | ConvLSTM]:
    """Return what makes a recurrent unit of so many input and output channels."""
    if method == "convlstm":
        return partial(ConvLSTM, kernel_size=kernel_size, dtype=dtype)
    length = None
    if method not in FREE:
        length = raw_length(method)
    return partial(
        ConvNERU,
        kernel_size=kernel_size,
        dtype=dtype,
        method=method,
        length=length,
        backend=backend,
    )

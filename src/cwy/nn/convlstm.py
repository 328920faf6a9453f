"""ConvLSTM: the unconstrained baseline of video prediction."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, instance_norm

from ..ops.recurrence.convolved import by_rows, flat
from .images import Images, State, check_sizes
from .inputs import check_input
from .settings import Settings


class _Gates(Settings):
    """Hold the kernels, scale and bias of the four gates of a layer, and compute a step.

    The layer and the cell derive from it.
    """

    hidden_channels: int
    kernel_size: int
    normalize: bool

    def _add(
        self,
        suffix: str,
        channels: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Add the weights of a layer."""
        f = self.hidden_channels
        q = self.kernel_size
        for name, inputs in (("weight_ih", channels), ("weight_hh", f)):
            bound = 1 / math.sqrt(inputs * q * q)
            weight = torch.empty(4 * f, inputs, q, q, device=device, dtype=dtype)
            weight.uniform_(-bound, bound)
            self.register_parameter(f"{name}{suffix}", nn.Parameter(weight))
        bias = torch.zeros(4 * f, device=device, dtype=dtype)
        self.register_parameter(f"bias_ih{suffix}", nn.Parameter(bias))
        if self.normalize:
            scale = torch.ones(4 * f, device=device, dtype=dtype)
            self.register_parameter(f"scale{suffix}", nn.Parameter(scale))

    def _convolve(self, x: Tensor, suffix: str) -> Tensor:
        """Return what images ``(R, C, H, W)`` give to the gates.

        Gates that are normalized get their bias later.
        """
        bias = None
        if not self.normalize:
            bias = getattr(self, f"bias_ih{suffix}")
        weight = getattr(self, f"weight_ih{suffix}")
        return by_rows(
            lambda part: conv2d(part, weight, bias, padding=self.kernel_size // 2), x, weight
        )

    def _step(self, x: Tensor, h: Tensor, c: Tensor, suffix: str) -> tuple[Tensor, Tensor]:
        """Return the next states ``(h, c)``."""
        z = x + conv2d(h, getattr(self, f"weight_hh{suffix}"), padding=self.kernel_size // 2)
        if self.normalize:
            scale = getattr(self, f"scale{suffix}")
            bias = getattr(self, f"bias_ih{suffix}")
            if len(z):
                z = instance_norm(z, weight=scale, bias=bias)
            else:
                # torch refuses to normalize an empty batch.
                z = z * scale.view(-1, 1, 1) + bias.view(-1, 1, 1)
        i, f, g, o = z.chunk(4, -3)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class ConvLSTM(Images, _Gates):
    r"""Run an LSTM with convolutions (Shi et al. 2015), its gates normalized per image.

    $$ (i, f, g, o) = \mathrm{norm}(W * x_t + V * h_{t-1}), \quad
       c_t = \sigma(f) c_{t-1} + \sigma(i)\tanh(g), \quad h_t = \sigma(o)\tanh(c_t) $$

    Args:
        in_channels, hidden_channels: of the inputs and of the states (f).
        kernel_size: odd. Images keep their size, and are zero beyond their borders.
        num_layers: stacked layers.
        batch_first: input and output are ``(B, T, C, H, W)`` instead of ``(T, B, C, H, W)``.
        device, dtype: of the weights.
        normalize: whether the gates get instance normalization, with scale and bias per channel.
            False adds only the bias.
        output: "all" states of the last layer, or only the "last".

    Example:
        >>> lstm = ConvLSTM(3, 8)
        >>> output, (h, c) = lstm(torch.randn(5, 2, 3, 16, 16))
        >>> output.shape, c.shape
        (torch.Size([5, 2, 8, 16, 16]), torch.Size([1, 2, 8, 16, 16]))
    """

    parts = 2

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int = 3,
        num_layers: int = 1,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalize: bool = True,
        output: str = "all",
    ) -> None:
        super().__init__(in_channels, hidden_channels, kernel_size, num_layers, batch_first, output)
        self.normalize = normalize
        for layer in range(num_layers):
            self._add(f"_l{layer}", self._layer_channels(layer), device, dtype)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run all steps, as :class:`ConvNERU` does, with states ``(h, c)``."""
        return self._run(input, hx, lengths)

    def _layer(
        self, x: Tensor, state: State, suffix: str, ends: Tensor | None, output: str
    ) -> tuple[Tensor | None, State]:
        h, c = state
        states = []
        for t, xt in enumerate(self._convolve(flat(x), suffix).unflatten(0, x.shape[:2])):
            after = self._step(xt, h, c, suffix)
            if ends is None:
                h, c = after
            else:
                going = (t < ends)[:, None, None, None]
                h = torch.where(going, after[0], h)
                c = torch.where(going, after[1], c)
            if output == "all":
                states.append(h)
        if output == "last":
            return None, (h, c)
        return torch.stack(states), (h, c)


class ConvLSTMCell(_Gates):
    """Compute one step of :class:`ConvLSTM`.

    Args:
        in_channels, hidden_channels, kernel_size, device, dtype, normalize: as there.

    Returns:
        The next ``(h, c)``, from ``input (B, C, H, W)`` and ``hx = (h, c)`` or None for zeros.

    Example:
        >>> h, c = ConvLSTMCell(3, 8)(torch.randn(2, 3, 16, 16))
        >>> h.shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(
            "ConvLSTMCell", kernel_size, in_channels=in_channels, hidden_channels=hidden_channels
        )
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.kernel_size = kernel_size
        self.normalize = normalize
        self._add("", in_channels, device, dtype)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the next states."""
        if input.dim() != 4 or input.shape[1] != self.in_channels:
            raise ValueError(
                f"ConvLSTMCell: expected input (B, {self.in_channels}, H, W), "
                f"got shape {tuple(input.shape)}."
            )
        check_input(self, input, next(self.parameters()))
        x = self._convolve(input, "")
        shape = (len(input), self.hidden_channels, *input.shape[2:])
        if hx is None:
            zero = x.new_zeros(shape)
            return self._step(x, zero, zero, "")
        states = tuple(hx)
        if [state.shape for state in states] != [shape] * 2:
            got = ", ".join(str(tuple(state.shape)) for state in states)
            raise ValueError(
                f"ConvLSTMCell: expected hx = (h, c), both of shape {shape}, got {got}."
            )
        return self._step(x, *states, "")

"""ConvNERU: a convolutional recurrence whose states and gradients can't explode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import ops
from .._hints import did_you_mean, sentences
from ..api import orthogonal
from ..init import haar
from ..ops.recurrence.convolved import by_rows, flat
from ..ops.recurrence.nonlinearities import NONLINEARITIES
from ..ops.recurrence.spec import check_choices
from ..registry import METHODS
from .images import Images, State, check_sizes
from .inputs import check_backend, check_input, check_switches
from .leaving import leaves
from .settings import Settings

Activation = str | Callable[[Tensor], Tensor]

FREE = ("zeros", "glorot", "orth-init")
"""Kernels without a constraint: none, Glorot's initial values, or a start on the manifold."""


class _Kernels(Settings):
    """Make the input kernel, transition and bias of a layer, and read them by name.

    The layer and the cell derive from it.
    """

    in_channels: int
    hidden_channels: int
    kernel_size: int

    def _set_up(
        self,
        *,
        nonlinearity: Activation,
        bias: bool,
        method: str,
        init: Any,
        length: Any,
        like: dict[str, Any],
    ) -> None:
        """Check and keep the settings of the kernels."""
        call = type(self).__name__
        check_choices(call, nonlinearity, "all", "store")
        check_switches(call, bias=bias)
        known = [name for name, m in METHODS.items() if m.kind != "square" and m.real]
        known += FREE
        if method not in known:
            raise ValueError(
                sentences(
                    f"{call}: method {method!r} does not serve kernels.",
                    did_you_mean(method, known, cutoff=0.6),
                    f"Known: {', '.join(known)}.",
                )
            )
        for option, value in (("init", init), ("length", length)):
            if method in FREE and value is not None:
                raise ValueError(
                    f"{call}: {option} belongs to constrained kernels, and method is {method!r}. "
                    "Leave it out."
                )
        self.nonlinearity = nonlinearity
        self.bias = bias
        self.method = method
        self._init = init
        self._length = length
        self._like = like

    @property
    def _threshold(self) -> bool:
        """Return whether the bias is the threshold of the nonlinearity."""
        return self.nonlinearity == "modrelu"

    def _add(self, suffix: str, channels: int) -> None:
        """Add the weights of a layer with this many channels in its input."""
        f = self.hidden_channels
        q = self.kernel_size
        bound = 1 / math.sqrt(channels * q * q)
        weight = _uniform(bound, f, channels, q, q, **self._like)
        self.register_parameter(f"weight_ih{suffix}", weight)
        if self.method != "zeros":
            self._add_transition(f"weight_hh{suffix}")
        if self.bias:
            if self._threshold:
                bound = 0.01
            self.register_parameter(f"bias_ih{suffix}", _uniform(bound, f, **self._like))

    def _add_transition(self, name: str) -> None:
        """Add a transition ``(f, q²f)``, constrained unless its method is a free one."""
        f = self.hidden_channels
        size = self.kernel_size**2 * f
        if self.method == "glorot":
            self.register_parameter(name, _uniform(math.sqrt(3 / size), f, size, **self._like))
            return
        weight = haar(size, f, **self._like).mT.contiguous()
        self.register_parameter(name, nn.Parameter(weight))
        if self.method in FREE:
            return
        init = self._init
        if init is None and self.method == "own":
            # OWN can't start Haar-random.
            init = "random"
        orthogonal(self, name, self.method, init=init, length=self._length)

    def kernel(self, layer: int | None = None) -> Tensor:
        r"""Return the transition K of a layer, ``(f, f, q, q)``.

        Its flattened rows, times q, are $q\hat K^\top$, on the manifold.
        """
        f = self.hidden_channels
        q = self.kernel_size
        suffix = ""
        if layer is not None:
            suffix = f"_l{layer}"
        if self.method == "zeros":
            return torch.zeros_like(getattr(self, f"weight_ih{suffix}")[:, :1]).expand(f, f, q, q)
        weight = getattr(self, f"weight_hh{suffix}").view(f, f, q, q)
        if self.method == "glorot":
            # Glorot's values are the kernel's own.
            return weight
        # The bound on a convolution's norm is q times that of its matrix.
        return weight / q

    def _activate(self, z: Tensor, bias: Tensor | None) -> Tensor:
        if callable(self.nonlinearity):
            return self.nonlinearity(z)
        if bias is not None:
            bias = bias.view(-1, 1, 1)
        return NONLINEARITIES[self.nonlinearity].define(z, bias)

    def _convolve(self, x: Tensor, suffix: str) -> Tensor:
        """Convolve images ``(R, C, H, W)`` with the input kernel.

        The bias is added, unless it is a threshold.
        """
        bias = None
        if not self._threshold:
            bias = getattr(self, f"bias_ih{suffix}", None)
        weight = getattr(self, f"weight_ih{suffix}")
        return by_rows(
            lambda part: nn.functional.conv2d(part, weight, bias, padding=self.kernel_size // 2),
            x,
            weight,
        )


def _uniform(bound: float, *shape: int, **like) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **like).uniform_(-bound, bound))


class ConvNERU(Images, _Kernels):
    r"""Run a convolutional non-exploding recurrent unit: $G_t = f(K * G_{t-1} + b + K^{in} * X_t)$.

    $q\hat K$ is kept on the Stiefel manifold, where $\hat K$ is K as a $q^2 f\times f$ matrix. Then
    $\lVert K * G\rVert \le \lVert G\rVert$, and neither states nor their gradients can grow
    exponentially. With TF32 allowed, as torch has it by default,
    ``.to(memory_format=torch.channels_last)`` is the faster layout on a GPU.

    Args:
        in_channels, hidden_channels: of the inputs and of the states (f).
        kernel_size: q, odd. Images keep their size, and are zero beyond their borders.
        num_layers: stacked layers.
        nonlinearity: "relu", "tanh", "leaky_relu", "abs", "modrelu" or "identity". A function of
            your own takes the slow path.
        bias: one number per channel. For "modrelu" it is the threshold.
        batch_first: input and output are ``(B, T, C, H, W)`` instead of ``(T, B, C, H, W)``.
        device, dtype: of the weights, real.
        method: a method of :data:`cwy.METHODS` for tall matrices ("tcwy", "own", "rgd-c-c", ...).
            These have no constraint: "glorot", "orth-init" (starts on the manifold) and "zeros" (no
            recurrence).
        init: initial value of $q\hat K^\top$, as in :func:`cwy.orthogonal`. The default is
            Haar-random, if the method has that.
        length: norm of the vectors of the methods by reflections, as in :func:`cwy.orthogonal`.
        memory: "store", or "checkpoint" to keep $\sqrt T$ states, which helps with output="last".
            With lengths, all states are kept in any case, because each sequence's last one is read
            from them.
        output: "all" states of the last layer, or only the "last".
        backend: of :func:`~cwy.ops.conv_rollout`.

    Attributes:
        weight_ih_l0, weight_hh_l0, bias_ih_l0: the input kernel ``(f, C, q, q)``, $q\hat K^\top$
            ``(f, q²f)`` with orthonormal rows (for "glorot" $\hat K^\top$), ``(f,)``. Further
            layers have the suffix ``_l1``. :meth:`kernel` is K itself.

    Example:
        >>> unit = ConvNERU(3, 8)
        >>> output, h = unit(torch.randn(5, 2, 3, 16, 16))
        >>> output.shape, h.shape, orthogonality_error(unit.weight_hh_l0) < 1e-5
        (torch.Size([5, 2, 8, 16, 16]), torch.Size([1, 2, 8, 16, 16]), True)
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int = 3,
        num_layers: int = 1,
        nonlinearity: Activation = "relu",
        bias: bool = True,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: str = "tcwy",
        init: str | Tensor | None = None,
        length: float | str | None = None,
        memory: str = "store",
        output: str = "all",
        backend: str = "auto",
    ) -> None:
        super().__init__(in_channels, hidden_channels, kernel_size, num_layers, batch_first, output)
        self._set_up(
            nonlinearity=nonlinearity,
            bias=bias,
            method=method,
            init=init,
            length=length,
            like={"device": device, "dtype": dtype},
        )
        if memory not in ("store", "checkpoint"):
            raise ValueError(f"ConvNERU: memory must be 'store' or 'checkpoint', got {memory!r}.")
        check_backend("ConvNERU", "conv_rollout", backend)
        self.memory = memory
        self.backend = backend
        for layer in range(num_layers):
            self._add(f"_l{layer}", self._layer_channels(layer))

    def forward(
        self, input: Tensor, hx: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run all steps.

        Args:
            input: ``(T, B, C, H, W)``, or ``(B, T, C, H, W)`` if ``batch_first``.
                ``(T, C, H, W)`` is unbatched.
            hx: ``(num_layers, B, f, H, W)``, the first states. Zero by default.
            lengths: ``(B,)``, where sequences end. Output after that is zero, and no gradient comes
                from there. If the states of a free kernel grow out of range there, it is NaN.

        Returns:
            The output, laid out like the input, and each sequence's last states, like hx.
        """
        state = None
        if hx is not None:
            state = (hx,)
        output, (hn,) = self._run(input, state, lengths)
        return output, hn

    def _layer(
        self, x: Tensor, state: State, suffix: str, ends: Tensor | None, output: str
    ) -> tuple[Tensor | None, State]:
        wanted = output
        if ends is not None:
            # Each sequence's last state is read from all states.
            wanted = "all"
        if self.method == "zeros":
            images = self._convolve(flat(x), suffix).unflatten(0, x.shape[:2])
            states = self._activate(images, getattr(self, f"bias_ih{suffix}", None))
            last = states[-1]
        else:
            states, last = self._recur(x, state[0], suffix, wanted)
        if ends is not None:
            last = cast(Tensor, states)[ends - 1, torch.arange(len(ends), device=ends.device)]
        if output == "last":
            return None, (last,)
        return states, (last,)

    def _recur(
        self, x: Tensor, h0: Tensor, suffix: str, output: str
    ) -> tuple[Tensor | None, Tensor]:
        """Return the states of a layer, or None if only the last are wanted, and the last ones."""
        bias = getattr(self, f"bias_ih{suffix}", None)
        inner = getattr(self, f"weight_ih{suffix}")
        backend = self.backend
        memory = self.memory
        if leaves(self, f"weight_hh{suffix}"):
            backend = "reference"
            memory = "store"
        elif memory == "store":
            # One convolution over all steps, the bias with it where it is not a threshold.
            x = self._convolve(flat(x), suffix).unflatten(0, x.shape[:2])
            inner = None
            if not self._threshold:
                bias = None
        return ops.conv_rollout(
            x,
            h0,
            self.kernel(int(suffix[2:])),
            bias,
            self.nonlinearity,
            weight=inner,
            output=output,
            memory=memory,
            backend=backend,
        )


class ConvNERUCell(_Kernels):
    r"""Compute one step of :class:`ConvNERU`: $G' = f(K * G + b + K^{in} * X)$.

    Args:
        in_channels, hidden_channels, kernel_size, nonlinearity, bias: as there.
        device, dtype, method, init, length: as there.

    Returns:
        The next state, from ``input (B, C, H, W)`` or ``(C, H, W)``, and ``hx`` of f channels or
        None for zero.

    Example:
        >>> cell = ConvNERUCell(3, 8)
        >>> cell(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int = 3,
        nonlinearity: Activation = "relu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: str = "tcwy",
        init: str | Tensor | None = None,
        length: float | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(
            "ConvNERUCell", kernel_size, in_channels=in_channels, hidden_channels=hidden_channels
        )
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.kernel_size = kernel_size
        self._set_up(
            nonlinearity=nonlinearity,
            bias=bias,
            method=method,
            init=init,
            length=length,
            like={"device": device, "dtype": dtype},
        )
        self._add("", in_channels)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the next state."""
        if input.dim() not in (3, 4) or input.shape[-3] != self.in_channels:
            raise ValueError(
                f"ConvNERUCell: expected input (B, {self.in_channels}, H, W), "
                f"got shape {tuple(input.shape)}."
            )
        check_input(self, input, cast(Tensor, self.weight_ih))
        z = self._convolve(input, "")
        if hx is not None:
            if hx.shape != z.shape:
                raise ValueError(
                    f"ConvNERUCell: expected hx of shape {tuple(z.shape)}, got {tuple(hx.shape)}."
                )
            padding = self.kernel_size // 2
            z = z + nn.functional.conv2d(hx.to(z.dtype), self.kernel(), padding=padding)
        return self._activate(z, getattr(self, "bias_ih", None))

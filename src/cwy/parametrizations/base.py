"""The base of every map from free parameters to orthonormal matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from .._torch import saved_tensors_are_packed
from ..ops._linalg import check_orthonormal, double, nearest_orthogonal, polar

Free = Tensor | tuple[Tensor, ...]
"""Free parameters: one tensor, or a tuple of them."""

PullBack = Callable[[Tensor], Sequence[Tensor]]
"""A backward pass: it takes the gradient of a matrix and returns those of the free parameters."""


def versions_of(free: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return numbers that change when a parameter is written to."""
    return tuple([x._version for x in free if not x.is_inference()])


class Stack(Protocol):
    """Describe weights that are computed together."""

    @property
    def serves(self) -> bool:
        """Return whether the stack may be asked."""

    def weight(self, chart: OrthogonalMap, free: tuple[Tensor, ...]) -> Tensor | None:
        """Return the weight of a map, or None if the map must compute it by itself."""


class OrthogonalMap(nn.Module):
    r"""Map free parameters to matrices ``(*, N, M)`` with orthonormal columns.

    It is a parametrization for ``torch.nn.utils.parametrize``. A subclass defines :meth:`matrix`,
    :meth:`free` (its inverse, or an error with the reason) and :meth:`sample`.

    The weight of a layer may be the matrix transposed (wide weights have orthonormal rows) or a
    convolution kernel, flattened from dimension 1. :meth:`forward` and :meth:`right_inverse` do
    that.

    Args:
        n, m: the matrix is N x M with $N \ge M$. Square if ``m`` is left out.
        batch: leading dimensions of the weight.
        dtype, device: of the weight.
    """

    _like: Tensor

    stacked_buffers: ClassVar[tuple[str, ...] | None] = None
    """The buffers that each matrix of a batch has its own of. None: the map takes no new batch."""

    rotations_only: ClassVar[bool] = False
    """Whether no matrix of determinant -1 can be reached."""

    stack: Stack | None = None
    """Computes the weight together with others, while :class:`cwy.together` is active."""

    kept: object = None
    """A weight that a checkpointed region used. Its recomputation asks for it again."""

    recomputed: tuple[int, ...] | None = None
    """The versions of the free parameters when a checkpointed region last computed the weight.

    Its recomputation does so again. So no stack may serve the map in such a region, until the
    parameters change.
    """

    given: Tensor | None = None
    """The weight, inside a compiled program that computes all weights of a kind at once."""

    def __init__(
        self,
        n: int,
        m: int | None = None,
        *,
        batch: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if m is None:
            m = n
        self.n = n
        self.m = m
        self.batch = tuple(batch)
        if not 1 <= self.m <= self.n:
            raise ValueError(
                f"{self._call}: expected 1 <= M <= N. For a wide matrix, map its transpose."
            )
        # Moves with the module, so that new samples follow its dtype and device.
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.wide = False
        self.kernel: torch.Size | None = None
        self._start: Free | None = None
        self._registered = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a forward pass, not to the map."""
        state = dict(self.__dict__)
        for name in ("stack", "kept", "recomputed", "given"):
            state.pop(name, None)
        return state

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def _call(self) -> str:
        """Return how errors name the map."""
        return f"{type(self).__name__}(n={self.n}, m={self.m})"

    def matrix(self, *free: Tensor) -> Tensor:
        """Return the matrix ``(*, N, M)`` of the free parameters."""
        raise NotImplementedError

    def free(self, matrix: Tensor) -> Free:
        """Return free parameters whose matrix this is, or raise if it can't be reached."""
        raise NotImplementedError

    def sample(self) -> Free:
        """Return free parameters drawn at random: the method's default initial value."""
        raise NotImplementedError

    def start(self) -> Free:
        """Return free parameters of the default initial value.

        Unlike :meth:`sample`, it may set the map's own state.
        """
        return self.sample()

    def _times(self, free: tuple[Tensor, ...], x: Tensor, adjoint: bool) -> Tensor:
        """Return the matrix, or its adjoint, times each vector of x."""
        matrix = self.matrix(*free)
        if adjoint:
            matrix = matrix.mH
        rows = x.reshape(*self.batch, -1, x.shape[-1]) @ matrix.mT
        return rows.reshape(*x.shape[:-1], matrix.shape[-2])

    def forward(self, *free: Tensor) -> Tensor:
        """Return the weight of the free parameters."""
        if self.given is not None:
            return self.given
        # A compiler must not see the stack: it would guard its program by it.
        if torch.compiler.is_compiling():
            return self.compute(*free)
        if self.stack is not None:
            weight = self.stack.weight(self, free)
            if weight is not None:
                return weight
        elif saved_tensors_are_packed():
            self.recomputed = versions_of(free)
        return self.compute(*free)

    def compute(self, *free: Tensor) -> Tensor:
        """Return the weight of the free parameters, computed for this map alone."""
        weight = self.matrix(*free)
        if self.wide:
            # Contiguous, as layers expect their weights.
            weight = weight.mH.resolve_conj().contiguous()
        if self.kernel is None:
            return weight
        return weight.reshape(self.kernel)

    def matrix_and_pull_back(self, *free: Tensor) -> tuple[Tensor, PullBack] | None:
        """Return the matrix and its backward pass, without a graph.

        None where only autograd knows the derivative, as for most maps.
        """
        return None

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Return a weight as matrices ``(*, rows, columns)``. Kernels are flattened."""
        if self.kernel is None:
            return weight
        return weight.flatten(1)

    def _tall(self, weight: Tensor) -> Tensor:
        """Return a weight as matrices ``(*, N, M)``, or raise if its kind or shape does not fit."""
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"{self._call}: expected a torch.Tensor as weight, got {type(weight).__name__}."
            )
        if weight.is_meta:
            raise ValueError(
                f"{self._call}: a matrix on the meta device has no values. "
                "Pass one on a real device."
            )
        if weight.is_complex() and not self.dtype.is_complex:
            raise ValueError(
                f"{self._call}: the weight is real and can't become {weight.dtype}. Assign Q.real."
            )
        matrix = self.as_matrix(weight.detach().to(device=self.device))
        if self.wide:
            matrix = matrix.mH
        if matrix.shape != (*self.batch, self.n, self.m):
            raise ValueError(
                f"{self._call}: expected a weight of shape {self._weight_shape()}, "
                f"got {tuple(weight.shape)}."
            )
        return matrix

    def _weight_shape(self) -> tuple[int, ...]:
        if self.kernel is not None:
            return tuple(self.kernel)
        if self.wide:
            return (*self.batch, self.m, self.n)
        return (*self.batch, self.n, self.m)

    def right_inverse(self, weight: Tensor) -> Free:
        """Return the free parameters of a weight, which ``layer.weight = Q`` stores.

        The signs or the base that it needs become the map's own.
        """
        if self._start is not None:
            return self._start
        # torch refuses to assign a Parameter, so that one comes only from a registration.
        registering = isinstance(weight, nn.Parameter)
        if registering and self._registered:
            return self._join(weight)
        free = self._inverse(weight)
        self._registered = self._registered or registering
        return free

    def _join(self, weight: Tensor) -> Free:
        """Return free parameters for another module that registers this map.

        The map's own state must stay. ``parametrize.transfer_parametrizations_and_params``
        registers the map again and then shares the free parameters.
        """
        state = [buffer.clone() for buffer in self.buffers()]
        try:
            free = self._inverse(weight)
        except ValueError:
            return self.sample()
        changed = False
        for buffer, before in zip(self.buffers(), state, strict=True):
            if not torch.equal(buffer, before):
                buffer.copy_(before)
                changed = True
        if changed:
            return self.sample()
        return free

    def _inverse(self, weight: Tensor) -> Free:
        """Return the free parameters of an orthogonal weight."""
        matrix = self._tall(weight)
        check_orthonormal(self._call, matrix)
        if torch.promote_types(matrix.dtype, self.dtype) != matrix.dtype:
            # Orthogonal as far as its dtype can tell is not yet so in a wider one.
            matrix = nearest_orthogonal(double(matrix))
        return self.free(matrix.to(dtype=self.dtype, device=self.device))

    def nearest(self, weight: Tensor) -> Free:
        """Return free parameters of the orthogonal matrix nearest to a weight.

        Raises if the method can't reach it.
        """
        matrix, distance = polar(self._call, self._tall(weight))
        return self._free_near(matrix.to(dtype=self.dtype, device=self.device), distance)

    def _free_near(self, matrix: Tensor, distance: float) -> Free:
        """Return free parameters of a matrix at this distance from the weight that is wanted."""
        return self.free(matrix)

    def multiply(self, *free_and_x: Tensor) -> Tensor:
        """Return the weight times each vector of ``x (*, ..., columns)``: ``multiply(free, x)``.

        Methods that can do so multiply without forming the weight.
        """
        *free, x = free_and_x
        columns = self.m
        if self.wide:
            columns = self.n
        if x.shape[-1] != columns:
            raise ValueError(
                f"{self._call}.multiply: x must be (*, ..., {columns}), got {tuple(x.shape)}."
            )
        return self._times(tuple(free), x, self.wide)

    @contextmanager
    def starting_at(self, free: Free) -> Iterator[None]:
        """Register the map with these free parameters, whatever the weight is."""
        self._start = free
        try:
            yield
            self._registered = True
        finally:
            self._start = None

    def _between(self, d: Tensor, x: Tensor) -> Tensor:
        """Return ``d (*, K)`` with room for the dimensions of ``x (*, ..., N)`` between."""
        return d.reshape(*self.batch, *[1] * (x.dim() - 1 - len(self.batch)), d.shape[-1])

    def extra_repr(self) -> str:
        return f"n={self.n}, m={self.m}"


class SquareMap(OrthogonalMap):
    """Map free parameters onto square matrices."""

    def __init__(self, n: int, m: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        if self.m != self.n:
            raise ValueError(
                f"{self._call}: {type(self).__name__} is square. For {self.n} x {self.m} use TCWY."
            )


class ComplexMap(SquareMap):
    """Map onto unitary matrices only, as :meth:`_times` defines. The dtype is complex."""

    def __init__(self, n: int, m: int | None = None, **like) -> None:
        if like.get("dtype") is None:
            like["dtype"] = torch.get_default_dtype().to_complex()
        super().__init__(n, m, **like)
        if not self.dtype.is_complex:
            raise TypeError(
                f"{self._call}: expected a complex dtype, got {self.dtype}. "
                "For real matrices use CWY."
            )

    def matrix(self, *free: Tensor) -> Tensor:
        eye = torch.eye(self.n, dtype=self.dtype, device=free[0].device).expand(*self.batch, -1, -1)
        return self._times(free, eye, False).mT

    def _turns(self, angle: Tensor) -> Tensor:
        """Return the numbers of modulus 1 at these angles."""
        # module.to(torch.complex64) makes every parameter complex, the angles too.
        if angle.is_complex():
            angle = angle.real
        # module.double() makes only the angles double.
        angle = angle.to(self._like.real.dtype)
        return torch.polar(torch.ones_like(angle), angle)

"""Give torch's private names a home, and each a word for what it asks.

Torch may drop or change these names in any release. ``tests/test_torch_names.py`` checks that each
is there and means what this file states. Most are plain aliases, which cost what torch's own cost
and which a compiler recognizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan, scan_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function, forward_ad
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_map_only

__all__ = [
    "ConvNd",
    "FakeTensorMode",
    "allow_compilations",
    "backward_number",
    "below_autograd",
    "dispatch_mode_count",
    "eigh_op",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_div",
    "foreach_mul_",
    "foreach_norm",
    "forward_mode_is_active",
    "fourier_op",
    "gpu_index",
    "gpu_stream",
    "has_hooks",
    "has_storage",
    "load_state_dict_pre_hooks",
    "originals",
    "own_child",
    "own_parameter",
    "parametrizations_are_cached",
    "plain_apply",
    "saved_tensors_are_packed",
    "scan",
    "scan_op",
    "solve_op",
    "transform_is_active",
    "tree_map_only",
    "unparametrized_class",
    "unsafe_view",
    "with_lazy_conjugation",
]

unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = torch.ops.aten._unsafe_view
"""Return a tensor in another shape, with its memory. It does not count as a view for autograd."""

transform_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether a transform of ``torch.func`` runs, such as ``vmap`` or ``grad``."""

dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return how many modes see each ATen op that is called, such as ``FlopCounterMode``."""

has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""Return whether a tensor has memory of its own. Tensors that ``vmap`` maps over have none."""

below_autograd: Any = torch._C._AutoDispatchBelowAutograd
"""A context in which ops go past autograd, to the kernels of the device."""

backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that runs in this thread, or -1 outside of one."""


def forward_mode_is_active() -> bool:
    """Return whether tensors may carry tangents of forward-mode AD."""
    return forward_ad._current_level >= 0


def plain_apply(function: type[Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for callers that know that no transform of ``torch.func`` runs.

    To ask again in each call takes a third of its time.
    """
    return cast(Any, super(Function, function)).apply


def saved_tensors_are_packed() -> bool:
    """Return whether hooks see the tensors that are saved for backward, as in a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# A torch that is built without CUDA lacks these two.
gpu_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)  # pyrefly: ignore
"""Return the index of the current GPU, without starting CUDA."""

gpu_stream: Callable[[int], int] = getattr(  # pyrefly: ignore
    torch._C, "_cuda_getCurrentRawStream", None
)
"""Return the address of the current stream of a GPU."""

foreach_clamp_max_: Callable[..., None] = torch._foreach_clamp_max_
foreach_clamp_min_: Callable[..., None] = torch._foreach_clamp_min_
foreach_div: Callable[..., tuple[Tensor, ...]] = torch._foreach_div
foreach_mul_: Callable[..., None] = torch._foreach_mul_
foreach_norm: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm
"""Compute something for each tensor of a list, on a GPU in a few launches for all of them."""

solve_op: Callable[..., Any] = torch.ops.aten._linalg_solve_ex
eigh_op: Callable[..., Any] = torch.ops.aten._linalg_eigh
fourier_op: Callable[..., Any] = torch.ops.aten._fft_c2c
"""The ops that ``linalg.solve``, ``linalg.eigh`` and ``fft.fft`` call, as a mode sees them."""


def originals(chain: ParametrizationList) -> tuple[Tensor, ...]:
    """Return the tensors from which a parametrized weight is computed."""
    if chain.is_tensor:
        return (chain.original,)
    return tuple([getattr(chain, f"original{i}") for i in range(chain.ntensors)])


@contextmanager
def with_lazy_conjugation() -> Iterator[None]:
    """Let ops see that a complex tensor is conjugated, also inside an op of a compiled program.

    There torch leaves out the keys that resolve ``x.conj()``, and the numbers would be wrong.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(torch._C.DispatchKey.Conjugate)
    excluded = excluded.remove(torch._C.DispatchKey.Negative)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def allow_compilations(count: int) -> None:
    """Let ``torch.compile`` keep at least so many programs of one function.

    All compiled modules share a function, so a process with many of them meets torch's limit of 8.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def unparametrized_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a parametrized module had before torch derived another from it."""
    return type(module).__bases__[0]


def own_child(module: nn.Module, name: str) -> nn.Module | None:
    """Return a child of a module by its name, without a look at other attributes."""
    return module._modules.get(name)


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter of a module by its name, without a look at other attributes."""
    return module._parameters.get(name)


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks of this module, or of all modules, see a call of it."""
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    return bool(torch.nn.modules.module._has_any_global_hook())


def parametrizations_are_cached() -> bool:
    """Return whether weights are kept between accesses, inside ``parametrize.cached``."""
    return parametrize._cache_enabled > 0


def load_state_dict_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return a module's hooks that run before it loads a state dict. An entry may be deleted."""
    return cast(dict[int, Any], module._load_state_dict_pre_hooks)

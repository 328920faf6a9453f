"""The ops ``rollout`` and ``conv_rollout``: a whole recurrence over time."""

from .. import dispatch
from . import cuda, cudnn, reference
from . import torch as torch_backend
from .convolved import conv_rollout
from .rollout import rollout

__all__ = ["conv_rollout", "rollout"]

_TORCH = dispatch.Backend(
    "torch",
    torch_backend,
    "the loop and its adjoint by hand, CUDA graphs on a GPU",
    torch_backend.why_not,
)
_REFERENCE = dispatch.Backend(
    "reference",
    reference,
    "a loop and autograd: the definition, for torch.func and callables",
    reference.why_not,
)
dispatch.provide(
    "rollout",
    dispatch.Backend(
        "cuda",
        cuda,
        "on a GPU: kernels that hold Q on chip, up to N = 1024, in low-rank form 2048",
        cuda.why_not,
    ),
    dispatch.Backend(
        "cudnn", cudnn, "relu and tanh on a GPU: torch's fused RNN", cudnn.why_not, cudnn.why_pass
    ),
    _TORCH,
    _REFERENCE,
)
dispatch.provide("conv_rollout", _TORCH, _REFERENCE)

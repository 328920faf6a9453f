"""Products of Householder reflections by the compact WY transform."""

from .. import dispatch
from . import analytic, composite, cuda, reference, registered
from .inverse import householder_vectors
from .wy import WY, cwy_matrix, cwy_multiply, tcwy_matrix, wy_factors

__all__ = ["WY", "cwy_matrix", "cwy_multiply", "householder_vectors", "tcwy_matrix", "wy_factors"]

# Each backend has wy_factors(v), cwy_matrix(v, signs), tcwy_matrix(v, signs) and
# cwy_multiply(v, x, adjoint).
dispatch.provide(
    "wy",
    dispatch.Backend(
        "cuda",
        cuda,
        "eager mode, float32 on an NVIDIA GPU: fused kernels",
        cuda.why_not,
        cuda.why_pass,
    ),
    dispatch.Backend(
        "analytic", analytic, "eager mode: hand-written backward", dispatch.why_only_aten
    ),
    dispatch.Backend(
        "registered",
        registered,
        "torch.compile, torch.export: ops that choose their backend when they run",
        registered.why_not,
    ),
    dispatch.Backend("composite", composite, "torch.func, forward-mode AD: ATen ops"),
    dispatch.Backend(
        "reference", reference, "one reflection at a time: the definition, for checking"
    ),
)

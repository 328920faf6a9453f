"""Checks of tensors and of signs that every function makes."""

import torch
from torch import Tensor

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def check_tensor(call: str, name: str, x: Tensor) -> None:
    """Raise unless ``x`` is a dense tensor of a dtype that the library computes in."""
    check_dense(call, name, x)
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{call}: {name} must be float16 to float64, bfloat16, complex64 or complex128, "
            f"got {x.dtype}. Convert it, e.g. with .float()."
        )


def check_dense(call: str, name: str, x: Tensor) -> None:
    """Raise if ``x`` is nested or sparse."""
    if x.is_nested:
        raise TypeError(
            f"{call}: {name} must not be nested. "
            "Use torch.nested.to_padded_tensor, or one call for each part."
        )
    if x.layout != torch.strided:
        raise TypeError(f"{call}: {name} must be dense, got {x.layout}. Use .to_dense().")


def wrong_sign(signs: Tensor) -> str | None:
    """Return the first sign that is not ±1 (complex: of modulus 1), or None. It reads values."""
    if signs.is_complex():
        right = (signs.abs() - 1).abs() <= 8 * torch.finfo(signs.dtype).eps
    else:
        right = signs.abs() == 1
    if right.all():
        return None
    return str(signs[~right][0].item())


def sign_error(call: str, wrong: str) -> ValueError:
    """Return the error for signs that :func:`wrong_sign` found wrong."""
    return ValueError(
        f"{call}: signs must be ±1 (complex: of modulus 1), got {wrong}. Use torch.sgn(signs)."
    )


def wrong_sign_in(state: dict[str, Tensor], prefix: str) -> str | None:
    """Return an error if the signs of a state dict are not ±1, or None."""
    key = f"{prefix}signs"
    signs = state.get(key)
    if not isinstance(signs, Tensor) or signs.is_meta:
        return None
    wrong = wrong_sign(signs)
    if wrong is None:
        return None
    return f"{key} must be ±1, got {wrong}: the file is damaged, or of another model."

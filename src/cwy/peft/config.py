"""The configuration of our adapter type, and the key that PEFT knows the type by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig

from ._versions import SAVES_BIASES

SIDES = ("in", "out", "both")
BIASES = ("none", "all", "householder_only")


class _Type(str):
    """Hold the key of the type: a string with the ``value`` that PEFT reads from its own types."""

    __slots__ = ()

    @property
    def value(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        # PEFT reads the name behind the point of what its own types print.
        return f"PeftType.{self.value}"


HOUSEHOLDER: Any = _Type("HOUSEHOLDER")


def _as_set(names: list[str] | str | None) -> Any:
    if isinstance(names, list):
        return set(names)
    return names


@dataclass
class HouseholderConfig(PeftConfig):
    r"""Configure an adapter that multiplies frozen weights by products of reflections.

    A weight W becomes $P W Q$. P and Q are orthogonal, each a product of ``r`` reflections. A new
    adapter starts at the identity: its vectors come in equal pairs, whose reflections cancel.

    Args:
        r: the number of reflections per side, and per block. It must be even.
        sides: "in" trains Q, "out" trains P and "both" trains the two.
        blocks: if given, P and Q are block-diagonal, with so many blocks of ``r`` reflections. It
            must divide the number of features.
        target_modules: the layers to adapt, as in PEFT: names, a pattern, or "all-linear".
        exclude_modules: the layers to leave out.
        init_weights: if False, the vectors are random, and the adapter starts at a random rotation.
        layers_to_transform: the indices of the layers to adapt.
        layers_pattern: the name of the list of layers that the indices count.
        bias: "none", "all" or "householder_only": the biases that are trained.
        modules_to_save: other modules to train and save.

    Example:
        >>> config = HouseholderConfig(r=16, sides="both", target_modules=["q_proj", "v_proj"])
        >>> config.peft_type.value
        'HOUSEHOLDER'
    """

    r: int = field(default=8, metadata={"help": "reflections per side and block"})
    sides: str = field(default="in", metadata={"help": '"in", "out" or "both"'})
    blocks: int | None = field(default=None, metadata={"help": "blocks on the diagonal"})
    target_modules: list[str] | str | None = field(default=None)
    exclude_modules: list[str] | str | None = field(default=None)
    init_weights: bool = field(default=True, metadata={"help": "start at the identity"})
    layers_to_transform: list[int] | int | None = field(default=None)
    layers_pattern: list[str] | str | None = field(default=None)
    bias: str = field(default="none", metadata={"help": "biases to train"})
    modules_to_save: list[str] | None = field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = HOUSEHOLDER
        self.target_modules = _as_set(self.target_modules)
        self.exclude_modules = _as_set(self.exclude_modules)
        _check_count("r", self.r)
        if self.init_weights and self.r % 2:
            raise ValueError(
                f"HouseholderConfig: r must be even, got {self.r}. The vectors start in equal "
                "pairs, whose reflections cancel."
            )
        if self.blocks is not None:
            _check_count("blocks", self.blocks)
        _check_choice("sides", self.sides, SIDES)
        _check_choice("bias", self.bias, BIASES)
        if self.bias != "none" and not SAVES_BIASES:
            raise ValueError(
                f"HouseholderConfig: bias={self.bias!r} needs a newer PEFT, because this one does "
                "not save the biases. Upgrade it to 0.21, or use bias='none'."
            )
        if isinstance(self.target_modules, str):
            for name in ("layers_to_transform", "layers_pattern"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"HouseholderConfig: {name} can't be used if target_modules is a string."
                    )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("HouseholderConfig: layers_pattern needs layers_to_transform.")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"HouseholderConfig: {name} must be a positive integer, got {value!r}.")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(one) for one in allowed)
        raise ValueError(f"HouseholderConfig: {name} must be one of {choices}, got {value!r}.")

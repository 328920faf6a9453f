"""Keep the settings of a layer.

It prints those that differ from the defaults, and is rebuilt from all of them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..api import bake


class Settings(nn.Module):
    """Keep what a layer was made with.

    A subclass keeps each argument of its constructor as an attribute of that name, as a private
    one, or in ``_options``.
    """

    def reset_parameters(self) -> None:
        """Draw new weights, as the constructor does. Constrained weights stay constrained."""
        like = next(self.parameters())
        fresh = self._fresh(like.device, like.dtype)
        if not parametrize.is_parametrized(self):
            bake(fresh)
        self.load_state_dict(fresh.state_dict(), strict=False)

    def extra_repr(self) -> str:
        shown = []
        for name, argument in self._arguments().items():
            value = self._setting(name)
            if argument.default is argument.empty:
                shown.append(str(value))
            elif isinstance(value, Tensor):
                shown.append(f"{name}=Tensor{tuple(value.shape)}")
            elif value != argument.default:
                shown.append(f"{name}={value!r}")
        dtype = next(self.parameters()).dtype
        if dtype != torch.get_default_dtype():
            shown.append(f"dtype={dtype}")
        return ", ".join(shown)

    def _fresh(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Make a layer of these settings, with newly drawn weights."""
        settings = {name: self._setting(name) for name in self._arguments()}
        return self._maker()(**settings, device=device, dtype=dtype)

    def _maker(self) -> type[nn.Module]:
        """Return the layer's class of this package. Torch and users derive others from it."""
        return next(
            kind for kind in type(self).__mro__ if kind.__module__.startswith(f"{__package__}.")
        )

    def _arguments(self) -> dict[str, inspect.Parameter]:
        """Return the constructor's arguments but for device and dtype, which the weights show."""
        arguments = inspect.signature(self._maker()).parameters
        return {
            name: argument
            for name, argument in arguments.items()
            if name not in ("device", "dtype")
        }

    def _setting(self, name: str) -> Any:
        options = self.__dict__.get("_options", {})
        if name in options:
            return options[name]
        if f"_{name}" in self.__dict__:
            return self.__dict__[f"_{name}"]
        return getattr(self, name)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the state of a constrained layer too, if this one was baked."""
        inside = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        given = [key for key in inside if key.startswith("parametrizations.")]
        if given and not parametrize.is_parametrized(self):
            try:
                made = self._baked(inside)
            except (RuntimeError, ValueError) as error:
                error_msgs.append(f"{prefix}parametrizations: {error}")
                made = {}
            for key in given:
                del state_dict[prefix + key]
            for name, value in made.items():
                state_dict.setdefault(prefix + name, value)
        rest = strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _baked(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the transitions of a constrained layer's state."""
        names = {key.split(".")[1] for key in state if key.startswith("parametrizations.")}
        # A layer of its own computes them, and what it draws at first must not be seen.
        with torch.random.fork_rng(devices=[]):
            fresh = self._fresh("cpu", next(self.parameters()).dtype)
        absent = [
            key
            for key in fresh.load_state_dict(state, strict=False).missing_keys
            if key.startswith("parametrizations.")
        ]
        if absent:
            raise ValueError(f"the state of a constrained layer lacks {', '.join(absent)}.")
        baked = bake(fresh).state_dict()
        return {name: baked[name] for name in names if name in baked}

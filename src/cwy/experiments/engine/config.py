"""Settings of a run: frozen dataclasses with strict keys, as read from a recipe, a file or ``--set key=value``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from traceback import walk_tb
from types import NoneType
from typing import Any, Self, get_args, get_type_hints

SHOWN = 32
"""The most names that an error lists."""


class ConfigError(ValueError):
    """A setting that does not exist, or a value that it can't have; the message says what is allowed."""


@dataclass(frozen=True)
class Config:
    """What every task can be told; a task adds its own fields. Numbers are positive, None is written ``none``.

    Attributes:
        batch_size: examples a step, over all processes together.
        optimizer: "rmsprop", "adam" or "sgd".
        lr, orthogonal_lr: the rates of the free and of the constrained parameters.
        alpha: the smoothing of rmsprop.
        log_every: steps between two lines of the log; between them the host does not wait for the device.
        evaluate_every: steps between two evaluations; None is an epoch, or the end alone where a task has none.
        save_every: steps between two checkpoints.
    """

    batch_size: int = 128
    optimizer: str = field(default="rmsprop", metadata={"choices": ("rmsprop", "adam", "sgd")})
    lr: float = 1e-3
    orthogonal_lr: float = 1e-4
    alpha: float = 0.99
    log_every: int = 20
    evaluate_every: int | None = None
    save_every: int = 500

    def __post_init__(self) -> None:
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata.get("choices")
            if choices and value not in choices:
                raise ConfigError(f"{f.name} must be {one_of(choices)}, got {value!r}.{_near(value, choices)}")
            if isinstance(value, int | float) and not (math.isfinite(value) and (value > 0 or isinstance(value, bool))):
                raise ConfigError(f"{f.name} must be positive and finite, got {value!r}.")

    def with_settings(self, assignments: Iterable[str]) -> Self:
        """This config with ``key=value`` texts applied, each read by the type of its field.

        Example:
            >>> Config().with_settings(["lr=0.5", "evaluate_every=none"]).lr
            0.5
        """
        values = {}
        for text in assignments:
            key, equals, value = (part.strip() for part in text.partition("="))
            if not equals:
                raise ConfigError(f"--set takes key=value, got {text!r}.")
            check_key(type(self), key)
            values[key] = _read(key, _kinds(type(self))[key], value)
        return replace(self, **values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The config that :meth:`to_dict` wrote; an unknown or missing key, or a value of another type, raises."""
        for key, value in values.items():
            check_key(cls, key)
            # JSON writes 1.0 as 1 nowhere, but people do.
            if type(value) not in _kinds(cls)[key] and not (type(value) is int and float in _kinds(cls)[key]):
                raise ConfigError(f"{key} must be {_describe(_kinds(cls)[key])}, got {value!r}.")
        missing = [f.name for f in fields(cls) if f.name not in values and f.default is MISSING]
        if missing:
            raise ConfigError(f"the settings lack {', '.join(missing)}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every setting by its name."""
        return asdict(self)


@contextmanager
def blaming_settings() -> Generator[None]:
    """What the library refuses in here is a mistake in the settings; any other error is one in the code, and stays."""
    try:
        yield
    except (TypeError, ValueError) as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        module = frame.f_globals["__name__"]
        if module.startswith("cwy.experiments.") or not module.startswith("cwy."):
            raise
        raise ConfigError(str(error)) from error


def check_key(cls: type[Config], key: str) -> None:
    """Raises, with the nearest names, unless the config has this key."""
    known = [f.name for f in fields(cls)]
    if key not in known:
        raise ConfigError(f"unknown setting {key!r}.{_near(key, known)} Known: {', '.join(known)}.")


def choose(what: str, name: str, known: Iterable[str]) -> str:
    """The name, if it is known; an error with the nearest ones if not."""
    known = list(known)
    if name not in known:
        more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
        raise ConfigError(f"unknown {what} {name!r}.{_near(name, known)} Known: {', '.join(known[:SHOWN])}{more}.")
    return name


def one_of(names: Iterable[str]) -> str:
    """Names as a choice, for a message."""
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}" if most else last


@cache
def _kinds(cls: type[Config]) -> dict[str, tuple[type, ...]]:
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(cls).items()}


def _read(key: str, kinds: tuple[type, ...], text: str) -> Any:
    if NoneType in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                pass
    if str in kinds:
        return text
    raise ConfigError(f"{key} must be {_describe(kinds)}, got {text!r}.")


def _describe(kinds: tuple[type, ...]) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", NoneType: "none"}
    return " or ".join(words[kind] for kind in kinds)


def _near(name: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""

"""Settings of a run: frozen dataclasses with strict keys, as read from a recipe, a file or ``--set key=value``."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from traceback import walk_tb
from types import NoneType
from typing import Any, Self, get_args, get_type_hints

from ..._hints import did_you_mean

SHOWN = 32
"""The most names that an error lists."""
SHOWN_DIGITS, SHOWN_LETTERS = 40, 200
LARGEST = 10**9
"""The largest whole number that a setting may be."""


NO_MEMORY = (
    r"(?i)out of memory|can't allocate memory|not enough memory|invalid size|overflow|too large"
)
"""How torch's errors begin where a tensor does not fit."""


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
                raise ConfigError(
                    f"{f.name} must be {one_of(choices)}, got {_cut(value)}.{_near(value, choices)}"
                )
            if isinstance(value, int) and value > f.metadata.get("most", LARGEST):
                raise ConfigError(
                    f"{f.name} must be at most {f.metadata.get('most', LARGEST):,}, got {_cut(value)}."
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{f.name} must be positive and finite, got {value!r}.")
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"{f.name} must be positive and finite, got {_cut(value)}.")
            if isinstance(value, str) and not value.isprintable():
                raise ConfigError(
                    f"{f.name} must be a text without control characters, got {_cut(value)}."
                )

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
            check_type(cls, key, value)
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


@contextmanager
def blaming_memory() -> Generator[None]:
    """Name the settings where a run needs more memory than there is."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = (str(error).strip() or "out of memory").splitlines()[0]
        if isinstance(error, RuntimeError) and not re.search(NO_MEMORY, reason):
            raise
        raise ConfigError(
            f"the run needs more memory than there is: {reason[:SHOWN_LETTERS]}. "
            "Smaller sizes, such as batch_size, hidden_size and T, need less."
        ) from error


def check_key(cls: type[Config], key: str) -> None:
    """Raises, with the nearest names, unless the config has this key."""
    known = [f.name for f in fields(cls)]
    if key not in known:
        raise ConfigError(
            f"unknown setting {_cut(key)}.{_near(key, known)} Known: {', '.join(known)}."
        )


def check_type(cls: type[Config], key: str, value: object) -> None:
    """Raise unless a value has the type of the config's field."""
    kinds = _kinds(cls)[key]
    # JSON writes 1.0 as 1 nowhere, but people do.
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        raise ConfigError(f"{key} must be {_describe(kinds)}, got {_cut(value)}.")


def choose(what: str, name: str, known: Iterable[str]) -> str:
    """The name, if it is known; an error with the nearest ones if not."""
    known = list(known)
    if name not in known:
        more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
        raise ConfigError(
            f"unknown {what} {_cut(name)}.{_near(name, known)} Known: {', '.join(known[:SHOWN])}{more}."
        )
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
    raise ConfigError(f"{key} must be {_describe(kinds)}, got {_cut(text)}.")


def _cut(value: object) -> str:
    """Spell out a value, but not all of one that fills the screen."""
    if isinstance(value, int) and abs(value) > 10**SHOWN_DIGITS:
        return "a number too large to show"
    text = repr(value)
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…"


def _describe(kinds: tuple[type, ...]) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a name",
        NoneType: "none",
    }
    return " or ".join(words[kind] for kind in kinds)


def _near(name: object, known: Iterable[str]) -> str:
    """Return a hint with a space before it, or an empty string."""
    hint = did_you_mean(str(name)[:SHOWN_LETTERS], known)
    return f" {hint}".rstrip()

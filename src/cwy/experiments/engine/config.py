"""Settings of a run: frozen dataclasses with strict keys.

They are read from a recipe, from a file or from ``--set key=value``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from functools import cache
from traceback import walk_tb
from types import NoneType
from typing import Any, Self, get_args, get_type_hints

from ..._hints import did_you_mean

SHOWN = 32
"""The most names that an error lists."""
SHOWN_DIGITS = 40
SHOWN_LETTERS = 200
LARGEST: dict[type, float] = {int: 10**9, float: 1e38}
"""The largest number of each type that a setting may be."""
NO_MEMORY = (
    r"(?i)out of memory|can't allocate memory|not enough memory|invalid size|overflow|too large"
)
"""How torch's errors begin where a tensor does not fit."""
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a name",
    NoneType: "none",
}


class ConfigError(ValueError):
    """Report a setting that does not exist, or a value that it cannot have."""


@dataclass(frozen=True)
class Config:
    """Hold the settings of every task. A task adds fields. Numbers are positive, None is ``none``.

    Attributes:
        batch_size: examples per step, over all processes together.
        optimizer: "rmsprop", "adam" or "sgd".
        lr, orthogonal_lr: learning rates of the free and of the constrained parameters.
        alpha: smoothing of rmsprop.
        clip: the largest norm of all gradients together. None clips nothing.
        warmup: steps in which the learning rates rise from zero, linearly. After them the rates
            fall with the inverse square root of the step. None holds the rates.
        log_every: steps between two lines of the log. The host synchronizes only then.
        evaluate_every: steps between two evaluations. None is an epoch, or only the end of a run
            whose task has no epochs.
        patience: evaluations without a better one after which a run ends. None trains to the end.
        save_every: steps between two checkpoints.
    """

    batch_size: int = 128
    optimizer: str = field(default="rmsprop", metadata={"choices": ("rmsprop", "adam", "sgd")})
    lr: float = 1e-3
    orthogonal_lr: float = 1e-4
    alpha: float = 0.99
    clip: float | None = None
    warmup: int | None = None
    log_every: int = 20
    evaluate_every: int | None = None
    patience: int | None = None
    save_every: int = 500

    def __post_init__(self) -> None:
        for one in fields(self):
            _check_value(one, getattr(self, one.name))

    def with_settings(self, assignments: Iterable[str]) -> Self:
        """Return this config with ``key=value`` texts applied, each read by its field's type.

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
            values[key] = _read(key, _types(type(self))[key], value)
        return replace(self, **values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the config that :meth:`to_dict` wrote.

        An unknown or missing key raises, and so does a value of another type.
        """
        for key, value in values.items():
            check_key(cls, key)
            check_type(cls, key, value)
        missing = [f.name for f in fields(cls) if f.name not in values and f.default is MISSING]
        if missing:
            raise ConfigError(f"the settings lack {', '.join(missing)}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return every setting by its name."""
        return asdict(self)


def _check_value(of: Field, value: Any) -> None:
    """Raise unless a field may have this value."""
    choices = of.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(
            f"{of.name} must be {one_of(choices)}, got {_cut(value)}.{_near(value, choices)}"
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(of, value)
    if isinstance(value, str) and not value.isprintable():
        raise ConfigError(
            f"{of.name} must be a text without control characters, got {_cut(value)}."
        )


def _check_number(of: Field, value: float) -> None:
    """Raise unless a number is in the range of its field."""
    below = of.metadata.get("below", math.inf)
    if not 0 < value < below:
        allowed = "positive and finite"
        if below < math.inf:
            allowed = f"above 0 and below {below}"
        hint = ""
        if of.default is None:
            hint = " It may also be none."
        raise ConfigError(f"{of.name} must be {allowed}, got {_cut(value)}.{hint}")
    least = of.metadata.get("least", 0)
    if value < least:
        raise ConfigError(f"{of.name} must be at least {least:,}, got {_cut(value)}.")
    most = of.metadata.get("most", LARGEST[type(value)])
    if value > most:
        raise ConfigError(f"{of.name} must be at most {most:,}, got {_cut(value)}.")


@contextmanager
def blaming_settings() -> Generator[None]:
    """Turn what the library refuses into a mistake in the settings. Other errors stay."""
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
            "Smaller sizes, such as batch_size and hidden_size, and shorter sequences need less."
        ) from error


def check_key(cls: type[Config], key: str) -> None:
    """Raise with the nearest names unless the config has this key."""
    known = [f.name for f in fields(cls)]
    if key not in known:
        raise ConfigError(
            f"unknown setting {_cut(key)}.{_near(key, known)} Known: {', '.join(known)}."
        )


def check_type(cls: type[Config], key: str, value: object) -> None:
    """Raise unless a value has the type of the config's field."""
    types = _types(cls)[key]
    # JSON writes 1.0 as 1 nowhere, but people do.
    if type(value) not in types and not (type(value) is int and float in types):
        raise ConfigError(f"{key} must be {_describe(types)}, got {_cut(value)}.")


def choose(what: str, name: str, known: Iterable[str]) -> str:
    """Return the name if it is known. Otherwise raise with the nearest ones."""
    known = list(known)
    if name in known:
        return name
    listed = ", ".join(known[:SHOWN])
    if len(known) > SHOWN:
        listed += f" and {len(known) - SHOWN} more"
    raise ConfigError(f"unknown {what} {_cut(name)}.{_near(name, known)} Known: {listed}.")


def as_given(value: object) -> str:
    """Return a setting as ``--set`` takes it.

    Example:
        >>> as_given(None), as_given(True), as_given(1.0), as_given("Pairs.tsv")
        ('none', 'true', '1', 'Pairs.tsv')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def one_of(names: Iterable[str]) -> str:
    """Return names as a choice, for a message.

    Example:
        >>> one_of(["adam", "sgd"])
        "'adam' or 'sgd'"
    """
    *most, last = map(repr, names)
    if not most:
        return last
    return f"{', '.join(most)} or {last}"


@cache
def _types(cls: type[Config]) -> dict[str, tuple[type, ...]]:
    """Return the types that each field may have."""
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(cls).items()}


def _read(key: str, types: tuple[type, ...], text: str) -> Any:
    if NoneType in types and text.lower() == "none":
        return None
    if bool in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in types:
            try:
                return number(text)
            except ValueError:
                pass
    if str in types:
        return text
    raise ConfigError(f"{key} must be {_describe(types)}, got {_cut(text)}.")


def _cut(value: object) -> str:
    """Spell out a value, but not all of one that fills the screen."""
    if isinstance(value, int) and abs(value) > 10**SHOWN_DIGITS:
        return "a number too large to show"
    text = repr(value)
    if len(text) > SHOWN_LETTERS:
        return f"{text[:SHOWN_LETTERS]}…"
    return text


def _describe(types: tuple[type, ...]) -> str:
    return " or ".join(TYPE_NAMES[kind] for kind in types)


def _near(name: object, known: Iterable[str]) -> str:
    """Return a hint with a space before it, or an empty string."""
    hint = did_you_mean(str(name)[:SHOWN_LETTERS], known)
    return f" {hint}".rstrip()

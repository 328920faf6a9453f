"""Numbers and lists in words."""

from __future__ import annotations

from collections.abc import Sequence

from .describe import Series


def listed(names: Sequence[str]) -> str:
    """Names as a sentence lists them.

    Example:
        >>> listed(["cwy", "hr", "lstm"])
        'cwy, hr and lstm'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def say(chosen: Sequence[Series], everyone: Sequence[Series], does: str, do: str) -> str:
    """The chosen series and their verb; a method whose variants are all chosen goes by its name alone."""
    whole = {one.method for one in everyone} - {one.method for one in everyone if one not in chosen}
    names = list(dict.fromkeys(one.method if one.method in whole else one.label for one in chosen))
    return f"{listed(names)} {do if names[1:] else does}"


def number(value: float) -> str:
    """Three digits, without the zeros of a short exponent.

    Example:
        >>> number(0.0203871), number(1.234e-05), number(0)
        ('0.0204', '1.23e-5', '0')
    """
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+")


def duration(seconds: float) -> str:
    """A time in the units of its size.

    Example:
        >>> duration(4.26), duration(75), duration(7260)
        ('4.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def percent(value: float) -> str:
    """A fraction as the field writes accuracies.

    Example:
        >>> percent(0.97781)
        '97.78%'
    """
    return f"{value:.2%}"

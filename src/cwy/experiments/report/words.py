"""Numbers and lists in words."""

from __future__ import annotations

from collections.abc import Sequence

from .describe import Series


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them.

    Example:
        >>> listed(["cwy", "hr", "lstm"])
        'cwy, hr and lstm'
    """
    *most, last = names or [""]
    if not most:
        return last
    return f"{', '.join(most)} and {last}"


def say(chosen: Sequence[Series], everyone: Sequence[Series], does: str, do: str) -> str:
    """Return the chosen series and their verb.

    If all variants of a method are chosen, only the method is named.
    """
    whole = {one.method for one in everyone} - {one.method for one in everyone if one not in chosen}
    names: list[str] = []
    for one in chosen:
        name = one.label
        if one.method in whole:
            name = one.method
        if name not in names:
            names.append(name)
    verb = does
    if len(names) > 1:
        verb = do
    return f"{listed(names)} {verb}"


def number(value: float) -> str:
    """Return three digits, without the zeros of a short exponent.

    Example:
        >>> number(0.0203871), number(1.234e-05), number(0)
        ('0.0204', '1.23e-5', '0')
    """
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+")


def duration(seconds: float) -> str:
    """Return a time in units of its size.

    Example:
        >>> duration(4.26), duration(75), duration(7260)
        ('4.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def percent(value: float) -> str:
    """Return a fraction as the field writes accuracies.

    Example:
        >>> percent(0.97781)
        '97.78%'
    """
    return f"{value:.2%}"

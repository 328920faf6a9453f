"""What this package needs of PEFT. An installed version that does not fit raises here."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

OLDEST = (0, 18)
INSTALL = 'pip install "cwy[peft]"'

try:
    import peft.mapping
    from peft.tuners import tuners_utils
    from peft.utils import PeftType

    import peft
except ImportError as error:
    raise ImportError(
        f"cwy.peft needs PEFT, which can't be imported: {error}. Install it with {INSTALL}."
    ) from error


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _missing() -> list[str]:
    """Return the names that this package uses and PEFT lacks."""
    names = []
    for kind in ("CONFIG", "TUNER", "PREFIX", "MIXED_MODEL"):
        mapping = f"PEFT_TYPE_TO_{kind}_MAPPING"
        if not isinstance(getattr(peft.mapping, mapping, None), dict):
            names.append(f"peft.mapping.{mapping}")
    used = ("BaseTuner", "BaseTunerLayer", "check_adapters_to_merge")
    lacking = [name for name in used if not hasattr(tuners_utils, name)]
    names.extend(f"peft.tuners.tuners_utils.{name}" for name in lacking)
    if not hasattr(PeftType, "HRA"):
        names.append("peft.PeftType.HRA")
    return names


def _check(version: str, missing: list[str]) -> None:
    """Raise ImportError unless PEFT has this version or a newer one, and all names."""
    if _release(version) < OLDEST:
        raise ImportError(
            f"cwy.peft needs PEFT 0.18 or newer, found {version}. Upgrade it with {INSTALL}."
        )
    if missing:
        raise ImportError(
            f"cwy.peft does not fit PEFT {version}, which has no {', '.join(missing)}. "
            "Install PEFT 0.21, or a newer version of cwy."
        )


_check(importlib.metadata.version("peft"), _missing())

#: Whether PEFT saves what it trains besides the adapters of any type, such as biases.
SAVES_BIASES = hasattr(tuners_utils.BaseTuner, "_get_adapter_state_dict")


def announce(key: str) -> None:
    """Let a PEFT that saves only the types of its own enumeration save another one, too.

    Newer versions look the type up in the mapping of tuners.
    """
    if SAVES_BIASES or key in list(PeftType):
        return
    member: Any = str.__new__(PeftType, key)
    member._name_ = key
    member._value_ = key
    PeftType._member_names_.append(key)
    PeftType._member_map_[key] = member
    PeftType._value2member_map_[key] = member

"""Adds the state-dict keys of new methods to state_dict_keys.json. Keys that are there are never
changed.
"""

import json

from tests.helpers.methods import FIRST, GOLDEN, make


def main() -> None:
    frozen = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for case in FIRST:
        name, size, dtype = case.values
        frozen.setdefault(
            f"{name} {'complex' if dtype.is_complex else 'real'}",
            list(make(name, size, dtype).state_dict()),
        )
    GOLDEN.write_text(json.dumps(frozen, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

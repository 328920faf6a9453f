"""Write a copy of the encoder in half precision, half as large, for machines without a network.

``python -m cwy.experiments.retrieval.half FOLDER``
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from ..._atomic import write
from .weights import FILES, WEIGHTS, find, tensors


def write_half(target: Path, named: str | None = None) -> Path:
    """Write the files of the encoder with weights in float16, and return the folder."""
    from safetensors.torch import save_file

    source = find(named)
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source.folder / name, target / name)
    halves = {}
    for name, x in tensors(source.folder).items():
        if x.is_floating_point():
            x = x.half()
        halves[name] = x
    save_file(halves, target / WEIGHTS)
    note = json.dumps({"made from sha256": source.digest, "stored in": "float16"}, indent=1)
    write(target / "source.json", note.encode())
    return target


if __name__ == "__main__":
    print(write_half(Path(sys.argv[1])))

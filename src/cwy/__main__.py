"""``python -m cwy``: the command ``cwy``, for torchrun."""

from .cli import main

main()

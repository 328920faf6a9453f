"""A small language for translation, and networks that learn it fast."""

import torch

ENGLISH = ["a", "big", "red", "dog", "cat", "house", "sees", "has", "my", "your", "old", "new"]
SPANISH = [
    "un",
    "gran",
    "rojo",
    "perro",
    "gato",
    "casa",
    "ve",
    "tiene",
    "mi",
    "tu",
    "viejo",
    "nuevo",
]
TINY = (
    "pairs=none",
    "hidden_size=16",
    "embedding_size=8",
    "batch_size=32",
    "reflections=none",
    "epochs=2",
)
"""Settings of a network that takes a second or two."""


def write_pairs(file):
    """Write sentences whose translation is word by word."""
    numbers = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(700):
        length = int(torch.randint(2, 6, (1,), generator=numbers))
        chosen = torch.randint(len(ENGLISH), (length,), generator=numbers).tolist()
        english = " ".join(ENGLISH[i] for i in chosen)
        spanish = " ".join(SPANISH[i] for i in chosen)
        rows.append(f"{english}.\t{spanish}.\n")
    file.write_text("".join(rows))

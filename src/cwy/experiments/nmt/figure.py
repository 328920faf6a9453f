"""Draw the attention of a translation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor


def attention_map(
    weights: Tensor, source: Sequence[str], target: Sequence[str], path: Path
) -> bool:
    """Draw ``weights (T, S)``, one row per word of the translation, to a PNG, SVG or PDF file.

    Returns:
        Whether the font of the figure has every character.
    """
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(1.8 + 0.55 * len(source), 1.4 + 0.42 * len(target)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(source)), source, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(target)), target)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("translation")
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source")
    figure.colorbar(image, label="attention", shrink=0.8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(path, dpi=160)
    has_font = True
    for warning in caught:
        if "missing from font" in str(warning.message):
            has_font = False
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return has_font

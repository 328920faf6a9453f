"""Ship a font for maths with the site: STIX Two Math, cut down to the letters that pages use."""

from __future__ import annotations

import html
import re
from importlib.metadata import distribution
from pathlib import Path

from fontTools import subset

NAME = "assets/stix-two-math.woff"


def ship(site: Path) -> None:
    """Write the font into a built site. Its license, the OFL, stays in it."""
    used: set[str] = set()
    for page in site.rglob("*.html"):
        for formula in re.findall(r"<math.*?</math>", page.read_text(encoding="utf-8"), re.DOTALL):
            used |= set(html.unescape(re.sub(r"<[^>]*>", "", formula)))
    options = subset.Options(flavor="woff", name_IDs=["*"], layout_features=["*"])
    source = distribution("ziamath").locate_file("ziamath/fonts/STIXTwoMath-Regular.ttf")
    font = subset.load_font(str(source), options, lazy=False)
    cut = subset.Subsetter(options)
    cut.populate(text="".join(_with_italics(used)))
    cut.subset(font)
    subset.save_font(font, str(site / NAME), options)


def _with_italics(used: set[str]) -> set[str]:
    """Add the italic forms in which MathML shows single letters."""
    found = set(used)
    for letter in used:
        if "A" <= letter <= "Z":
            found.add(chr(0x1D434 + ord(letter) - ord("A")))
        if "a" <= letter <= "z":
            found.add(chr(0x1D44E + ord(letter) - ord("a")))
        if "Α" <= letter <= "Ω":
            found.add(chr(0x1D6E2 + ord(letter) - ord("Α")))
        if "α" <= letter <= "ω":
            found.add(chr(0x1D6FC + ord(letter) - ord("α")))
    # Browsers draw roots, fences and accents from glyphs that the formulas do not spell out.
    return found | set("ℎϵϕϱ∂√‖|∣∥()[]{}⟨⟩‾¯^~")

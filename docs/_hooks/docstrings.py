"""Put our docstrings in griffe's words, for the API pages."""

import re
import textwrap

import griffe


class Docstrings(griffe.Extension):
    """Rewrite docstrings before they are parsed.

    "Example:" is a section, a display its own paragraph, "Returns:" plain prose. Attributes that
    share a line, as in "median, q1, q3: …", have a line each.
    """

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Rewrite the docstring of one object."""
        if not obj.docstring:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        prose = r"^(Returns|References):\n((?:    .*\n?)+)"
        text = re.sub(prose, _as_prose, text, flags=re.MULTILINE)
        display = r"\n(\$\$.*?\$\$)(\n|$)"
        obj.docstring.value = re.sub(display, r"\n\n\1\n\n", text, flags=re.DOTALL)


def _as_prose(section: re.Match) -> str:
    return f"**{section[1]}:** {textwrap.dedent(section[2])}"

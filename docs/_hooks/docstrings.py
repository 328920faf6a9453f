"""Put our docstrings in griffe's words, for the API pages."""

import re
import textwrap

import griffe


class Docstrings(griffe.Extension):
    """Rewrite docstrings before they are parsed.

    "Example:" is a section, a display its own paragraph, "Returns:" plain prose. Attributes become
    a list, since several may share a line, as in "median, q1, q3: …".
    """

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """Find the functions of ``cwy.ops`` whose modules have the same name."""
        if pkg.name != "cwy":
            return
        ops = pkg["ops"]
        targets = {
            "rollout": "cwy.ops.recurrence.rollout.rollout",
            "reflect": "cwy.ops.reflect.reflect.reflect",
        }
        for name, target in targets.items():
            # The alias hides the module, so that griffe does not come to the function by itself.
            _rewrite(pkg[target.removeprefix("cwy.")])
            ops.set_member(name, griffe.Alias(name, target, parent=ops))

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Rewrite the docstring of one object."""
        _rewrite(obj)


def _rewrite(obj: griffe.Object | griffe.Alias) -> None:
    if not obj.docstring:
        return
    text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
    prose = r"^(Returns|Yields|References):\n((?:    .*\n?)+)"
    text = re.sub(prose, _as_prose, text, flags=re.MULTILINE)
    attributes = r"^Attributes:\n((?:(?:    .*)?\n?)+)"
    text = re.sub(attributes, _as_list, text, flags=re.MULTILINE)
    display = r"\n(\$\$.*?\$\$)(\n|$)"
    obj.docstring.value = re.sub(display, r"\n\n\1\n\n", text, flags=re.DOTALL)


def _as_prose(section: re.Match) -> str:
    return f"**{section[1]}:** {textwrap.dedent(section[2])}"


def _as_list(section: re.Match) -> str:
    items = []
    for line in textwrap.dedent(section[1]).splitlines():
        name, colon, words = line.partition(": ")
        if colon and not line.startswith(" "):
            names = ", ".join(f"`{one}`" for one in name.split(", "))
            items.append(f"- {names}: {words}")
        else:
            items.append(line)
    lines = "\n".join(items)
    return f"**Attributes:**\n\n{lines}\n"

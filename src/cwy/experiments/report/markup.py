"""HTML from templates that escape every value. Only their own output is taken as HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> Markup:
    """Fill in a template of this folder. Texts among the values are escaped, ``Markup`` is not."""
    return Markup(_TEMPLATES.get_template(template).render(values))  # noqa: S704

"""Adapters for Hugging Face PEFT: orthogonal fine-tuning by products of Householder reflections.

Importing this package adds :class:`HouseholderConfig` to PEFT's types. :func:`install` makes PEFT's
own HRA run on the ops of this library. :func:`save_as_lora` writes an adapter as a LoRA.
"""

from . import _versions as _versions  # raises where PEFT is missing or does not fit
from .config import HouseholderConfig
from .export import save_as_lora
from .hra import install, uninstall
from .layer import HouseholderLayer
from .model import HouseholderModel

__all__ = [
    "HouseholderConfig",
    "HouseholderLayer",
    "HouseholderModel",
    "install",
    "save_as_lora",
    "uninstall",
]

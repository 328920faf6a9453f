"""Print translations: the command ``cwy translate``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten

from ..engine.config import ConfigError
from .interpreter import Interpreter, Say, Translated

NOTED_LETTERS = 60
"""The most letters of a sentence in a note on it."""


def translate(
    run: Path,
    texts: Sequence[str] | None,
    beams: int,
    attention: Path | None,
    held_out: int | None,
    device: str,
    say: Say,
) -> None:
    """Print a translation of every text, or of every line of stdin.

    Args:
        run: the folder of the run that translates.
        texts: sentences, or None for the lines of stdin. A blank line stays blank.
        beams: width of the beam search, 1 for greedy.
        attention: file to draw the attention of one sentence to.
        held_out: number of validation pairs of the run to print, in place of texts. A run without
            them prints test pairs.
        device: where to translate.
        say: prints notes.
    """
    if attention is not None:
        _check_picture(attention, texts)
    if held_out is not None and texts:
        raise ValueError(
            "--held-out translates the run's own pairs. Leave the sentences out, or the option."
        )
    interpreter = Interpreter(run, device, say)
    if held_out is not None:
        _print_held_out(interpreter, held_out, beams)
        return
    for text in texts or _lines():
        translation = interpreter.translate(text, beams)
        beginning = shorten(text, NOTED_LETTERS, placeholder=" …")
        for note in translation.notes:
            say(f"{beginning!r}: {note}.")
        print(translation.target, flush=True)
        if attention is not None:
            has_font = _draw(interpreter, translation, attention)
            say(f"the attention: {attention}")
            if not has_font:
                say("the font of the figure lacks some characters, which are boxes there.")


def _print_held_out(interpreter: Interpreter, count: int, beams: int) -> None:
    for number, pair in enumerate(interpreter.held_out(count, beams)):
        source = " ".join(pair.translation.source)
        print(f"{number}\t{source}\t{pair.translation.target}\t{pair.reference}")


def _draw(interpreter: Interpreter, translation: Translated, path: Path) -> bool:
    """Draw the attention. Return whether the font has every character."""
    if not translation.source:
        raise ConfigError("--attention: the sentence has no words, so there is nothing to draw.")
    try:
        return interpreter.draw(translation, path)
    except OSError as error:
        raise ConfigError(f"cannot write --attention {path}: {error.strerror}.") from error


def _lines() -> Iterator[str]:
    """Yield each line of stdin when it arrives. Raise at the first that is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            byte = f"byte {line[error.start]:#04x} at {error.start}"
            raise ConfigError(
                f"line {number} of the input is not UTF-8: {byte}. Convert it first."
            ) from None


def _check_picture(path: Path, texts: Sequence[str] | None) -> None:
    if len(texts or ()) != 1:
        raise ConfigError("--attention draws one sentence: give one, in quotes.")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--attention must end in .png, .svg or .pdf, got {path.name}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--attention: there is no folder {path.parent}.")

"""Print translations: the command ``cwy translate``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..engine.config import ConfigError
from .interpreter import Interpreter, Say


def translate(
    run: Path, texts: Sequence[str] | None, beams: int, attention: Path | None, held_out: int | None, device: str, say: Say
) -> None:  # fmt: skip
    """Prints a translation of every text, or of every line of stdin; a blank line stays one."""
    if attention is not None:
        _check_picture(attention, texts)
    if held_out is not None and texts:
        raise ValueError(
            "--held-out translates the run's own pairs. Leave the sentences out, or the option."
        )
    interpreter = Interpreter(run, device, say)
    if held_out is not None:
        for number, (spoken, reference) in enumerate(interpreter.held_out(held_out, beams)):
            print(f"{number}\t{' '.join(spoken.source)}\t{spoken.target}\t{reference}")
        return
    for text in texts or _lines():
        spoken = interpreter.translate(text, beams)
        for note in spoken.notes:
            say(f"{text.strip()!r}: {note}.")
        print(spoken.target, flush=True)
        if attention is not None:
            if not spoken.source:
                raise ConfigError(
                    "--attention: the sentence has no words, so there is nothing to draw."
                )
            try:
                interpreter.draw(spoken, attention)
            except OSError as error:
                raise ConfigError(
                    f"cannot write --attention {attention}: {error.strerror}."
                ) from error
            say(f"the attention: {attention}")


def _lines() -> Iterator[str]:
    """Those of stdin, each when it comes; one that is no text leaves those before it translated."""
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

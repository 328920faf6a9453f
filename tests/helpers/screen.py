"""A terminal of 80 columns, as a person sees it."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COLUMNS, ROWS = 80, 60
CODE = re.compile(r"\x1b\[\??(\d*)(?:;\d+)*([A-Za-z])")


@dataclass(frozen=True)
class Seen:
    """What a command left on the screen, and its exit status."""

    lines: list[str]
    status: int

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def screen(output: str) -> list[str]:
    """The lines that output leaves: carriage returns, wrapping, cursor up and erase are what rich
    uses.
    """
    rows, row, column, at = [""], 0, 0, 0
    while at < len(output):
        code = CODE.match(output, at)
        if code:
            at = code.end()
            count = int(code[1] or 1)
            if code[2] == "A":
                row = max(0, row - count)
            elif code[2] == "K":
                rows[row] = ""
            continue
        letter = output[at]
        at += 1
        if letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
        elif letter.isprintable():
            if column == COLUMNS:
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row].ljust(column)[:column] + letter + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
    return [line.rstrip() for line in rows]


def watch(
    command: list[str], cwd: Path, enough: Callable[[str], bool] = lambda text: False, **env: str
) -> Seen:
    """Run a command at a terminal; press Ctrl-C when the screen shows enough."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    given = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    given |= {"TERM": "xterm", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1", **env}
    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    # A session of its own, so that the terminal is its terminal and Ctrl-C reaches it.
    take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    process = subprocess.Popen(
        command, cwd=cwd, env=given, start_new_session=True, preexec_fn=take, **pipes
    )
    os.close(theirs)
    output, pressed, deadline = b"", False, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            try:
                part = os.read(ours, 4096)
            except OSError:
                break  # the last of them has closed it
            output += part
            if not pressed and enough("\n".join(screen(output.decode(errors="ignore")))):
                os.write(ours, b"\x03")
                pressed = True
        status = process.wait(60)
    finally:
        process.kill()
        os.close(ours)
    return Seen(screen(output.decode()), status)

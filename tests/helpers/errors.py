"""How commands fail: with a status and one line that names the mistake, never with a traceback."""

import subprocess


def assert_one_line(
    done: subprocess.CompletedProcess[str], message: str, *, stdout: str | None = ""
) -> None:
    """Assert that a command failed with one line on stderr, which holds the message.

    Args:
        done: the command.
        message: a part of the line.
        stdout: what it printed before. None is anything.
    """
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    if stdout is not None:
        assert done.stdout == stdout

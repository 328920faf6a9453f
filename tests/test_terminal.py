"""Tests of what all commands share: here, how messages are folded."""

import pytest

from cwy import terminal

MESSAGE = "cwy: stopped at step 12, and saved. To go on: cwy resume runs/copying/small-cwy-seed0"


@pytest.mark.parametrize("width", [None, 0, 1])
def test_a_terminal_without_a_width_gets_the_message_as_it_is(width):
    assert terminal.fold(MESSAGE, width) == MESSAGE


@pytest.mark.parametrize("width", [2, 40, 200])
def test_folding_changes_only_where_lines_end(width):
    assert terminal.fold(MESSAGE, width).split() == MESSAGE.split()

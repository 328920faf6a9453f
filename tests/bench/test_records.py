"""The records under results/ are light, and the library reads all of them."""

from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"


def test_records_hold_no_picture_that_a_build_can_draw():
    pictures = sorted(RESULTS.rglob("*.png"))
    assert len(pictures) <= 12
    assert {path.name for path in pictures} == {"frames.png"}

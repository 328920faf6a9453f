"""The records under results/ are light, and the library reads all of them."""

import json
import re
from pathlib import Path

import pytest

from cwy.bench.output.rows import read, write
from cwy.bench.suites import BENCHES, parse_sizes

RESULTS = Path(__file__).parents[2] / "results"
ROWS = sorted((RESULTS / "bench").glob("*/*.csv"))


def test_records_hold_no_picture_that_a_build_can_draw():
    pictures = sorted(RESULTS.rglob("*.png"))
    assert len(pictures) <= 12
    assert {path.name for path in pictures} == {"frames.png"}


@pytest.mark.parametrize("path", ROWS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_committed_rows_are_read_and_written_as_they_are(path, tmp_path):
    found = read(path)
    assert found
    assert any(one.status == "ok" for one in found)
    assert len({(one.entry, one.size) for one in found}) == len(found)
    for one in found:
        where = one.context
        assert where.device_name
        assert where.commit
        assert "dirty" not in where.commit
        assert re.match(rf"(XLA_FLAGS=\S+ )?cwy bench {one.bench} ", where.command)
        assert (one.status == "ok") == bool(one.times) == (not one.reason)
        assert all(time.median > 0 for time in one.times.values())
        assert one.bench == "compile" or parse_sizes(one.size, BENCHES[one.bench].forms)
    write(found, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == path.read_bytes()


def test_other_records_are_json_lines():
    for path in (RESULTS / "bench").glob("*/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(line["run"] and line["commit"] for line in lines)

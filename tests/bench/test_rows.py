"""Sizes in, rows out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cwy.bench import BENCHES, parse_sizes
from cwy.bench.rows import Row, read_csv, write_csv
from cwy.bench.sizes import show

NUMBER = st.none() | st.floats(allow_nan=False)
ROW = st.builds(Row, forward=NUMBER, both=NUMBER, error=NUMBER, load=NUMBER)


@st.composite
def sizes_of(draw, forms):
    n = draw(st.integers(1, 10**6))
    limits = {"B": 10**6}
    letters = draw(st.sampled_from(forms)).split("x")
    return tuple(n if letter == "N" else draw(st.integers(1, limits.get(letter, n))) for letter in letters)


@pytest.mark.parametrize("name", BENCHES)
@given(data=st.data())
def test_sizes_are_read_as_written(name, data):
    forms = BENCHES[name].forms
    sizes = data.draw(st.lists(sizes_of(forms), min_size=1, max_size=5))
    found = parse_sizes(" ,".join(map(show, sizes)), forms)
    once = {size[:1] if "N" in forms and len(size) == 2 and size[0] == size[1] else size for size in sizes}
    assert set(found) == once
    assert len(found) == len(once)
    assert parse_sizes(",".join(map(show, reversed(found))), forms) == found


@pytest.mark.parametrize("name", BENCHES)
@given(text=st.text(max_size=8) | st.text("0123456789x×X, ", max_size=12))
def test_sizes_are_right_or_refused_by_name(name, text):
    forms = BENCHES[name].forms
    try:
        found, refusal = parse_sizes(text, forms), ""
    except ValueError as error:
        found, refusal = [], str(error)
    if found:
        assert parse_sizes(",".join(map(show, found)), forms) == found
    else:
        assert "--sizes" in refusal
        assert forms[0] in refusal


@pytest.mark.parametrize("name", BENCHES)
def test_default_sizes_are_valid(name):
    assert parse_sizes(BENCHES[name].sizes, BENCHES[name].forms)
    assert parse_sizes(BENCHES[name].quick, BENCHES[name].forms)
    assert not BENCHES[name].gpu or parse_sizes(BENCHES[name].gpu, BENCHES[name].forms)


@given(st.lists(ROW, max_size=3))
def test_rows_survive_the_file(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    write_csv(rows, path)
    assert read_csv(path) == rows
    assert [file.name for file in path.parent.iterdir()] == ["rows.csv"]


# First calls have columns of their own.
RECORDS = [path for path in sorted((Path(__file__).parents[2] / "results/bench").glob("*/*.csv")) if path.stem != "compile"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_committed_records_are_read_whatever_columns_came_later(path):
    rows = read_csv(path)
    assert rows
    assert all(row.status != "ok" or (row.forward > 0 and row.device_name and row.commit) for row in rows)


def test_a_file_of_rows_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.csv"
    write_csv([], path)
    before = path.read_bytes()

    def broken():
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        write_csv(broken(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("entry,time\ncwy,1\n")
    with pytest.raises(ValueError, match=r"rows\.csv is not a file of benchmark rows: its columns differ by"):
        read_csv(path)

"""Sizes in, rows out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cwy.bench import BENCHES, parse_sizes
from cwy.bench.output.rows import COLUMNS, KINDS, Context, Measurement, Time, read, write
from cwy.bench.suites import show_size

NUMBER = st.none() | st.floats(allow_nan=False)
WHOLE = st.none() | st.integers(0)
CONTEXT = st.builds(Context, load=NUMBER)
TIME = st.builds(
    Time,
    median=st.floats(allow_nan=False),
    q1=NUMBER,
    q3=NUMBER,
    mean=NUMBER,
    se=NUMBER,
    repeats=WHOLE,
    flops=WHOLE,
)
SHARED = {
    "context": CONTEXT,
    "memory": WHOLE,
    "error": NUMBER,
    "gradient_error": NUMBER,
    "orthogonality": NUMBER,
}
TIMED = st.builds(
    Measurement,
    status=st.just("ok"),
    reason=st.just(""),
    times=st.dictionaries(st.sampled_from(["forward", "both", "both_inline"]), TIME, min_size=1),
    ungraphed=st.dictionaries(st.sampled_from(["forward_graph", "both_graph"]), st.text()),
    **SHARED,
)
UNTIMED = st.builds(
    Measurement,
    status=st.sampled_from(["failed", "skipped", "missing"]),
    reason=st.text(),
    times=st.just({}),
    ungraphed=st.just({}),
    **SHARED,
)
FOUND = st.lists(TIMED | UNTIMED, max_size=3, unique_by=lambda one: one.entry)


@st.composite
def sizes_of(draw, forms):
    n = draw(st.integers(1, 10**6))
    limits = {"B": 10**6}
    letters = draw(st.sampled_from(forms)).split("x")
    return tuple(
        n if letter == "N" else draw(st.integers(1, limits.get(letter, n))) for letter in letters
    )


@pytest.mark.parametrize("name", BENCHES)
@given(data=st.data())
def test_sizes_are_read_as_written(name, data):
    forms = BENCHES[name].forms
    sizes = data.draw(st.lists(sizes_of(forms), min_size=1, max_size=5))
    found = parse_sizes(" ,".join(map(show_size, sizes)), forms)
    once = {
        size[:1] if "N" in forms and len(size) == 2 and size[0] == size[1] else size
        for size in sizes
    }
    assert set(found) == once
    assert len(found) == len(once)
    assert parse_sizes(",".join(map(show_size, reversed(found))), forms) == found


@pytest.mark.parametrize("name", BENCHES)
@given(text=st.text(max_size=8) | st.text("0123456789x×X, ", max_size=12))
def test_sizes_are_right_or_refused_by_name(name, text):
    forms = BENCHES[name].forms
    try:
        found, refusal = parse_sizes(text, forms), ""
    except ValueError as error:
        found, refusal = [], str(error)
    if found:
        assert parse_sizes(",".join(map(show_size, found)), forms) == found
    else:
        assert "--sizes" in refusal
        assert forms[0] in refusal


@pytest.mark.parametrize("name", BENCHES)
def test_default_sizes_are_valid(name):
    assert parse_sizes(BENCHES[name].sizes, BENCHES[name].forms)
    assert parse_sizes(BENCHES[name].quick, BENCHES[name].forms)
    assert not BENCHES[name].gpu or parse_sizes(BENCHES[name].gpu, BENCHES[name].forms)


@given(FOUND)
def test_rows_survive_the_file(tmp_path_factory, found):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    write(found, path)
    assert read(path) == found
    assert [file.name for file in path.parent.iterdir()] == ["rows.csv"]


def test_a_row_is_one_kind_of_time(tmp_path):
    path = tmp_path / "rows.csv"
    names = ("bench", "entry", "group", "about", "size", "dtype", "package")
    where = Context("cpu", "A CPU", 1, None, "3", "2", "0", "abc", 0, "2026-01-01", "cwy bench x")
    shared = {name: name for name in names} | {"context": where}
    times = {kind: Time(0.1 + i) for i, kind in enumerate(KINDS)}
    write([Measurement(**shared, status="ok", times=times)], path)
    heading, *lines = path.read_text().splitlines()
    assert heading.replace('"', "").split(",") == list(COLUMNS)
    assert len(lines) == len(KINDS)
    assert all("cwy bench x" in line for line in lines)
    assert len(COLUMNS) < 35


def test_a_file_of_rows_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.csv"
    write([], path)
    before = path.read_bytes()

    def broken():
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        write(broken(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("entry,time\ncwy,1\n")
    with pytest.raises(
        ValueError, match=r"rows\.csv is not a file of benchmark rows: its columns differ by"
    ):
        read(path)

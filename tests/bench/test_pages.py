"""The Benchmarks page says what rows say, and nothing where there are none."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cwy.bench import BENCHES
from cwy.bench.output import figures, pages, tables
from cwy.bench.output.rows import Context, Measurement, Time, read, write

RECORDS = Path(__file__).parents[2] / "results" / "bench"
WHERE = Context(
    device="cpu",
    device_name="A CPU",
    threads=2,
    load=None,
    python="3.12",
    torch="2.13",
    cwy="0.1",
    commit="abc",
    seed=0,
    date="2026-01-01",
)


def time(seconds, flops=None):
    return Time(seconds, seconds, seconds, seconds, 0.0, 3, flops)


def row(entry, size, forward, both, group="peer", work=None, work_of_both=None):
    """A measurement. Times are seconds, work is in operations."""
    return Measurement(
        bench="figure1c",
        entry=entry,
        group=group,
        about="",
        size=size,
        dtype="float32",
        package="torch",
        status="ok",
        context=WHERE,
        times={"forward": time(forward, work), "both": time(both, work_of_both)},
    )


def timed(one, **seconds):
    """The same with other times. None takes a kind away."""
    times = dict(one.times)
    for kind, value in seconds.items():
        plain = one.times.get(kind.removesuffix("_graph"))
        times[kind] = None if value is None else time(value, plain and plain.flops)
    return replace(one, times={kind: value for kind, value in times.items() if value})


@pytest.fixture
def records(tmp_path):
    rows = []
    for size, exponential, cayley in (("64", 40.0, 0.5), ("128", 900.0, 3.0)):
        rows += [
            row("matmul", size, 1e-3, 3e-3, "floor", 2 * 10**6),
            row("cwy", size, 2e-3, 5e-3, "ours", 8 * 10**6, 20 * 10**6),
            row("exponential", size, exponential * 2e-3, exponential * 5e-3),
            row("cayley", size, cayley * 2e-3, cayley * 5e-3),
        ]
    failed = {"status": "failed", "reason": "result is off", "times": {}}
    rows.append(replace(rows[-2], size="256", **failed))
    rows += [replace(one, size="256") for one in rows[:2]]
    (tmp_path / "here").mkdir()
    write(rows, tmp_path / "here" / "figure1c.csv")
    return tmp_path


def test_claims_are_the_ratios_of_the_rows(records):
    exponential, cayley = [line for line in pages.claims(records).splitlines() if "A CPU" in line]
    assert (
        "| 64 to 128, failed at 256: result is off | 40× to 900× | 40× to 900× | none |"
        in exponential
    )
    assert "| 64 to 128 | 0.50× to 3.0× | 0.50× to 3.0× | 64 |" in cayley
    assert "HR" not in pages.claims(records)


def test_a_section_says_who_is_faster_and_what_was_not_measured(records, tmp_path):
    told = pages.section(records, "figure1c")
    assert "## A CPU, 2 threads" in told
    takes = "cwy takes 5.00 ms forward + backward, 1.7 times matmul"
    takes += ", at 200% of the rate of matmul (forward)"
    assert f"At 64, {takes}. Faster: cayley (0.50×)." in told
    assert f"At 128, {takes}. No rival is faster." in told
    assert "- failed: exponential at 256: result is off." in told
    assert pages.section(records, "figure2") == "No record yet: `cwy bench figure2`."
    assert pages.claims(tmp_path / "nowhere") == "No record yet."
    pages.draw(records, tmp_path)
    assert {path.name for path in (tmp_path / "benchmarks" / "here").iterdir()} == {
        "figure1c-N.svg",
        "figure1c-N-narrow.svg",
    }
    assert f'<img src="{pages.picture("here", "figure1c", "N")}"' in told
    assert told.count('media="(max-width: 600px)"') == 1


def test_the_summary_says_where_ours_is_the_fastest(records):
    (line,) = [line for line in pages.summary(records).splitlines() if "A CPU" in line]
    assert "| 1.7× | 0.50× to 3.0× | `cayley` |" in line
    assert ">in part</span>: at 1 of 2 sizes | 1.7×" in line


def test_the_limit_is_the_work_at_the_products_rate(records):
    (rows,) = pages.records(records, "figure1c").values()
    assert figures.limit(rows, "cwy", "forward") == pytest.approx(
        dict.fromkeys(("64", "128", "256"), 4e-3)
    )
    assert figures.limit(rows, "cwy", "both") == pytest.approx(
        dict.fromkeys(("64", "128", "256"), 1e-2)
    )
    assert figures.limit(rows, "cwy", "both_graph") == {}
    floor, ours = (timed(one, forward_graph=5e-4, both_graph=1e-3) for one in rows[:2])
    assert figures.limit([floor, ours], "cwy", "both_graph") == pytest.approx({"64": 5e-3})
    graphs = {"forward_graph": 5e-4, "both_graph": 1e-3}
    floor = timed(row("matmul", "64", 1e-3, 3e-3, "floor", 2 * 10**6, 6 * 10**6), **graphs)
    assert figures.limit([floor, ours], "cwy", "both_graph") == pytest.approx({"64": 1e-2 / 3})
    near = timed(row("as much", "64", 1e-3, 3e-3, "floor", 8 * 10**6, 25 * 10**6), **graphs)
    assert "at 80% of the rate of as much (forward + backward as a CUDA graph)" in tables.findings(
        [floor, near, ours], "cwy"
    )


def test_graphs_are_compared_with_graphs(records):
    path = records / "here" / "figure1c.csv"
    rows = [timed(one, both_graph=1e-3) if one.entry == "cwy" else one for one in read(path)]
    write(rows, path)
    assert "40× to 900×, only ours as a CUDA graph 200× to 4500× |" in pages.claims(records)
    plain = row("exponential, no sync", "64", 1e-3, 2e-3, "ours")
    rival = timed(plain, both_graph=5e-4)
    waits = {"size": "128", "ungraphed": {"forward_graph": "it waits"}}
    write([*rows, rival, replace(timed(plain, forward=1.0, both=9.0), **waits)], path)
    (exponential,) = [line for line in pages.claims(records).splitlines() if "exponential" in line]
    faster = "0.50× to 500× | 0.40× to 900×, both as CUDA graphs (exponential, no sync) 0.50×"
    faster += " | 64, 64 as graphs |"
    assert faster in exponential
    assert "- no CUDA graph: exponential, no sync at 128: it waits." in pages.section(
        records, "figure1c"
    )
    assert "Faster: exponential, no sync (0.40×), cayley (0.50×)." in pages.section(
        records, "figure1c"
    )
    ours = [timed(one, both_inline=2e-3) if one.entry == "cwy" else one for one in rows]
    write([*ours, timed(rival, both_inline=1e-3)], path)
    (exponential,) = [line for line in pages.claims(records).splitlines() if "exponential" in line]
    assert ", in one thread 0.50×, both as CUDA graphs" in exponential
    assert "| 64, 64 in one thread, 64 as graphs |" in exponential


@pytest.mark.parametrize(
    ("bench", "ours", "rival"), [("figure2", "cwy, torch", "HR, abs"), ("table1", "cwy", "hr")]
)
def test_methods_are_rivals_where_methods_are_compared(bench, ours, rival):
    rows = [
        row(ours, "8", 1.0, 2.0, "ours"),
        row("cwy, cuda", "8", 1.0, 1.0, "ours"),
        row(rival, "8", 1.0, 6.0, "ours"),
    ]
    rows = [replace(one, bench=bench) for one in rows]
    assert tables.findings(rows, ours).endswith(f"No rival is faster. Slower: {rival} (3.0×).")
    view = tables.of_all({bench: tables.Last(ours, rows)})
    (cells,) = zip(*(column.cells for column in view.columns), strict=True)
    assert cells[2:] == (f"{rival}\n3.0×",) * 2
    assert tables.findings([replace(one, bench="matrix") for one in rows], ours).endswith(
        "forward + backward."
    )


def test_only_what_is_alike_is_compared():
    ours, step = row("cwy", "8", 1.0, 2.0, "ours"), timed(row("a step", "8", 0.5, 9.0), both=None)
    told = tables.findings([ours, row("ormqr", "8", 0.5, 6.0)], "cwy")
    assert told.endswith(
        "No rival is faster. Slower: ormqr (3.0×). Faster only forward: ormqr (0.50×)."
    )
    assert "Faster: a step (0.25×)" in tables.findings([ours, step], "cwy")
    loops = [
        row(f"eager loop, {f}", "8", 9.0, both) for f, both in (("relu", 1.0), ("modrelu", 4.0))
    ]
    rows = [
        row("torch, modrelu", "8", 1.0, 2.0, "ours"),
        *loops,
        row("nn.RNN, relu", "8", 9.0, 8.0),
    ]
    assert tables.findings(rows, "torch, modrelu").endswith(
        "No rival is faster. Slower: eager loop, modrelu (2.0×) to nn.RNN, relu (4.0×)."
    )


def test_the_table_and_the_picture_of_all_show_the_same_rivals():
    last = tables.Last("torch, modrelu", read(RECORDS / "cpu-2-threads" / "rnn.csv"))
    found = sorted(ratio for group, ratio in tables.ratios(last) if group == "peer")
    (cells,) = zip(*(column.cells for column in tables.of_all({"rnn": last}).columns), strict=True)
    ends = [f"{tables.times(end)}×" for end in (found[0], found[-1])]
    assert [cell.split("\n")[1] for cell in cells[2:]] == ends


@pytest.mark.parametrize("bench", BENCHES)
def test_committed_records_make_a_section(bench):
    told = pages.section(RECORDS, bench)
    timed = [
        row for rows in pages.records(RECORDS, bench).values() for row in rows if row.status == "ok"
    ]
    assert timed or told.startswith("No record yet")
    assert "e+" not in told
    for row in timed:
        assert any(
            f"| {row.entry}" in line and f" {tables.ms(row.seconds('forward'))} |" in line
            for line in told.splitlines()
        ), row


@pytest.mark.parametrize("bench", ["rnn", "table1"])
def test_no_text_of_a_figure_is_cut(bench, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pages, "BENCHES", {bench: BENCHES[bench]})
    monkeypatch.setattr(figures, "svg", lambda figure: drawn.append(figure) or "")
    pages.draw(RECORDS, tmp_path)
    assert len(drawn) >= 4
    for figure in drawn:
        FigureCanvasAgg(figure).draw()
        edges = figure.get_tightbbox()
        assert edges.x0 >= -0.05
        assert edges.x1 <= figure.get_figwidth() + 0.05


def test_each_reason_names_its_own_sizes():
    rows = [
        row("a", "8", 1, 2),
        row("b", "8", 1, 2),
        row("a", "16", 1, 2),
        row("b", "16", 1, 2),
        row("c", "16", 1, 2),
    ]
    ungraphed = {"forward_graph": "it waits"}
    waits = [
        one if (one.entry, one.size) == ("b", "8") else replace(one, ungraphed=ungraphed)
        for one in rows
    ]
    told = tables.untimed(waits).plain.splitlines()
    assert told == ["no CUDA graph: a at 8, 16: it waits.", "no CUDA graph: b, c at 16: it waits."]


def test_a_reason_names_the_graph_where_there_is_another():
    one = timed(row("a", "8", 1, 2), forward_graph=1)
    one = replace(one, ungraphed={"both_graph": "it waits"})
    assert tables.untimed([one, row("b", "8", 1, 2)]).plain == (
        "no CUDA graph: a at 8: forward + backward: it waits."
    )


def test_the_list_of_records_is_made_of_them():
    readme = RECORDS.parent / "README.md"
    told = "python -m cwy.bench.output.pages results"
    assert readme.read_text() == pages.index(RECORDS.parent), f"Run: {told}"
    for path in RECORDS.glob("*/*.csv"):
        assert f"| `{path.name}` |" in readme.read_text()
    for path in RECORDS.glob("*/*"):
        assert f"`{path.name}`" in readme.read_text()

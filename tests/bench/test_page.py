"""The Benchmarks page says what rows say, and nothing where there are none."""

from dataclasses import replace
from pathlib import Path

import pytest

from cwy.bench import BENCHES, page
from cwy.bench.rows import Row, read_csv, write_csv
from cwy.bench.together import overview, ratios

RECORDS = Path(__file__).parents[2] / "results" / "bench"
WHERE = {
    "device": "cpu", "device_name": "A CPU", "threads": 2, "load": None, "python": "3.12", "torch": "2.13", "cwy": "0.1",
    "commit": "abc", "seed": 0, "date": "2026-01-01", "bench": "figure1c", "about": "", "dtype": "float32", "package": "torch",
}  # fmt: skip


def row(entry, size, forward, both, group="peer", **given):
    spread = {f"{kind}{end}": x for kind, x in (("forward", forward), ("both", both)) for end in ("_q1", "_q3", "_mean")}
    se = {"forward_se": 0.0, "both_se": 0.0}
    return Row(**WHERE, entry=entry, size=size, group=group, status="ok", forward=forward, both=both, **spread, **se, **given)


@pytest.fixture
def records(tmp_path):
    rows = []
    for size, exponential, cayley in (("64", 40.0, 0.5), ("128", 900.0, 3.0)):
        rows += [
            row("matmul", size, 1e-3, 3e-3, "floor", forward_flops=2 * 10**6),
            row("cwy", size, 2e-3, 5e-3, "ours", forward_flops=8 * 10**6, both_flops=20 * 10**6),
            row("exponential", size, exponential * 2e-3, exponential * 5e-3),
            row("cayley", size, cayley * 2e-3, cayley * 5e-3),
        ]
    rows.append(replace(rows[-2], size="256", status="failed", reason="result is off", forward=None, both=None))
    rows += [replace(one, size="256") for one in rows[:2]]
    (tmp_path / "here").mkdir()
    write_csv(rows, tmp_path / "here" / "figure1c.csv")
    return tmp_path


def test_claims_are_the_ratios_of_the_rows(records):
    exponential, cayley = [line for line in page.claims(records).splitlines() if "A CPU" in line]
    assert "| 64 to 128; failed at 256: result is off | 40× to 900× | 40× to 900× | none |" in exponential
    assert "| 64 to 128 | 0.50× to 3.0× | 0.50× to 3.0× | 64 |" in cayley
    assert "HR" not in page.claims(records)


def test_a_section_says_who_is_faster_and_what_was_not_measured(records, tmp_path):
    told = page.section(records, "figure1c")
    assert "### A CPU, 2 threads" in told
    takes = "cwy takes 5.00 ms forward + backward, 1.7 times matmul, at 200% of the rate of matmul (forward)"
    assert f"At 64, {takes}. Faster: cayley (0.50×)." in told
    assert f"At 128, {takes}. No rival is faster." in told
    assert "- failed: exponential at 256: result is off." in told
    assert page.section(records, "figure2") == "No record yet: `cwy bench figure2`."
    assert page.claims(tmp_path / "nowhere") == "No record yet."
    page.draw(records, tmp_path)
    assert [path.name for path in (tmp_path / "benchmarks" / "here").iterdir()] == ["figure1c-N.png"]
    assert f'<img src="{page.picture("here", "figure1c", "N")}"' in told


def test_the_limit_is_the_work_at_the_products_rate(records):
    (rows,) = page.records(records, "figure1c").values()
    assert page.figure.limit(rows, "cwy", "forward") == pytest.approx(dict.fromkeys(("64", "128", "256"), 4e-3))
    assert page.figure.limit(rows, "cwy", "both") == pytest.approx(dict.fromkeys(("64", "128", "256"), 1e-2))
    assert page.figure.limit(rows, "cwy", "both_graph") == {}
    floor, ours = (replace(one, forward_graph=5e-4, both_graph=1e-3) for one in rows[:2])
    assert page.figure.limit([floor, ours], "cwy", "both_graph") == pytest.approx({"64": 5e-3})
    floor = replace(floor, both_flops=6 * 10**6)
    assert page.figure.limit([floor, ours], "cwy", "both_graph") == pytest.approx({"64": 1e-2 / 3})
    near = replace(floor, entry="as much", forward_flops=8 * 10**6, both_flops=25 * 10**6)
    assert "at 80% of the rate of as much (forward + backward as a CUDA graph)" in page.table.findings(
        [floor, near, ours], "cwy"
    )


def test_graphs_are_compared_with_graphs(records):
    path = records / "here" / "figure1c.csv"
    rows = [replace(one, both_graph=1e-3) if one.entry == "cwy" else one for one in read_csv(path)]
    write_csv(rows, path)
    assert "40× to 900×; ours alone as a CUDA graph 200× to 4500× |" in page.claims(records)
    rival = row("exponential, no sync", "64", 1e-3, 2e-3, "ours", both_graph=5e-4)
    write_csv([*rows, rival, replace(rival, size="128", forward=1.0, both=9.0, both_graph=None, reason="it waits")], path)
    (exponential,) = [line for line in page.claims(records).splitlines() if "exponential" in line]
    faster = "0.50× to 500× | 0.40× to 900×; both as CUDA graphs (exponential, no sync) 0.50× | 64, 64 as graphs |"
    assert faster in exponential
    assert "- no CUDA graph: exponential, no sync at 128: it waits." in page.section(records, "figure1c")
    assert "Faster: exponential, no sync (0.40×), cayley (0.50×)." in page.section(records, "figure1c")
    rival, ours = (
        replace(rival, both_inline=1e-3),
        [replace(one, both_inline=2e-3) if one.entry == "cwy" else one for one in rows],
    )
    write_csv([*ours, rival], path)
    (exponential,) = [line for line in page.claims(records).splitlines() if "exponential" in line]
    assert "; in one thread 0.50×; both as CUDA graphs" in exponential
    assert "| 64, 64 in one thread, 64 as graphs |" in exponential


@pytest.mark.parametrize(("bench", "ours", "rival"), [("figure2", "cwy, torch", "HR, abs"), ("table1", "cwy", "hr")])
def test_methods_are_rivals_where_methods_are_compared(bench, ours, rival):
    rows = [row(ours, "8", 1.0, 2.0, "ours"), row("cwy, cuda", "8", 1.0, 1.0, "ours"), row(rival, "8", 1.0, 6.0, "ours")]
    rows = [replace(one, bench=bench) for one in rows]
    assert page.table.findings(rows, ours).endswith(f"No rival is faster. Slower: {rival} (3.0×).")
    (cells,) = zip(*(column.cells for column in overview({bench: (ours, rows)}).columns), strict=True)
    assert cells[2:] == (f"{rival}\n3.0×",) * 2
    assert page.table.findings([replace(one, bench="matrix") for one in rows], ours).endswith("forward + backward.")


def test_only_what_is_alike_is_compared():
    ours, step = row("cwy", "8", 1.0, 2.0, "ours"), replace(row("a step", "8", 0.5, 9.0), both=None)
    told = page.table.findings([ours, row("ormqr", "8", 0.5, 6.0)], "cwy")
    assert told.endswith("No rival is faster. Slower: ormqr (3.0×). Faster forward alone: ormqr (0.50×).")
    assert "Faster: a step (0.25×)" in page.table.findings([ours, step], "cwy")
    loops = [row(f"eager loop, {f}", "8", 9.0, both) for f, both in (("relu", 1.0), ("modrelu", 4.0))]
    rows = [row("torch, modrelu", "8", 1.0, 2.0, "ours"), *loops, row("nn.RNN, relu", "8", 9.0, 8.0)]
    assert page.table.findings(rows, "torch, modrelu").endswith(
        "No rival is faster. Slower: eager loop, modrelu (2.0×) to nn.RNN, relu (4.0×)."
    )


def test_the_table_and_the_picture_of_all_show_the_same_rivals():
    rows = read_csv(RECORDS / "cpu-2-threads" / "rnn.csv")
    found = sorted(ratio for group, ratio in ratios("torch, modrelu", rows) if group == "peer")
    (cells,) = zip(*(column.cells for column in overview({"rnn": ("torch, modrelu", rows)}).columns), strict=True)
    assert [cell.split("\n")[1] for cell in cells[2:]] == [f"{page.table.times(end)}×" for end in (found[0], found[-1])]


@pytest.mark.parametrize("bench", BENCHES)
def test_committed_records_make_a_section(bench):
    told = page.section(RECORDS, bench)
    timed = [row for rows in page.records(RECORDS, bench).values() for row in rows if row.status == "ok"]
    assert timed or told.startswith("No record yet")
    assert "e+" not in told
    for row in timed:
        assert any(f"| {row.entry}" in line and f" {page.table.ms(row.forward)} |" in line for line in told.splitlines()), row


def test_each_reason_names_its_own_sizes():
    rows = [row("a", "8", 1, 2), row("b", "8", 1, 2), row("a", "16", 1, 2), row("b", "16", 1, 2), row("c", "16", 1, 2)]
    waits = [replace(one, reason="it waits") if (one.entry, one.size) != ("b", "8") else one for one in rows]
    told = page.table.untimed(waits).plain.splitlines()
    assert told == ["no CUDA graph: a at 8, 16: it waits.", "no CUDA graph: b, c at 16: it waits."]

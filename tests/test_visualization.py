"""Charts, tables and the page, of small machine folders written here and of the committed results."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from experiments.config import ROOT, resolve
from tests.test_suite import write_record
from visualization import create_charts, tables
from visualization.charts.audit import audit
from visualization.charts.idea import idea
from visualization.charts.peak_comparison import peak_comparison
from visualization.charts.timelines import peak_preserving, timeline_peak_preserving, timeline_ultra_smooth
from visualization.report.__main__ import main as report
from visualization.report.__main__ import statistics
from visualization.results import GIB, MARK, MIB, PHASE_COLUMNS, load
from visualization.tables.__main__ import main as write_tables

REFERENCE = ROOT / "results" / "reference-cpu-2-cores"
BENCH = pd.read_csv(REFERENCE / "bench.csv")


def write_run(machine, arm="classic-baseline", k=2, repeat=0, status="ok", above=GIB, scale="cpu", asked=(), **more):
    """One CPU run: 200 MiB at start; the train phase peaks `above` that, a third over what the sampler saw."""
    start, begin = 200 * MIB, 1_760_000_000.0
    folder = write_record(
        machine, resolve(arm, k, scale, "cpu", repeat=repeat, **dict(asked)),
        **dict(
            status=status, device_name="Test, processor", trl_version="0.21.0", torch_version="2.13.0",
            transformers_version="5.23.0", prompt_tokens_fed_mean=3000.0, start_bytes=start,
            peak_resident_bytes=start + above, peak_phase="train", step_seconds=[2.0 * k + repeat],
            sampler={"achieved_interval_s": 0.05, "peak_missed_bytes": 7 + repeat},
        ) | more,
    )  # fmt: skip
    shares = {"load": 1.2, "generate": 0.25, "score": 0.5, "train": 1.0, "optimizer": 0.125}  # of what is above start
    tops = {phase: start + int(share * above) for phase, share in shares.items()}
    phases = [
        [phase, int(place > 0), begin + 10 * place, begin + 10 * place + 10, None, None, top, None]
        for place, (phase, top) in enumerate(tops.items())
    ]
    pd.DataFrame(phases, columns=PHASE_COLUMNS).to_csv(folder / "phases.csv", index=False)
    t = np.linspace(0, 49.9, 60)
    levels = [start + int(0.75 * (list(tops.values())[int(at // 10)] - start) * (0.5 + at % 10 / 20)) for at in t]
    samples = pd.DataFrame({"timestamp": begin + t, "elapsed_s": t, "resident_bytes": levels})
    samples.to_csv(folder / "memory.csv", index=False)
    return folder


@pytest.fixture
def machine(tmp_path):
    """Two arms at k=2 and 4 with three repeats; the baseline is out of memory at k=4, once at k=2."""
    machine = tmp_path / "results" / "here"
    for repeat, above in enumerate((1000, 1100, 1300)):
        write_run(machine, k=2, repeat=repeat, above=above * MIB, status="oom" if repeat == 2 else "ok")
        write_run(machine, k=4, repeat=repeat, above=3000 * MIB, status="oom", error="CUDA <out> of memory")
        write_run(machine, "classic-lean", 2, repeat, above=(above - 900) * MIB)
        write_run(machine, "classic-lean", 4, repeat, above=400 * MIB)
    return machine


@pytest.fixture
def bench(tmp_path):
    """Scale `bench` at k = 8, whose seconds are in runs of their own."""
    machine = tmp_path / "bench"
    peaks = {"stock": 4, "stock-compact": 2, "stock-compact-accumulate": 1, "shared": 0.5, "shared-accumulate": 0.5}
    for arm, above in peaks.items():
        write_run(machine, arm, 8, above=int(above * GIB), scale="bench", step_seconds=[99.0])
        for repeat in range(3):
            took = {"step_seconds": [30 * above, 20 * above + repeat]}
            write_run(machine, arm, 8, repeat, above=9 * GIB, scale="bench-time", **took)
    return machine


def texts(figure):
    found = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    return " ".join(" ".join(found).split())


def test_a_cell_where_no_run_finished_is_hatched_and_named_and_never_a_number(machine):
    figure = peak_comparison(load(machine))
    hatched = [bar for bar in figure.axes[0].patches if bar.get_hatch() == "//////"]
    assert len(hatched) == 1 and hatched[0].get_height() == 4, "up to the budget"
    shown = texts(figure)
    assert "out of memory" in shown and "1 of 3 OOM" in shown and f"{3200 / 1024:.2f}" not in shown
    text = tables.of_results("peak", load(machine))
    assert "| `classic-baseline` | 1.03 (0.98 to 1.07) (1 of 3 out of memory) | out of memory |" in text
    assert "| `classic-lean` | 0.20 (0.10 to 0.39), −81.0 % | 0.39 |" in text
    lost = statistics(load(machine)).set_index(["arm", "k"]).loc["classic-baseline", 4]
    assert lost.oom == 3 and lost[["peak_bytes", "above_bytes", "step"]].isna().all()


def test_a_killed_run_is_an_error_and_its_half_written_line_is_ignored(machine):
    folder = write_run(machine, "stock", status="running", peak_resident_bytes=None, device_kind=None)
    with (folder / "memory.csv").open("a") as file:
        file.write("1760000050.0,50.0,99")
    (folder / "phases.csv").write_text(",".join(PHASE_COLUMNS) + "\ngenerate,1,17600")
    results = load(machine)
    run = results.runs.set_index("arm", drop=False).loc["stock"]
    assert run.status == "killed" and pd.isna(run.peak_bytes) and len(results.samples(run)) == 60
    assert "killed before it could report: stock_cpu_k2_r0" in texts(peak_comparison(results))
    assert "| `stock` | killed | not run |" in tables.of_results("peak", results)


def test_a_cell_has_no_runs_of_other_settings_than_the_newest_one_that_finished(tmp_path):
    write_run(tmp_path, repeat=0, asked={"steps": 1}, prompt_tokens_fed_mean=512.0, started_at="2026-02-01")
    write_run(tmp_path, repeat=1, asked={"steps": 2}, started_at="2026-01-01")
    write_run(tmp_path, repeat=2, status="error", asked={"steps": 3}, started_at="2026-03-01")
    results = load(tmp_path).of("cpu")
    cell = results.cells.loc["classic-baseline", 2]
    assert (cell.runs, cell.fed) == (1, 512)
    others = "classic-baseline_cpu_k2_r1, classic-baseline_cpu_k2_r2"
    assert results.footnotes() == [f"left out, as their settings are not those of the newest run: {others}"]


def test_any_number_of_k_is_drawn(machine):
    for k in range(6, 32, 2):
        write_run(machine, k=k)
    assert "k = 30" in texts(audit(load(machine)))


def test_the_peak_preserving_timeline_reaches_the_recorded_peak_and_the_smooth_one_says_that_it_does_not(machine):
    results = load(machine)
    for _, run in results.runs[results.runs.status == "ok"].iterrows():
        assert peak_preserving(results, run).bytes.max() == run.peak_bytes > results.samples(run).bytes.max()
    figure = timeline_peak_preserving(results)
    crosses = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "x"]
    assert len(crosses) == 1 and "OOM" in texts(figure)
    assert "smoothed: does not show true peaks" in texts(timeline_ultra_smooth(results))


def test_seconds_come_from_the_runs_that_are_there_for_them(bench):
    results = load(bench)
    text = tables.of_results("summary", results)
    assert "| TRL, one completion at a time | 21.0 | 30.0 | 2.0 | 1.00 |" in text and "3 for seconds" in text
    assert "| prefix sharing, two completions at a time | 11.0 (10.0 to 12.0) | 15.0 | 3.7 | 0.50 |" in text
    text = tables.of_results("phases", results)
    assert "token ratio is 6.53" in text and "| 10.0 (1.0 x) | 11.0 (7.4 x) | 0.50 (1/8.0) |" in text
    shown = texts(idea(results))
    assert "24,800 tokens through the model" in shown and "11.0 seconds a step" in shown and "scale bench" in shown


def test_seconds_that_are_too_far_apart_are_marked_and_compared_with_nothing(bench):
    folder = bench / "shared-accumulate_bench-time_k8_r0" / "run.json"
    folder.write_text(json.dumps(json.loads(folder.read_text()) | {"step_seconds": [15.0, 90.0]}))
    text = tables.of_results("summary", load(bench))
    assert f"two completions at a time | 12.0{MARK} (11.0 to 90.0) | 15.0 |  | 0.50 |" in text
    assert "busy machine" in text
    assert f"12.0{MARK} seconds a step" in texts(idea(load(bench)))


def rendered(name, rows, folder):
    """The table of that name, of these rows of the bench."""
    rows.to_csv(folder / "bench.csv", index=False)
    return tables.render(name, folder)


def test_so_are_those_of_measurements_side_by_side(tmp_path):
    rows = BENCH.copy()
    rows.loc[rows.metric.isin(["train_seconds", "generate_seconds"]) & (rows.way != "whole"), "high"] *= 10
    for name in ("rivals", "families", "worth", "decoding"):
        text = rendered(name, rows, tmp_path)
        more = text.count(MARK) - tables.render(name, REFERENCE).count(MARK)
        assert more > 2 and "nan" not in text, name


@pytest.mark.parametrize("name, ways, said", [
    ("worth", "whole,shared", " x |  |\n"),
    ("worth", "whole,shared-micro-2", " x |  |  |\n"),
    ("lengths", "whole,shared", " x |  |  |  |  |\n"),
    ("alike", "shared-all", "| 2,000 + 200, completions 100 | what they begin with once, too | 4,351 | "),
    ("decoding", "whole", " |  |  |\n"),
    ("kinds", "whole", "| windows of 512 tokens (Gemma 3) |  |  |  |  |  |\n"),
])  # fmt: skip
def test_a_way_that_was_not_measured_is_an_empty_cell(tmp_path, name, ways, said):
    text = rendered(name, BENCH[BENCH.way.isin(ways.split(","))], tmp_path)
    assert said in text and text.count(MARK) <= tables.render(name, REFERENCE).count(MARK)


def test_cells_with_another_k_are_rows_of_their_own_and_each_device_is_named(tmp_path):
    more = BENCH[BENCH.measurement == "worth"].assign(k=4, device_name="Another")
    text = rendered("worth", pd.concat([BENCH, more]), tmp_path)
    assert "| wide | 3,000 | 100 | 4 | 3.65 | " in text and "| wide | 3,000 | 100 | 8 | 6.53 | " in text
    assert "CPU: Another, " in text


@pytest.mark.parametrize("name, lost, said", [
    ("rivals", "shared", "| prefix sharing, all together | out of memory: 3/4 |  |  |  |"),
    ("families", "shared-micro-2", "|  | prefix sharing, two a micro-batch | out of memory: 3/4 |  |  |  |  |"),
    ("kinds", "shared-micro-2", "| windows of 512 tokens (Gemma 3) | out of memory: 3/4 |  |  |  |  |"),
    ("families", "whole", "| whole rows (stock) | out of memory: 3/4 |  |  |  |  |"),
    ("decoding", "shared", " | out of memory: 3/4 |  |"),
    ("worth", "shared-micro-2", " x | out of memory: 3/4 |\n"),
    ("worth", "whole", "| 6.53 | out of memory: 3/4 | out of memory: 3/4 | out of memory: 3/4 | out of memory: 3/4 |"),
    ("lengths", "whole-2", " x | out of memory: 3/4 | out of memory: 3/4 |\n"),
])  # fmt: skip
def test_a_way_that_failed_says_why_in_its_row(tmp_path, name, lost, said):
    mine = (BENCH.measurement == {"kinds": "families"}.get(name, name)) & (BENCH.way == lost)
    failed = BENCH[mine].drop_duplicates(["model", "prompt_tokens", "completion_tokens", "k"])
    failed = failed.assign(metric=None, failure="out of memory: 3|4")
    assert said in rendered(name, pd.concat([BENCH[~mine], failed]), tmp_path)


def test_on_a_gpu_the_peak_is_what_the_device_used_and_a_cpu_run_is_never_called_a_gpu_run(tmp_path):
    on_gpu = {"device_kind": "cuda", "peak_device_used_bytes": 3 * GIB, "start_bytes": GIB}
    write_run(tmp_path / "gpu", "shared", **on_gpu)
    write_run(tmp_path / "cpu", "shared")
    of_gpu, of_cpu = (tables.of_results("peak", load(tmp_path / name)) for name in ("gpu", "cpu"))
    assert "GPU: Test, processor" in of_gpu and "device memory used*\n\n" in of_gpu and "| `shared` | 2.00 |" in of_gpu
    assert "CPU: Test, processor" in of_cpu and "process resident memory*\n\n" in of_cpu


def test_one_command_writes_everything_and_says_who_is_compared_with_whom(machine, bench, capsys):
    report([str(machine)])
    said = capsys.readouterr().out
    assert "strongest rival (TRL 0.21 as it is)" in " ".join(said.split()) and "0.20 and 1.03 GiB above" in said
    html = (machine / "report.html").read_text()
    parts = ("At k = 2, TRL 0.21", "<img", "In short", "More charts", "Tables", "Every run")
    assert (places := [html.index(part) for part in parts]) == sorted(places)
    assert '<td class="failed">out of memory</td>' in html and "CUDA &lt;out&gt; of memory" in html
    assert not re.search(r'(src|href)="(?!data:)', html) and html.count("<img") == 4
    samples = pd.read_csv(machine / "combined_memory.csv")
    assert len(samples) == 720 and set(samples.status) == {"ok", "oom"}
    row = pd.read_csv(machine / "combined_statistics.csv").set_index(["arm", "k"]).loc["classic-baseline", 2]
    found = (row.runs, row.ok, row.oom, row.peak_bytes, row.step, row.peak_missed_bytes)
    assert found == (3, 2, 1, 1250 * MIB, 4.5, 9)
    report([str(bench)])
    said = " ".join(capsys.readouterr().out.split())
    assert "TRL 1.16 with prefix sharing, two completions a micro-batch, needs 50% of the memory" in said
    assert "one completion at a time), and a step takes 11.0 s in place of 21.0 s." in said


def test_charts_need_no_samples(machine, tmp_path):
    """Which are not committed."""
    for folder in machine.glob("*_r0"):
        (folder / "memory.csv").unlink()
    create_charts.draw_all(load(machine), tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"peak_comparison.png", "audit.svg"} <= files and not any("timeline" in name for name in files)


@pytest.mark.parametrize("table, told", [
    ("peak none", "none: holds no runs"),
    (f"peak {REFERENCE} seed", "has no runs at scale seed; it has cpu"),
    (f"peaks {REFERENCE}", "no table is named peaks"),
])  # fmt: skip
def test_what_a_page_asks_for_in_vain_is_said(table, told, tmp_path):
    (tmp_path / "page.md").write_text(f"<!-- table:{table} -->\n<!-- /table -->\n")
    with pytest.raises(SystemExit, match=told):
        write_tables([str(tmp_path / "page.md")])


def test_a_stale_table_is_named_and_written(machine, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table:peak results/here cpu -->\nold\n<!-- /table -->\nafter\n")
    write_tables([str(page)])
    assert capsys.readouterr().out == f"{page}: peak results/here cpu\n" and tables.fill(page)[1] == []
    assert "before\n" in page.read_text() and "| `classic-lean` |" in page.read_text()
    page.write_text("<!-- table:peak results/here -->\nno end\n")
    with pytest.raises(SystemExit, match="0 complete table places for 1 opening markers"):
        write_tables([str(page)])


PAGES = [path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if "\n<!-- table:" in path.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_documents_agree_with_the_results(page):
    assert tables.fill(page)[1] == []


def test_the_committed_tables_are_those_of_the_committed_results():
    assert (REFERENCE / "charts" / "tables.md").read_text() == tables.page(load(REFERENCE))

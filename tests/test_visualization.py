"""Loading, statistics, charts and tables, on small machine folders written here and on synthetic 2025 files."""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from experiments import arms
from experiments.config import ROOT
from experiments.run_record import RunRecord, write_runs
from visualization import create_charts, tables
from visualization.charts import plan
from visualization.charts.audit import audit
from visualization.charts.convergence import convergence
from visualization.charts.idea import idea
from visualization.charts.peak_comparison import peak_comparison
from visualization.charts.phase_peaks import phase_peaks
from visualization.charts.timelines import peak_preserving, timeline_peak_preserving, timeline_ultra_smooth
from visualization.combine_memory_data import combined, statistics
from visualization.files import LoadError, run_cli
from visualization.load import PHASE_COLUMNS, SAMPLE_COLUMNS, load, load_machine
from visualization.page import answers
from visualization.pages.results import audit_table, peak_table, published_table, speed_table
from visualization.runs import ARMS, GIB, LOST, MIB, cells

LEGACY = ROOT / "tests" / "fixtures" / "legacy_2025"


def write_csv(path, columns, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_run(
    machine, arm="classic-baseline", k=2, repeat=0, status="ok", above=1000 * MIB, fed=3000, samples=60, scale="cpu",
    passes="", **more,
):  # fmt: skip
    """One CPU run: 200 MiB at start; the train phase peaks `above` that, a third over what the sampler saw."""
    start, begin = 200 * MIB, 1_760_000_000.0
    run_id = f"{arm}_{scale}_k{k}{passes}_r{repeat}"
    folder = machine / run_id
    folder.mkdir(parents=True)
    shares = {"load": 1.0, "generate": 0.25, "score": 0.5, "train": 1.0, "optimizer": 0.125}  # of what is above start
    tops = {phase: start + int(share * above) + (start if phase == "load" else 0) for phase, share in shares.items()}
    phases = [
        {"phase": phase, "step": int(place > 0), "start": begin + 10 * place, "end": begin + 10 * place + 10,
         "peak_resident_bytes": top}
        for place, (phase, top) in enumerate(tops.items())
    ]  # fmt: skip
    marks = list(tops.values())
    levels = [
        {"timestamp": begin + t, "elapsed_s": t, "cpu_percent": 100.0, "host_used_bytes": 10**9,
         "resident_bytes": start + int(0.75 * (marks[int(t // 10)] - start) * (0.5 + t % 10 / 20))}
        for t in np.linspace(0, 49.9, samples)
    ]  # fmt: skip
    write_csv(folder / "memory.csv", SAMPLE_COLUMNS, levels)
    write_csv(folder / "phases.csv", PHASE_COLUMNS, phases)
    record = RunRecord(
        run_id, arm, scale, k, repeat, config={}, commit="0123456789abcdef", status=status, device_kind="cpu",
        device_name="Test, processor", trl_version="0.21.0", torch_version="2.13.0", transformers_version="5.23.0",
        prompt_tokens_requested=3000, prompt_tokens_fed_mean=float(fed), completion_tokens=100, batch=k,
        budget_bytes=4 * GIB, start_bytes=start, peak_resident_bytes=start + above, peak_phase="train",
        step_seconds_median=2.0 * k + repeat, sampler={"achieved_interval_s": 0.05, "peak_missed_bytes": 7 + repeat},
    )  # fmt: skip
    (folder / "run.json").write_text(json.dumps(asdict(record) | more))
    return folder


@pytest.fixture
def machine(tmp_path):
    """Two arms at k=2 and 4 with three repeats; the baseline is out of memory at k=4, once at k=2."""
    machine = tmp_path / "results" / "here"
    for repeat, above in enumerate((1000, 1100, 1300)):
        write_run(machine, k=2, repeat=repeat, above=above * MIB, status="oom" if repeat == 2 else "ok")
        write_run(machine, k=4, repeat=repeat, above=3000 * MIB, status="oom")
        write_run(machine, "classic-lean", 2, repeat, above=(above - 900) * MIB)
        write_run(machine, "classic-lean", 4, repeat, above=400 * MIB)
    return machine


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")) if text.get_text()]


def drawn(figure):
    """run id -> the line drawn for it."""
    return {line.get_gid(): line for axes in figure.axes for line in axes.lines if line.get_gid()}


def test_killed_run_is_an_error_and_its_half_written_line_is_ignored(machine):
    folder = write_run(machine, "stock", status="running", peak_resident_bytes=None, device_kind=None)
    with (folder / "memory.csv").open("a") as file:
        file.write("1760000050.0,50.0,,,,,9999")
    (folder / "phases.csv").write_bytes(b"phase,st")
    run = next(run for run in load_machine(machine) if run.arm == "stock")
    assert (run.status, run.error, run.peak_bytes) == ("killed", "killed before it could report", None)
    assert len(run.samples) == 60 and len(run.phases) == 0
    shown = texts(peak_comparison(load_machine(machine)))
    assert "killed" in shown and any("killed before it could report: stock_cpu_k2_r0" in text for text in shown)
    assert "| `stock` | killed | not run |" in "\n".join(peak_table(load_machine(machine)))
    assert statistics(load_machine(machine)).set_index(["arm", "k"]).loc[("stock", 2), "killed"] == 1


def damage(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(("module", "arguments", "told"), [
    ("create_charts", ["none"], "no such results folder"),
    ("tables", ["none", "--check"], "the file is missing"),
    ("create_charts", ["empty"], "holds no runs"),
    ("create_charts", ["results/here", "--scale", "seed"], "has no runs at scale seed; it has cpu"),
    ("create_charts", ["results/here", "--out", "file/x"], "make it a place that can be written"),
])  # fmt: skip
def test_commands_refuse_bad_arguments_in_one_line(machine, tmp_path, module, arguments, told):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    result = subprocess.run(
        [sys.executable, "-m", f"visualization.{module}", *arguments], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and told in result.stderr


def test_statistics_and_combined_samples(machine):
    runs = load_machine(machine)
    table = statistics(runs).set_index(["arm", "k"])
    row = table.loc["classic-baseline", 2]
    assert (row["runs"], row["ok"], row["oom"], row["error"]) == (3, 2, 1, 0)
    peaks = row[["peak_min_bytes", "peak_median_bytes", "peak_max_bytes"]]
    assert peaks.tolist() == [1200 * MIB, 1250 * MIB, 1300 * MIB], "the recorded ones, not those of samples"
    assert (row["above_start_median_bytes"], row["start_median_bytes"]) == (1050 * MIB, 200 * MIB)
    assert (row["step_seconds_median"], row["peak_missed_max_bytes"]) == (4.5, 9)
    assert (row["prompt_tokens_fed_mean"], row["sampler_achieved_interval_s"]) == (3000, 0.05)
    lost = table.loc["classic-baseline", 4]
    figures = lost.filter(regex="^(peak|above_start|step).*(median|min|max)_").drop("peak_missed_max_bytes")
    assert lost["oom"] == 3 and figures.isna().all()
    samples = combined(runs)
    assert list(samples.columns) == ["run_id", "arm", "k", "repeat", "status", *SAMPLE_COLUMNS] and len(samples) == 720


def test_cell_without_a_finished_run_is_a_hatched_named_bar_and_never_a_number(machine):
    figure = peak_comparison(load_machine(machine))
    axes = figure.axes[0]
    hatched = [bar for bar in axes.patches if isinstance(bar, Rectangle) and bar.get_linestyle() == "--"]
    assert len(hatched) == 1 and hatched[0].get_hatch() and hatched[0].get_height() == 4  # the budget in GiB
    left, right = hatched[0].get_x(), hatched[0].get_x() + hatched[0].get_width()
    above = [
        text.get_text()
        for text in axes.texts
        if left <= text.get_position()[0] <= right or left <= getattr(text, "xy", (-9,))[0] <= right
    ]
    assert above == ["OOM"]
    assert "1 of 3\nOOM\n1.22" in texts(figure) and "0.39\n−81 %" in texts(figure)
    assert any("budget" in text and "4 GiB" in text for text in texts(figure))


def test_k_of_one_arm_alone_takes_one_bar_and_no_room_in_the_audit(machine):
    write_run(machine, "shared", 4)
    write_run(machine, "shared", 16)
    runs = load_machine(machine)
    figure = peak_comparison(runs)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["k = 2", "k = 4", "k = 16"]
    assert texts(figure).count("not run") == 1  # shared at k=2
    figure = audit(runs)
    assert any("not drawn: shared k=16" in text for text in texts(figure)) and "k = 16" not in texts(figure)
    figure = timeline_peak_preserving(runs)
    visible = [axes for axes in figure.axes if axes.axison and axes.get_title(loc="left") == "k = 16"]
    lines = [line.get_gid() for axes in visible for line in axes.lines if line.get_gid()]
    assert len(visible) == 1 and lines == ["shared_cpu_k16_r0"]


def test_runs_with_other_completions_a_pass_are_an_arm_of_their_own(machine):
    write_run(machine, "shared", 4, above=300 * MIB)
    for passes in ("_c16", "_c4"):
        write_run(machine, "shared", 4, above=900 * MIB, passes=passes)
    runs = load_machine(machine)
    arms = [cell.arm for cell in cells(runs) if cell.k == 4]
    assert arms == ["classic-baseline", "classic-lean", "shared", "shared-c4", "shared-c16"]
    assert statistics(runs).set_index(["arm", "k"]).loc[("shared", 4), "runs"] == 1
    peak = "\n".join(peak_table(load_machine(machine)))
    assert "| `shared` | not run | 0.29 |" in peak and "| `shared-c4` | not run | 0.88 |" in peak
    looks = {create_charts.style.colour(cell.arm) for cell in cells(runs)}
    assert len(looks) == 5, "two arms look the same"


def test_drawn_maximum_equals_the_recorded_maximum_exactly(machine):
    write_run(machine, "stock", samples=5000)
    write_run(machine, "shared", above=777_777_777, peak_resident_bytes=200 * MIB + 888_888_889)  # more than any mark
    runs = {run.run_id: run for run in load_machine(machine)}
    lines = drawn(timeline_peak_preserving(list(runs.values())))
    finished = [run_id for run_id in lines if runs[run_id].status == "ok"]
    assert len(finished) == 5 and len(lines) == 6
    for run_id in finished:
        assert lines[run_id].get_ydata().max() * GIB == runs[run_id].peak_bytes
        assert len(lines[run_id].get_xdata()) <= 1200
        at = lines[run_id].get_xdata()[lines[run_id].get_ydata().argmax()]
        assert 20 <= at <= 30  # inside the train phase, seconds since the first step


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 2**45)), max_size=200),
    st.lists(st.tuples(st.floats(0, 200), st.integers(0, 2**45)), min_size=1, max_size=20),
    st.integers(4, 60),
)
def test_peak_preserving_keeps_the_maximum_and_the_bound(levels, marks, max_points):
    samples = pd.DataFrame({"t": np.arange(len(levels), dtype=float), "bytes": pd.Series(levels, dtype=float)})
    phases = pd.DataFrame(marks, columns=["mark_t", "mark_bytes"])
    t, y = peak_preserving(samples, phases, max_points)
    known = [level for level in levels if level is not None] + [mark for _, mark in marks]
    assert y.max() == max(known) and y.min() == min(known) and len(t) <= max_points and (np.diff(t) >= 0).all()


def test_oom_run_ends_in_a_cross_named_oom(machine):
    figure = timeline_peak_preserving(load_machine(machine))
    k4 = figure.axes[2]
    crosses = [line for line in k4.lines if line.get_marker() == "x"]
    assert len(crosses) == 1 and "OOM" in [text.get_text() for text in k4.texts]
    assert crosses[0].get_xdata()[0] == drawn(figure)["classic-baseline_cpu_k4_r0"].get_xdata()[-1]


def test_smooth_chart_says_that_it_hides_peaks(machine):
    runs = load_machine(machine)
    figure = timeline_ultra_smooth(runs)
    assert any("smoothed: does not show true peaks" in text for text in texts(figure))
    finished = [run for run in runs if run.peak_bytes and run.repeat == 0]
    assert len(finished) == 3
    assert all(drawn(figure)[run.run_id].get_ydata().max() * GIB < run.peak_bytes for run in finished)


def test_cpu_run_is_never_called_a_gpu_run(machine):
    runs = load_machine(machine)
    for _, figure in create_charts.figures(runs):
        footer = [text for text in texts(figure) if "CPU: Test, processor" in text]
        assert len(footer) == 1 and "trl 0.21.0" in footer[0] and "commit 0123456789 ·" in footer[0]
        ours = [text for text in texts(figure) if not text.startswith("published")]
        assert not re.search(r"GPU|CUDA|cuda|device memory", " ".join(ours))
    cuda = write_run(machine, "stock", device_kind="cuda", peak_device_used_bytes=9 * GIB)
    assert next(run for run in load_machine(machine) if run.arm == "stock").measure.label == "device memory used"
    with pytest.raises(LoadError, match="cpu and cuda"):
        peak_comparison(load_machine(cuda.parent))


def test_audit_puts_cut_and_uncut_runs_on_one_line(machine):
    for k in (2, 4):
        write_run(machine, "classic-string", k, fed=1024, above=int(k * 1124 / 6200 * 1050 * MIB))
    figure = audit(load_machine(machine))
    assert any("classic-baseline,\nclassic-string:" in text and "R² = 1.0000" in text for text in texts(figure))
    assert any("R² = 0.999" in text and "2.03 GiB per 1,000 tokens" in text for text in texts(figure))
    assert "published 2025, RTX 5090, device-wide used" in texts(figure)
    assert any("no point: classic-baseline k=4 (OOM)" in text for text in texts(figure))


def test_phases_chart_marks_the_phase_that_peaks(machine):
    figure = phase_peaks(load_machine(machine))
    by_phase = {axes.get_title(): [text.get_text() for text in axes.texts] for axes in figure.axes}
    assert by_phase["train"] == ["1.03 ◆", "0.20 ◆"]  # at k=2, the largest k that both arms finish
    assert by_phase["generate"] == ["0.26", "0.05"]


def write_learning(machine, **levels):
    for arm, level in levels.items():
        trace = [{"step": step, "reward": step + level, "loss": -step, "kl": 0} for step in range(5)]
        write_run(machine, arm.replace("_", "-"), 4, scale="learn", trace=trace)


def test_convergence_tells_the_largest_difference_within_one_trainer(machine):
    write_learning(machine, classic_baseline=0.0, classic_lean=0.25, stock=7.0, shared=7.5)
    figure = convergence(load_machine(machine))
    told = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert told == [
        "classic-baseline, classic-lean: largest absolute difference reward 0.25, kl 0, loss 0",
        "stock, shared: largest absolute difference reward 0.5, kl 0, loss 0",
    ]
    assert [axes.get_ylabel().rsplit(" ", 1)[1] for axes in figure.axes[1::2]] == ["completion)", "token)"]


def test_command_writes_png_and_svg_the_same_each_time(machine, capsys):
    assert create_charts.main([str(machine)]) == 0
    names = {path.name for path in (machine / "charts").iterdir()}
    assert names == {
        f"{name}.{kind}"
        for kind in ("png", "svg")
        for name in ("peak_comparison", "timeline_peak_preserving", "timeline_ultra_smooth", "audit", "phases")
    }
    assert (machine / "charts" / "audit.png").read_bytes().startswith(b"\x89PNG")
    before = (machine / "charts" / "audit.svg").read_bytes()
    create_charts.style.save(audit(load_machine(machine)), machine / "charts", "audit")
    assert (machine / "charts" / "audit.svg").read_bytes() == before


def test_bench_has_lines_and_other_scales_have_tables_only(machine):
    for k in (2, 4, 8):
        write_run(machine, "shared", k, scale="bench")
        write_run(machine, "shared", k, scale="short")
    charts = machine / "charts"
    drawn = {str(path.relative_to(charts)) for path in create_charts.draw_all(load_machine(machine), charts)}
    assert {name for name in drawn if name.startswith("bench") and name.endswith("svg")} == {
        f"bench/{name}.svg" for name in ("peak_by_k", "phases", "timeline_peak_preserving", "timeline_ultra_smooth")
    }
    assert "peak_comparison.svg" in drawn and not any("short" in name for name in drawn)
    alone = create_charts.draw_all(load_machine(machine), machine / "alone", "short")
    assert machine / "alone" / "peak_comparison.svg" in alone


def test_axes_are_drawn_at_round_places(machine, tmp_path):
    """The layout's solver ends a billionth apart from one process to the next: that is no other picture."""
    figure = phase_peaks(load_machine(machine))
    create_charts.style.save(figure, tmp_path, "phases")
    places = [place for axes in figure.axes for place in axes.get_position().bounds]
    assert len(places) == 16 and places == [pytest.approx(round(place, 5), abs=1e-15) for place in places]


@pytest.mark.parametrize("source", [LEGACY, LEGACY / "combined.csv"], ids=["folder", "combined"])
def test_files_of_2025_load_and_chart_as_they_are(source):
    runs = load(source)
    assert [(run.arm, run.k) for run in runs] == [("Basic", 2), ("Basic", 4), ("String", 2), ("String", 4)]
    assert {run.status for run in runs} == {"unknown"} and len(runs[0].samples) == 30
    assert runs[1].peak_bytes == 6055 * MIB and runs[1].start_bytes == 900 * MIB
    charts = dict(create_charts.figures(runs))
    assert set(charts) == {"peak_comparison", "timeline_peak_preserving", "timeline_ultra_smooth"}
    for figure in charts.values():
        assert any("do not say how a run ended" in text for text in texts(figure))
        assert any("device used (2025: called allocated)" in text for text in texts(figure))
    assert "5.91*" in texts(charts["peak_comparison"])
    assert drawn(charts["timeline_peak_preserving"])["Basic_2025_k4_r0"].get_ydata().max() * GIB == 6055 * MIB


def test_file_of_2025_without_a_method_in_its_path_is_refused(tmp_path):
    path = tmp_path / "logs" / "memory.csv"
    path.parent.mkdir()
    path.write_bytes(next(LEGACY.glob("results_basic/*2/logs/*.csv")).read_bytes())
    with pytest.raises(LoadError, match="does not tell method and k"):
        load(tmp_path)


def test_tables_check_fails_on_stale_text_and_passes_after_write(machine, tmp_path, capsys):
    readme = tmp_path / "README.md"
    place = "<!-- table:{} results/here -->\nold\n<!-- /table -->\n"
    readme.write_text("# Title\n" + place.format("peak") + "between\n" + place.format("speed") + "end\n")
    assert tables.main([str(readme), "--check"]) == 1
    assert "table peak results/here is out of date" in capsys.readouterr().out
    assert tables.main([str(readme), "--write"]) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n<!-- table:peak results/here -->\n") and "\nbetween\n" in text
    assert "old" not in text
    assert tables.main([str(readme), "--check"]) == 0
    damage(readme, "| `classic-lean` | 0.20", "| `classic-lean` | 0.10")
    assert tables.main([str(readme), "--check"]) == 1


def test_tables_say_out_of_memory_range_and_reduction(machine):
    peak = "\n".join(peak_table(load_machine(machine)))
    assert "| `classic-baseline` | 1.03 (0.98 to 1.07) (1 of 3 out of memory) | out of memory |" in peak
    assert "| `classic-lean` | 0.20 (0.10 to 0.39), −81.0 % | 0.39 |" in peak
    fed = "\n".join(audit_table(load_machine(machine)))
    assert "| `classic-lean` | 4 | 3,000 | 3,000 | 0.39 | 0.032 |" in fed
    assert "| `classic-baseline` | 4 | 3,000 | 3,000 | out of memory |  |" in fed
    assert "*CPU: Test, processor · torch 2.13.0" in tables.render("speed", machine)


@pytest.mark.parametrize(("text", "told"), [
    ("no markers", "0 complete table places"),
    ("<!-- table:peak results/here -->\n", "1 opening markers"),
    ("<!-- table:nonsense results/here -->\n<!-- /table -->\n", "no table is named nonsense"),
    ("<!-- table:peak results/other -->\n<!-- /table -->\n", "other: no such results folder"),
])  # fmt: skip
def test_tables_refuse_broken_markers(machine, tmp_path, text, told):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(LoadError, match=told):
        tables.main([str(tmp_path / "README.md"), "--check"])


PAGES = [
    path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "<!-- table:" in path.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_documents_agree_with_the_results(page, capsys):
    assert tables.main([str(page), "--check"]) == 0, capsys.readouterr().out


def test_the_committed_page_of_tables_agrees_with_the_results():
    folder = ROOT / "results" / "reference-cpu-2-cores"
    assert tables.page(folder, load_machine(folder)) == (folder / "charts" / "tables.md").read_text()


def test_published_table_compares_above_start_with_above_start_in_gib(machine):
    runs = load_machine(machine)
    above = [run.above_start_bytes for run in runs if (run.arm, run.k) == ("classic-baseline", 2) and run.peak_bytes]
    scaled = np.median(above) * 32 * GIB / runs[0].budget_bytes / GIB
    text = "\n".join(published_table(runs))
    assert f"| `classic-baseline` | 2 | {scaled:.2f} (1 of 3 out of memory) | 14.38 | 1.84 | 12.54 |" in text
    assert "| `classic-baseline` | 4 | out of memory | 26.99 | 1.95 | 25.04 |" in text
    assert "GB" not in text.replace("called GB", "") and "activations are not divided by the factor" in text
    for path in machine.glob("*/run.json"):
        damage(path, '"prompt_tokens_requested": 3000', '"prompt_tokens_requested": 512')
    assert published_table(load_machine(machine)) == [], "other workloads are left out"


def test_every_arm_has_its_words_in_every_chart(machine):
    assert set(arms.ARMS) <= set(ARMS)
    write_run(machine, "shared", 4, passes="_c8")
    for name, figure in create_charts.figures(load_machine(machine)):
        told = " ".join(" ".join(texts(figure)).split())
        assert "classic-lean: TRL 0.21, logits only where they are read" in told, name
        assert "shared-c8: shared, 8 at a time" in told, name


def test_summary_says_three_ways_in_words_and_the_picture_compares_two_of_them(tmp_path):
    machine = tmp_path / "here"
    write_run(machine, "stock", 8, above=4 * GIB, step_seconds_median=70.0, scale="bench")
    write_run(machine, "stock-compact-accumulate", 8, above=3 * GIB // 4, step_seconds_median=50.0, scale="bench")
    write_run(machine, "shared-accumulate", 8, above=GIB // 2, step_seconds_median=10.0, scale="bench")
    write_run(machine, "stock-compact", 8, above=GIB, step_seconds_median=45.0, scale="bench")
    lines = [line for line in tables.render("summary", machine, "bench").splitlines() if line.startswith("| ")]
    assert lines[2:] == [
        "| TRL, all completions together | 45.0 | 1.0 | 1.00 |",
        "| TRL, one completion at a time | 50.0 | 0.9 | 0.75 |",
        "| prefix sharing, two completions at a time | 10.0 | 4.5 | 0.50 |",
    ]
    shown = texts(idea(load_machine(machine)))
    assert {"1.00 GiB at the peak, above the start", "0.50 GiB at the peak, above the start"} <= set(shown)
    assert {"45.0 seconds a step", "10.0 seconds a step"} <= set(shown) and not any("stock" in text for text in shown)
    (machine / "shared-accumulate_bench_k8_r0").rename(tmp_path / "gone")
    assert "| prefix sharing, two completions at a time | not run |  |  |" in tables.render(
        "summary", machine, "bench"
    )
    assert idea(load_machine(machine)) is None


def test_seconds_come_from_the_runs_that_are_there_for_them(tmp_path):
    """And from nowhere else, while memory does not come from these."""
    machine = tmp_path / "here"
    arms = {"stock-compact-accumulate": 95.0, "stock-compact": 60.0, "shared-accumulate": 20.0}
    for arm, seconds in arms.items():
        write_run(machine, arm, 8, above=GIB, step_seconds_median=seconds, scale="bench")
    for repeat in range(3):
        seconds = {"step_seconds_median": 70.0 + repeat}
        write_run(machine, "stock-compact-accumulate", 8, repeat, above=9 * GIB, scale="bench-time", **seconds)
    write_run(machine, "shared-accumulate", 8, status="error", scale="bench-time")
    write_run(machine, "stock", 4, scale="bench-time")  # no run that is there for memory
    write_run(machine, "stock-compact-accumulate", 16, above=GIB, step_seconds_median=321.0, scale="bench")
    summary, phases = (tables.render(name, machine, "bench") for name in ("summary", "phases"))
    assert (
        "| TRL, one completion at a time | 71.0 | 0.8 | 1.00 |" in summary
        and "| prefix sharing, two completions at a time | 20.0 | 3.0 |" in summary
    )
    assert summary.count("Seconds are medians of 3 runs, separate from those for memory") == 1
    assert "| 71.0 | 1.00 |" in phases
    left = {run.run_id for run in load_machine(machine) if run.scale == "bench-time"}
    apart = {"shared-accumulate_bench-time_k8_r0", "stock_bench-time_k4_r0"}
    assert left == apart, "nothing is dropped without a word"
    assert "Seconds are medians of 3 runs" in " ".join(texts(phase_peaks(load_machine(machine))))
    runs = [run for run in load_machine(machine) if run.scale == "bench"]
    for said in (answers.time(runs), " ".join(speed_table(runs))):
        assert "71.0" in said and "321" not in said, "k = 16 was not timed"


def test_a_run_that_lost_its_sampler_says_so_in_tables_and_charts(machine):
    write_run(machine, "stock", 2, sampler={"lost_after_s": 12.4, "peak_from": "torch's counters"})
    write_run(machine, "shared", 2, sampler=None).joinpath("memory.csv").unlink()
    write_run(machine, "stock-accumulate", 2, sampler=None, status="oom")  # nothing of it is shown as a number
    runs = load_machine(machine)
    note = f"{LOST} sampler lost, samples end before the run does: shared_cpu_k2_r0 (nobody knows when), "
    note += "stock_cpu_k2_r0 (after 12 s, peak from torch's counters)"
    peak = tables.render("peak", machine)
    assert note + "." in peak and f"| `stock` | 0.98{LOST}" in peak and f"| `shared` | 0.98{LOST}" in peak
    for name, figure in create_charts.figures(runs):
        assert note in " ".join(" ".join(texts(figure)).split()), name
    assert any(text.startswith(f"1.17{LOST}") for text in texts(peak_comparison(runs)))
    assert f"shared{LOST}" in texts(phase_peaks(runs)) and f"shared{LOST}" in texts(timeline_peak_preserving(runs))


def test_without_their_folders_runs_are_shown_from_the_file_of_all_but_over_time(machine, tmp_path):
    before = tables.page(machine, load_machine(machine))
    write_runs(machine)
    for folder in machine.glob("*_r*"):
        folder.rename(tmp_path / folder.name)
    assert tables.page(machine, load_machine(machine)) == before
    assert create_charts.main([str(machine), "--out", str(tmp_path / "charts")]) == 0
    drawn = {path.stem for path in (tmp_path / "charts").iterdir()}
    assert {"peak_comparison", "phases", "audit"} <= drawn and not any("timeline" in name for name in drawn)
    write_run(machine, "stock", above=400 * MIB)
    assert "| `stock` | 0.39" in tables.render("peak", machine)


def test_plan_chart_is_one_command_that_refuses_what_is_no_plan(tmp_path, capsys):
    committed = ROOT / "results" / "plans" / "single_gpu_24gb.json"
    assert run_cli(lambda: plan.main([str(committed), str(tmp_path / "plan.png")])) == 0
    assert (tmp_path / "plan.png").read_bytes() == committed.with_suffix(".png").read_bytes()
    capsys.readouterr()
    for text, told in (("{}", "is no plan"), ("[1]", "no JSON object"), ('{"predictions": 7}', "is no plan")):
        (tmp_path / "bad.json").write_text(text)
        assert run_cli(lambda: plan.main([str(tmp_path / "bad.json"), str(tmp_path / "x.png")])) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "bad.json" in error and told in error

"""What no run of this project could have written is refused in one line that names it, and the rest is still shown."""

import json

import pytest

from tests.test_visualization import damage, texts, write_run
from visualization import combine_memory_data, create_charts, report, tables
from visualization.charts.peak_comparison import peak_comparison
from visualization.files import run_cli
from visualization.load import PHASE_COLUMNS, SAMPLE_COLUMNS, load_machine, tell_damaged


def record(**changes):
    def harm(folder):
        path = folder / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return harm


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def swap(name, old, new):
    return lambda folder: damage(folder / name, old, new)


def header_only(name, columns):
    return text(name, ",".join(columns) + "\n")


DAMAGE = {
    "k is not whole": (record(k=2.7), "run.json: k is 2.7, not a whole number"),
    "k is negative": (record(k=-3), "run.json: k is -3, outside 2 to 1,000,000"),
    "k is true": (record(k=True), "run.json: k is True, not a number"),
    "repeat is a half": (record(repeat=0.5), "run.json: repeat is 0.5, not a whole number"),
    "peak of 10^30": (record(peak_resident_bytes=10**30), "run.json: peak_resident_bytes is 1000000000"),
    "10^400": (record(start_bytes=10**400), "run.json: start_bytes is 1000000000"),
    "10^5000": (swap("run.json", '"batch": 2', '"batch": 1' + "0" * 5000), "run.json: not valid JSON"),
    "not a number": (record(start_bytes=float("nan")), "run.json: start_bytes is nan, not a number"),
    "infinite": (record(step_seconds_median=float("inf")), "run.json: step_seconds_median is inf, outside"),
    "start above peak": (record(start_bytes=2**40), "run.json: start_bytes is 1099511627776, above peak"),
    "a list": (text("run.json", "[1,2]"), "run.json: holds no JSON object"),
    "a number": (text("run.json", "7"), "run.json: holds no JSON object"),
    "status alone": (text("run.json", '{"status":"ok"}'), "run.json: lacks run_id, arm"),
    "deep": (text("run.json", "[" * 100_000), "run.json: not valid JSON"),
    "another's id": (record(run_id="stock_cpu_k2_r7"), "run.json: run_id is 'stock_cpu_k2_r7', not the folder's name"),
    "id is a list": (record(run_id=["x"]), "run.json: run_id is ['x'], not a line of text"),
    "no arm": (record(arm=""), "run.json: arm is empty"),
    "device of two lines": (record(device_name="a\nb"), "run.json: device_name is 'a\\nb', not a line of text"),
    "NUL in a name": (record(device_name="a\0b"), "run.json: device_name is 'a\\x00b', not a line of text"),
    "sampler is a word": (record(sampler="gone"), "run.json: sampler is 'gone', not an object"),
    "NUL in run.json": (swap("run.json", '"cpu"', '"c\0u"'), "run.json: not a text file, it holds NUL bytes"),
    "NUL in memory.csv": (swap("memory.csv", "100.0", "1\0.0"), "memory.csv: not a text file, it holds NUL bytes"),
    "no samples": (header_only("memory.csv", SAMPLE_COLUMNS), "memory.csv: an ok run without a sample"),
    "sample of 10^30": (swap("memory.csv", "1000000000", "1" + "0" * 30), "memory.csv: line 2, host_used_bytes"),
    "negative sample": (swap("memory.csv", "1000000000", "-5"), "memory.csv: line 2, host_used_bytes: -5"),
    "sample at no time": (swap("memory.csv", "1760000000.0,0.0", ",0.0"), "memory.csv: line 2, timestamp"),
    "no phases": (header_only("phases.csv", PHASE_COLUMNS), "phases.csv: an ok run without a training phase"),
    "phase backwards": (swap("phases.csv", "1760000020.0", "1760000005.0"), "phases.csv: line 3, the phase ends"),
    "phase at infinity": (swap("phases.csv", "1760000050.0", "inf"), "phases.csv: line 6, end"),
    "phase without end": (swap("phases.csv", "1760000050.0", ""), "phases.csv: line 6, end"),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "told"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_run_is_named_in_one_line_and_the_others_are_shown(tmp_path, capsys, harm, told):
    write_run(tmp_path, "classic-baseline")
    bad = write_run(tmp_path, "stock")
    harm(bad)
    runs = load_machine(tmp_path)
    assert [(run.arm, run.k, run.status) for run in runs] == [("classic-baseline", 2, "ok"), ("stock", 2, "damaged")]
    assert tell_damaged(runs) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"left out: {bad}/{told}") and "; delete the run" in error
    assert len(error) < 300 + len(str(bad))
    shown = tables.render("peak", tmp_path)
    assert "| `classic-baseline` | 0.98 |" in shown and "| `stock` | damaged |" in shown
    assert "damaged and left out: stock_cpu_k2_r0." in shown


@pytest.mark.slow
def test_every_command_shows_what_is_whole_and_exits_with_1(tmp_path, capsys):
    machine = tmp_path / "here"
    write_run(machine)
    record(k=2.7)(write_run(machine, "stock"))
    text("run.json", "7")(write_run(machine, "stock", repeat=1))
    write_run(machine, "shared", scale="short").rename(machine / "a copy")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table:peak here -->\n<!-- /table -->\n")
    for command in (
        lambda: create_charts.main([str(machine)]),
        lambda: combine_memory_data.main([str(machine)]),
        lambda: tables.main([str(machine)]),
        lambda: tables.main([str(readme), "--write"]),
        lambda: report.main([str(machine)]),
    ):
        assert run_cli(command) == 1
        errors = capsys.readouterr().err.splitlines()
        assert [error.split(":")[1].split("/")[-2] for error in errors] == [
            "a copy",
            "stock_cpu_k2_r0",
            "stock_cpu_k2_r1",
        ]
    assert (machine / "charts" / "peak_comparison.png").exists()
    shown = texts(peak_comparison([run for run in load_machine(machine) if run.scale], "classic-baseline"))
    assert "damaged" in shown and any("left out: stock_cpu_k2_r0, stock_cpu_k2_r1" in line for line in shown)
    assert "| `classic-baseline` | 0.98 |" in readme.read_text()


def test_a_folder_where_nothing_can_be_used_is_refused(tmp_path, capsys):
    for repeat in range(3):
        record(k=-3)(write_run(tmp_path, repeat=repeat))
    assert run_cli(lambda: create_charts.main([str(tmp_path)])) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "classic-baseline_cpu_k2_r0/run.json: k is -3" in error and "2 more" in error


@pytest.mark.parametrize(("name", "header", "row", "told"), [
    ("sampler", "interval_s,repeat,achieved_interval_s,longest_gap_s,missed_bytes,peak_bytes,k", "0.1,0,0.1,,1,1,2",
     "sampler.csv: line 2, longest_gap_s is empty"),
    ("exactness", "log_prob_error,gradient_error,prompt_tokens,completion_tokens,k", "inf,1,1,1,2",
     "exactness.csv: line 2, log_prob_error"),
    ("plan", "case,phase,prompt_tokens,completion_tokens,k,vocab_size,predicted_bytes,measured_bytes,error",
     "x,train,1,1,2,3,,1,0.1", "plan_check.csv: line 2, predicted_bytes is empty"),
    ("rivals", "score_seconds,train_seconds,train_peak_bytes,gradient_difference,prompt_tokens,completion_tokens,k",
     ",1,1,0,1,1,2", "rivals/a.csv: line 2, score_seconds is empty"),
    ("families", "generate_seconds,generate_peak_bytes,score_seconds,score_peak_bytes,train_seconds,train_peak_bytes,"
     "images_encoded,gradient_difference,prompt_tokens,completion_tokens,k", "1,,1,1,1,1,0,0,1,1,2",
     "families/a.csv: line 2, generate_peak_bytes is empty"),
])  # fmt: skip
def test_damage_in_the_other_files_is_refused(tmp_path, capsys, name, header, row, told):
    path = tmp_path / {"plan": "plan_check.csv", "rivals": "rivals/a.csv", "families": "families/a.csv"}.get(
        name, f"{name}.csv"
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{header}\n{row}\n")
    assert run_cli(lambda: tables.render(name, tmp_path)) == 2
    assert told in capsys.readouterr().err

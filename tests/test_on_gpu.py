"""The program that runs on a GPU: its order, its minutes, what it leaves when killed, and what it takes along."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec

import pytest

from experiments import config as cfg
from experiments.config import ROOT
from experiments.evidence import common, on_gpu
from experiments.evidence.common import EXIT_TIME, EXIT_VERDICT
from experiments.evidence.gpu import archive, items, prepare, session
from experiments.evidence.gpu.prepare import Folder
from experiments.evidence.gpu.session import Item, Session
from rloo_memory.errors import ConfigError, Stopped
from rloo_memory.storage import write_json

STAND_IN = """
import os, sys, time
name, code, seconds = sys.argv[1:4]
folder = sys.argv[sys.argv.index("--results") + 1] + "/" + sys.argv[sys.argv.index("--machine") + 1]
with open(f"{folder}/{name}.csv", "a") as file:
    file.write("a row\\n")
time.sleep(float(seconds))
print(*sys.argv)
print("last words of", name)
sys.exit(int(code))
"""

TWO_ITEMS = """
import os, sys
from pathlib import Path
from experiments.evidence.gpu import archive
from experiments.evidence.gpu.session import Item, Session
folder, out, here = map(Path, sys.argv[1:])
plan = [Item(name, ("stand_in", name, "0", seconds), 1.0) for name, seconds in (("one", "0"), ("two", "60"))]
say = lambda text: print(text, flush=True)
Session(folder, "abc", 5, {**os.environ, "PYTHONPATH": str(here)}, say, lambda: archive.pack(folder, out)).run(plan)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes items of a stand-in that writes a row, takes some seconds and ends with a code; and sessions."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "results" / "x").mkdir(parents=True)

    class Made:
        said: list[str] = []
        folder, archive = tmp_path / "results" / "x", tmp_path / "out.tar.gz"

        def item(self, name, code=0, seconds=0, expected=1.0, **more):
            return Item(name, ("stand_in", name, str(code), str(seconds)), expected, **more)

        def session(self, minutes=1.0, commit="abc"):
            self.said = []
            environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
            pack = lambda: archive.pack(self.folder, self.archive)  # noqa: E731
            return Session(self.folder, commit, minutes, environment, self.said.append, pack)

        def rows(self, name):
            path = self.folder / f"{name}.csv"
            return path.read_text().count("a row") if path.exists() else 0

        def states(self):
            return {
                name: s["state"] for name, s in json.loads((self.folder / "on_gpu/items.json").read_text()).items()
            }

    return Made()


def test_an_item_is_measured_once_whatever_its_verdict_and_again_by_other_code(program):
    plan = [program.item("good"), program.item("bad", EXIT_VERDICT), program.item("broken", 1)]
    assert program.session().run(plan) == ["broken"]
    assert program.states() == {"good": "done", "bad": "verdict", "broken": "failed"}
    assert any(line.endswith("last words of broken") for line in program.said)
    assert program.session().run(plan) == ["broken"] and program.said[-1].startswith("broken: failed")
    program.session().run(plan)
    assert "left alone" in program.said[-1]
    assert [program.rows(name) for name in ("good", "bad", "broken")] == [1, 1, 2]
    program.session(commit="other").run(plan)
    assert [program.rows(name) for name in ("good", "bad", "broken")] == [2, 2, 3]
    program.session(commit="other-dirty").run(plan[:1])
    program.session(commit="other-dirty").run(plan[:1])
    assert program.rows("good") == 4, "changed, uncommitted code is not known again"


def test_what_failed_before_comes_last(program):
    program.session().run([program.item("broken", 1)])
    program.session().run([program.item("broken", 1), program.item("good")])
    begun = [line.split(":")[0] for line in program.said if "begins" in line]
    assert begun == ["good", "broken"]


def test_what_does_not_fit_is_not_begun_and_what_is_shorter_is(program):
    plan = [program.item("long", expected=600), program.item("short"), program.item("parts", EXIT_TIME, least_s=5)]
    program.session(minutes=0.5).run(plan)
    assert program.rows("long") == 0 and program.rows("short") == 1
    assert program.rows("parts") == 2, "once more when all others had their turn"
    assert program.said[0].startswith("long: not begun, takes 600 s and 2")
    assert program.states() == {"short": "done", "parts": "stopped"}
    program.session(minutes=0.5).run(plan)
    assert program.rows("parts") == 4, "it goes on"
    program.session(minutes=0.1).run(plan)
    assert program.rows("parts") == 4 and "not begun" in program.said[-1]


def test_an_item_is_told_to_end_in_time_for_what_it_has_begun(program):
    program.session(minutes=1).run([program.item("parts", least_s=5, last_s=20)])
    told = (program.folder / "on_gpu" / "parts.log").read_text().split("--minutes ")[1].split()[0]
    assert 0.4 < float(told) <= (60 - session.END_SECONDS - 5 - 20) / 60 + 1e-3


def test_what_an_item_took_is_what_it_will_take(program):
    before = program.session()
    before.run([program.item("good", seconds=0.3, expected=20)])
    after, item = program.session(commit="other"), program.item("good", seconds=0.3, expected=20)
    assert 0.3 <= after.expected(item) < 10 and before.expected(program.item("new", expected=20)) == 20


def test_an_item_that_hangs_is_ended_and_those_behind_it_run(program, monkeypatch):
    monkeypatch.setattr(session, "END_SECONDS", 0.0)
    hanging = program.item("hangs", seconds=60)
    at_work = program.session(minutes=0.03)
    at_work.run([hanging, program.item("good")])
    assert program.states()["hangs"] == "stopped" and program.rows("hangs") == 1


def test_the_archive_is_there_after_each_item_and_survives_a_kill(tmp_path, program):
    """Killed as a time limit kills: SIGKILL to the program alone."""
    script, here = tmp_path / "two_items.py", (str(program.folder), str(program.archive), str(tmp_path))
    script.write_text(TWO_ITEMS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, script, *here], stdout=subprocess.PIPE, text=True, env=environment)
    for line in process.stdout:
        if line.startswith("two: begins"):
            break
    until = time.monotonic() + 20
    while not program.rows("two") and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait()
    with tarfile.open(program.archive) as packed:
        names = packed.getnames()
    assert {"x/one.csv", "x/on_gpu/items.json", "x/on_gpu/one.log"} <= set(names)
    assert archive.unpack(program.archive, tmp_path / "home") == ["x"]
    assert (tmp_path / "home/x/one.csv").read_text() == "a row\n"
    assert program.states() == {"one": "done"}
    program.session().run([program.item("one"), program.item("two")])
    assert program.rows("one") == 1 and program.rows("two") == 2


def test_what_a_long_item_has_finished_is_packed_while_it_goes_on(program, monkeypatch):
    monkeypatch.setattr(session, "PACK_SECONDS", 0.0)
    at_work, packed = program.session(), []
    at_work.pack = lambda: packed.append(program.rows("long"))
    at_work.run([program.item("long", seconds=2.5)])
    assert packed[0] in (0, 1) and len(packed) >= 2 and packed[-1] == 1


def test_an_archive_stays_below_its_limit_and_names_what_is_left_out(tmp_path):
    machine = tmp_path / "results" / "x"
    for number in range(8):
        (machine / f"run{number}").mkdir(parents=True)
        (machine / f"run{number}" / "memory.csv").write_bytes(os.urandom(10_000 * (number + 1)))
        (machine / f"run{number}" / "run.json").write_text("{}")
    (machine / "cells.csv").write_text("row\n")
    left = archive.pack(machine, tmp_path / "out.tar.gz", most_bytes=200_000)
    assert left and left[0] == "x/run7/memory.csv" and (tmp_path / "out.tar.gz").stat().st_size <= 200_000
    archive.unpack(tmp_path / "out.tar.gz", tmp_path / "home")
    assert (tmp_path / "home/x/LEFT_OUT.txt").read_text().split() == left
    assert (tmp_path / "home/x/cells.csv").exists() and (tmp_path / "home/x/run7/run.json").exists()
    (tmp_path / "half.tar.gz").write_bytes((tmp_path / "out.tar.gz").read_bytes()[:500])
    with pytest.raises(ConfigError, match="cannot unpack .*half.tar.gz"):
        archive.unpack(tmp_path / "half.tar.gz", tmp_path / "home")


@pytest.mark.parametrize("name", ("../out.csv", "/tmp/out.csv", "x/../../out.csv", "x/link.csv"))
def test_an_archive_writes_nothing_outside_the_results(name, tmp_path):
    entry = tarfile.TarInfo(name)
    if "link" in name:
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "out.tar.gz", "w:gz") as packed:
        packed.addfile(entry)
    with pytest.raises(ConfigError, match="is no file below"):
        archive.unpack(tmp_path / "out.tar.gz", tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_all_that_only_a_gpu_can_show_is_planned_in_order(tmp_path):
    plan = items.on_cuda(tmp_path / "predictions.json")
    names = [item.name for item in plan]
    assert names[:7] == ["device", "kernels", "exactness", "attention", "cells-first", "cells-k8", "published-k8"]
    assert len(set(names)) == len(names) and all(item.expected_s > 0 for item in plan)
    assert {name for name in cfg.SCALES if name[-5:] in ("-c100", "-c512")} <= set(names)
    assert {item.command[0] for item in items.on_cpu(tmp_path)} == {item.command[0] for item in plan}


@pytest.mark.torch
def test_every_item_is_a_command_that_its_program_takes(tmp_path, capsys):
    """All that can be wrong with it here is that there is no such device."""
    for item in items.on_cuda(tmp_path / "predictions.json"):
        module, *options = item.command
        options += ["--results", str(tmp_path), "--machine", "x", *(["--minutes", "1"] if item.takes_minutes else [])]
        assert importlib.import_module(module).main(options) == 2, item.name
        assert "device 'cuda' is not usable here" in capsys.readouterr().err, item.name
        assert item.complete is None or not item.complete(tmp_path / "x")


def test_a_suite_is_done_when_all_its_runs_are(tmp_path, monkeypatch):
    monkeypatch.setattr(items, "source_commit", lambda: "abc")
    item = items.suite("published", "cpu", "test", "stock,shared", "2,4", 1)
    assert not item.complete(tmp_path)
    for arm in ("stock", "shared"):
        for k in (2, 4):
            config = cfg.resolve(arm, k, "test", "cpu")
            record = {"run_id": config.run_id, "arm": arm, "scale": "test", "k": k, "repeat": 0, "status": "oom"}
            record |= {"commit": "abc", "config": config.as_dict(), "trace": []}
            (tmp_path / config.run_id).mkdir()
            assert not item.complete(tmp_path)
            write_json(tmp_path / config.run_id / "run.json", record)
    assert item.complete(tmp_path)


def test_bad_options_are_one_line(tmp_path, capsys):
    run = ["run", "--out", str(tmp_path / "a.tar.gz"), "--results", str(tmp_path)]
    for options, words in (
        ([*run, "--minutes", "-3"], "is no number of minutes"),
        ([*run, "--minutes", "1", "--device", "tpu"], "is neither cuda nor cpu"),
        ([*run, "--minutes", "1", "--device", "cpu", "--only", "exactnes"], "unknown item 'exactnes'"),
        (["unpack", str(tmp_path / "gone.tar.gz")], "cannot unpack"),
        ([*run, "--minutes", "1", "--device", "cuda"], "not usable here"),
    ):
        assert on_gpu.main(options) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said


def test_a_folder_says_which_commit_it_is_and_whether_it_was_changed(tmp_path):
    for name in prepare.SOURCES:
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).write_text("x")
    (tmp_path / "experiments" / "a.py").write_text("1")
    folder = Folder(tmp_path / ".gpu")
    assert folder.source_commit(tmp_path) is None
    folder.path.mkdir()
    write_json(folder.source, {"commit": "abc", "sources_sha256": prepare.digest(tmp_path)})
    for cache in ("__pycache__", ".ruff_cache"):
        (tmp_path / "experiments" / cache).mkdir()
        (tmp_path / "experiments" / cache / "a").write_text("x")
    assert folder.source_commit(tmp_path) == "abc"
    (tmp_path / "experiments" / "a.py").write_text("2")
    assert folder.source_commit(tmp_path) == "abc-dirty"


def test_a_copy_with_git_s_folder_and_without_git_knows_its_commit(tmp_path, monkeypatch):
    write_json((folder := Folder(tmp_path)).source, {"commit": "abc", "sources_sha256": prepare.digest(tmp_path)})
    git = ("git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x")
    subprocess.run([*git, "init", "-q"], check=True)
    assert folder.source_commit(tmp_path) == "abc", "git has no commit to say"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert folder.source_commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert folder.source_commit(tmp_path) == "abc"


@pytest.mark.parametrize("package", ("xxhash", "datasets", "pandas", "pyarrow"))
def test_a_missing_package_is_said_before_the_first_item(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "find_spec", lambda name: None if name == package else find_spec(name))
    options = ["--minutes", "1", "--device", "cpu", "--results", str(tmp_path), "--folder", str(tmp_path)]
    assert on_gpu.main(["run", "--out", str(tmp_path / "a.tar.gz"), *options, "--only", "device"]) == 2
    assert f": {package}; run ./setup_env.sh" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_network_prepare_says_so_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigError, match=r"cannot fetch datasets==.*: connect to the network, or put") as refused:
        prepare.fetch(tmp_path / "wheels")
    assert "\n" not in str(refused.value)
    for name, version in prepare.pinned().items():
        (tmp_path / "wheels").mkdir(exist_ok=True)
        (tmp_path / "wheels" / f"{name}-{version}-py3-none-any.whl").write_text("")
    prepare.fetch(tmp_path / "wheels")


def test_packages_are_taken_along_where_they_are_missing_or_of_another_version(tmp_path):
    folder = Folder(tmp_path)
    folder.wheels.mkdir()
    for name, version in (("transformers", metadata.version("transformers")), ("made_up", "1.2")):
        assert folder.packages() is None
        with zipfile.ZipFile(folder.wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "here = True")
            wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")
    assert folder.packages() == folder.site and (folder.site / "made_up/__init__.py").is_file()


def test_the_stop_of_a_session_is_kept(program):
    """SIGTERM: what runs is ended, and known as stopped."""
    at_work = program.session()
    hanging = program.item("hangs", seconds=60)

    def interrupt(process, until):
        raise Stopped(signal.SIGTERM)

    at_work.follow = interrupt
    with pytest.raises(Stopped):
        at_work.run([hanging])
    assert program.states() == {"hangs": "stopped"} and asdict(at_work.states["hangs"])["failures"] == 0

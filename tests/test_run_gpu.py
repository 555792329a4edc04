"""The script that runs on a GPU: its order, its minutes, what it leaves when killed, and what it takes along."""

import importlib
import json
import os
import signal
import subprocess
import tarfile
import time
import zipfile
from importlib import metadata
from importlib.util import find_spec

import pytest

from experiments import measuring
from experiments.bench import on_gpu
from experiments.bench.measurements import MEASUREMENTS
from experiments.config import ROOT
from rloo_memory.errors import ConfigError
from rloo_memory.storage import write_json
from tests.waiting import until

# In the place of a Python with torch: says what machine and commit it is, and does what the file named as the item
# says
PYTHON = """#!/bin/bash
here=$(dirname "$0")
case "$*" in
  *"on_gpu here"*) echo "export MACHINE=x COMMIT=$(cat $here/commit)" && exit ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    --results) results=$2 ;;
    --minutes) minutes=$2 ;;
    -m) item=${2#experiments.} && [ "$item" != bench ] || item=$3 ;;
  esac
  shift
done
echo "a row ${minutes:-}" >> "$results/x/$item.csv"
if [ -f "$here/$item" ]; then . "$here/$item"; fi
echo "last words of $item"
exit ${code:-0}
"""
ITEMS = {"kernels": "checks.kernels", "cells-first": "cells-first", "exactness": "checks.exactness"}


@pytest.fixture
def clone(tmp_path):
    """Runs a copy of the script with the stand-in; `does` says what an item does, in bash."""

    class Made:
        folder, archive = tmp_path / "clone" / "results" / "x", tmp_path / "clone" / "gpu_evidence.tar.gz"

        def does(self, item, text):
            (tmp_path / ITEMS[item]).write_text(text)

        def commit(self, name):
            (tmp_path / "commit").write_text(name)

        def start(self, *options, minutes=5):
            environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "MINUTES": str(minutes)}
            command = [tmp_path / "clone" / "run_gpu.sh", *options]
            return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True, cwd=tmp_path)

        def run(self, *options, minutes=5, code=0):
            process = self.start(*(options or ITEMS), minutes=minutes)
            out, err = process.communicate(timeout=60)
            assert process.returncode == code, out + err
            return out.splitlines()

        def rows(self, item):
            path = self.folder / f"{ITEMS[item]}.csv"
            return path.read_text().splitlines() if path.exists() else []

        def count(self, *items):
            return [len(self.rows(item)) for item in items]

    (tmp_path / "clone").mkdir()
    text = (ROOT / "run_gpu.sh").read_text()
    (tmp_path / "clone" / "run_gpu.sh").write_text(text.replace("sleep 1", "sleep 0.05"))
    (tmp_path / "python").write_text(PYTHON)
    for name in ("python", "clone/run_gpu.sh"):
        (tmp_path / name).chmod(0o755)
    made = Made()
    made.commit("abc")
    return made


def test_an_item_is_measured_once_whatever_its_verdict_and_again_by_other_code(clone):
    clone.does("cells-first", "code=4")
    clone.does("exactness", "code=1")
    said = clone.run(code=1)
    assert any("cells-first: done, " in line and "not as it should be: last words of" in line for line in said)
    assert any(line.startswith("exactness: failed, ") and "last words of" in line for line in said)
    assert said[-1] == f"failed: exactness, see {clone.folder}/on_gpu/exactness.log"
    said = clone.run(code=1)
    assert "exactness: failed before, left alone (--again tries it)" in said
    assert clone.count(*ITEMS) == [1, 1, 1]
    clone.run("exactness", "--again", code=1)
    assert clone.count(*ITEMS) == [1, 1, 2]
    clone.commit("other")
    clone.does("exactness", "")
    clone.run()
    assert clone.count(*ITEMS) == [2, 2, 3]
    clone.commit("other-dirty")
    for _ in range(2):
        clone.run("kernels")
    assert clone.count("kernels") == [4], "changed, uncommitted code is not known again"


def test_what_does_not_fit_is_not_begun_and_what_goes_on_gets_what_is_left(clone):
    clone.does("cells-first", "code=5")
    time.sleep(1 - time.time() % 1)  # bash's SECONDS turns with the clock's: begun late in one, it is soon 1
    said = clone.run(minutes=1)
    assert [line for line in said if "not begun" in line] == [
        "exactness: not begun, may take 220 s and 45 s are left",
        "cells-first: not begun, may take 200 s and 45 s are left",
    ]
    assert clone.count(*ITEMS) == [1, 0, 0]
    said = clone.run("cells-first")
    assert sum("cells-first: stopped after" in line for line in said) == 2, "once more when all others had their turn"
    assert all(3.5 < float(line.split()[2]) <= 4 for line in clone.rows("cells-first")), "285 s less 45"
    clone.does("cells-first", "")
    assert any("cells-first: done" in line for line in clone.run("cells-first"))


def test_an_item_that_hangs_is_ended_and_those_behind_it_run(clone, tmp_path):
    script, text = (path := tmp_path / "clone" / "run_gpu.sh"), path.read_text()
    script.write_text(text.replace("4 * seconds + 600", "1"))
    clone.does("exactness", "trap '' TERM; sleep 60 & wait; sleep 60")
    said = clone.run(code=1)
    assert clone.count(*ITEMS) == [1, 1, 1] and any("exactness: failed, " in line for line in said)
    script.write_text(text.replace('"$seconds" -gt "$left"', "1 -gt 2").replace("* 60 - 15", "* 0 + 2"))
    clone.does("exactness", "sleep 60")
    said = clone.run("exactness", "--again")
    assert any("exactness: stopped after" in line for line in said), "the minutes are over"


def test_a_kill_leaves_an_archive_and_ends_what_runs(clone, tmp_path):
    clone.does("exactness", f"echo $$ > {tmp_path}/pid; sleep 60 & wait")
    process = clone.start("kernels", "exactness")
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(pid, signal.SIGKILL)  # the stand-in knows no SCRIPT_PID
    assert on_gpu.unpack(clone.archive, tmp_path / "home") == ["x"]
    found = {path.relative_to(tmp_path / "home").as_posix() for path in (tmp_path / "home").rglob("*")}
    assert {"x/checks.kernels.csv", "x/on_gpu/kernels.done", "x/on_gpu/kernels.log"} <= found
    clone.does("exactness", "")
    clone.run("kernels", "exactness")
    assert clone.count("kernels", "exactness") == [1, 2]


def test_too_large_an_archive_leaves_samples_and_logs_behind(clone, tmp_path):
    script = tmp_path / "clone" / "run_gpu.sh"
    script.write_text(script.read_text().replace('>> 20))" -lt 15', '>> 10))" -lt 15'))
    clone.folder.mkdir(parents=True)
    (clone.folder / "run0").mkdir()
    (clone.folder / "run0" / "memory.csv").write_bytes(os.urandom(100_000))
    (clone.folder / "run0" / "run.json").write_text("{}")
    clone.run("kernels")
    with tarfile.open(clone.archive) as packed:
        assert "x/run0/run.json" in packed.getnames() and "x/run0/memory.csv" not in packed.getnames()


@pytest.mark.parametrize("options, said", [
    (["nope"], "unknown item or option nope; see ./run_gpu.sh --help and --list"),
    (["--device", "tpu"], "--device tpu is neither cuda nor cpu"),
    (["--device"], "--device needs a value"),
])  # fmt: skip
def test_bad_options_are_one_line(clone, options, said):
    process = clone.start(*options)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (2, "") and said in err and err.count("\n") == 1
    assert not clone.folder.exists()


def items():
    """(name, device, seconds, command) of each."""
    listed = subprocess.run([ROOT / "run_gpu.sh", "--list"], capture_output=True, text=True, check=True).stdout
    return [(name, where, seconds, words) for name, where, seconds, *words in map(str.split, listed.splitlines())]


def test_all_that_only_a_gpu_can_show_is_listed_in_order():
    names = [name for name, where, *_ in items() if where != "cpu"]
    assert names[:7] == ["device", "kernels", "exactness", "attention", "cells-first", "cells-k8", "published-k8"]
    assert len(set(names)) == len(names)
    assert {name for name in MEASUREMENTS if name.startswith("cells-")} - {"cells-small"} <= set(names)
    modules = {where: {words[0] for _, on, _, words in items() if on in ("both", where)} for where in ("cpu", "cuda")}
    assert modules["cpu"] == modules["cuda"], "the trial tries every program"


@pytest.mark.torch
def test_every_item_is_a_command_that_its_program_takes(tmp_path, capsys):
    """All that can be wrong with it here is that there is no such device."""
    for name, where, seconds, (module, *options) in items():
        if where == "cpu":
            continue
        program = importlib.import_module(f"experiments.{module}" + (".__main__" if module == "bench" else ""))
        options += ["--device", "cuda", "--results", str(tmp_path), "--machine", "x"]
        assert program.main([*options, *(["--minutes", "1"] if seconds.endswith("+") else [])]) == 2, name
        assert "device 'cuda' is not usable here" in capsys.readouterr().err, name


def test_a_copy_says_which_commit_it_is_and_whether_it_was_changed(tmp_path, monkeypatch):
    """Also beside git's folder where there is no git."""
    for name in on_gpu.SOURCES:
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).write_text("x")
    (tmp_path / "experiments" / "a.py").write_text("1")
    folder = tmp_path / ".gpu"
    folder.mkdir()
    assert on_gpu.carried_commit(folder, tmp_path) is None
    write_json(folder / "commit.json", {"commit": "abc", "sources_sha256": on_gpu.digest(tmp_path)})
    for cache in ("__pycache__", ".ruff_cache"):
        (tmp_path / "experiments" / cache).mkdir()
        (tmp_path / "experiments" / cache / "a").write_text("x")
    assert on_gpu.carried_commit(folder, tmp_path) == "abc"
    git = ("git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x")
    subprocess.run([*git, "init", "-q"], check=True)
    assert on_gpu.carried_commit(folder, tmp_path) == "abc", "git has no commit to say"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert on_gpu.carried_commit(folder, tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert on_gpu.carried_commit(folder, tmp_path) == "abc"
    (tmp_path / "experiments" / "a.py").write_text("2")
    assert on_gpu.carried_commit(folder, tmp_path) == "abc-dirty"


@pytest.mark.parametrize("package", ("xxhash", "datasets", "pandas", "pyarrow"))
def test_a_missing_package_is_said_before_the_first_item(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "FOLDER", tmp_path)
    monkeypatch.setattr(measuring, "find_spec", lambda name: None if name == package else find_spec(name))
    assert on_gpu.main(["here", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert f": {package}; run ./setup_env.sh" in said.err and not said.out


def test_the_environment_of_a_machine_is_what_a_shell_can_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "FOLDER", tmp_path)
    assert on_gpu.main(["here", "--device", "cpu"]) == 0
    script = capsys.readouterr().out + 'echo "$MACHINE $COMMIT $TORCH_CUDNN_SDPA_DEPRIORITIZED"'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert said[0].startswith("cpu-") and said[2] == "1" and len(said[1].split("-")[0]) >= 7


def test_without_a_network_prepare_says_so_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigError, match=r"cannot fetch datasets==.*: connect to the network, or put") as refused:
        on_gpu.fetch(tmp_path / "wheels")
    assert "\n" not in str(refused.value)
    for name, version in on_gpu.pinned().items():
        (tmp_path / "wheels").mkdir(exist_ok=True)
        (tmp_path / "wheels" / f"{name}-{version}-py3-none-any.whl").write_text("")
    on_gpu.fetch(tmp_path / "wheels")


def test_packages_are_taken_along_where_they_are_missing_or_of_another_version(tmp_path):
    (tmp_path / "wheels").mkdir()
    for name, version in (("transformers", metadata.version("transformers")), ("made_up", "1.2")):
        assert on_gpu.packages(tmp_path) is None
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "here = True")
            wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")
    assert on_gpu.packages(tmp_path) == tmp_path / "site" and (tmp_path / "site/made_up/__init__.py").is_file()


@pytest.mark.parametrize("name", ("../out.csv", "x/../../out.csv", "x/link.csv"))
def test_an_archive_writes_nothing_outside_the_results(name, tmp_path):
    entry = tarfile.TarInfo(name)
    if "link" in name:
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "out.tar.gz", "w:gz") as packed:
        packed.addfile(entry)
    with pytest.raises(ConfigError, match="cannot unpack .*out.tar.gz"):
        on_gpu.unpack(tmp_path / "out.tar.gz", tmp_path / "home")
    (tmp_path / "half.tar.gz").write_bytes(b"half")
    with pytest.raises(ConfigError, match="give the archive that run_gpu.sh wrote"):
        on_gpu.unpack(tmp_path / "half.tar.gz", tmp_path / "home")


def test_the_log_of_what_failed_in_a_trial_is_kept(tmp_path, monkeypatch):
    """As is what it left: a trial that fails is looked into."""
    monkeypatch.setattr(on_gpu, "tracked", lambda: [ROOT / "run_gpu.sh"])
    write_json(tmp_path / "commit.json", {"commit": "abc"})
    stand_in = 'case "$*" in *here*) echo "export MACHINE=x COMMIT=abc" ;; *) exit 1 ;; esac'
    (tmp_path / "python").write_text(f"#!/bin/sh\n{stand_in}\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ConfigError, match="the trial failed .*cells-small"):
        on_gpu.tried(tmp_path, str(tmp_path / "python"))
    assert (tmp_path / "trial" / "x" / "on_gpu" / "kernels.failed").read_text().startswith("abc checks.kernels")
    assert json.loads((tmp_path / "commit.json").read_text())

"""`setup_env.sh`, in a copy with a stub for Python and its pip: what it leaves, and what it says."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from experiments.config import ROOT
from tests.waiting import until

# Makes real environments, without pip. PIP says what pip does: "" all is well; "hang": it waits to be let go; other
# text is printed, and pip fails.
STUB = r"""#!/bin/bash
case "$*" in
  --version) echo Python 3.11.0 ;;
  "-m venv "*)
    new=${@: -1}
    REAL "${@:1:$#-1}" --without-pip "$new" || exit
    cp "$0" "$new/bin/stub" && ln -sf stub "$new/bin/python"
    printf '#!%s\necho of %s\n' "$PWD/$new/bin/python3" "$PWD/$new" > "$new/bin/tool" ;;
  "-m pip "*)
    echo "$*" >> "$CALLS"
    echo "WARNING: Location 'file:///nowhere' is ignored"
    if [ "$PIP" = hang ]; then
      echo $$ > "$CALLS.pid"
      while [ ! -e "$CALLS.go" ]; do sleep 0.01; done
    elif [ -n "$PIP" ]; then
      echo "$PIP" >&2
      exit 1
    fi ;;
  "trl/fork.py "*) [ -z "$FORK" ] || { echo "$FORK" >&2; exit 2; } ;;
  *) exec REAL "$@" ;;
esac
""".replace("REAL", sys.executable)


class Copy:
    """A folder with `setup_env.sh` and what it reads."""

    def __init__(self, folder):
        self.started_in, self.folder = folder, folder / "a copy"
        (self.folder / "trl" / "classic").mkdir(parents=True)
        (self.folder / "trl" / "classic" / "series").write_text("# none but\n0001-one.patch\n")
        shutil.copy(ROOT / "setup_env.sh", self.folder)
        (self.folder / "pyproject.toml").write_text("[project]\n")
        (self.folder / "requirements.lock").write_text("# two\nnumpy==1.0\ntorch==2.0\n")
        self.stub = folder / "stub"
        self.stub.write_text(STUB)
        self.stub.chmod(0o755)
        self.calls = folder / "calls"
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment = {**inherited, "PYTHON": str(self.stub), "CALLS": str(self.calls), "PIP": "", "FORK": ""}

    def start(self, *options, **environment):
        return subprocess.Popen(
            [self.folder / "setup_env.sh", *options],
            cwd=self.started_in,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *options, **environment):
        """(exit code, lines on stdout, lines on stderr)"""
        process = self.start(*options, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.splitlines(), err.splitlines()

    def change_lock(self):
        with (self.folder / "requirements.lock").open("a") as file:
            file.write("zstd==1.0\n")

    @property
    def left(self):
        return sorted(path.name for path in self.folder.glob(".venv*"))

    def is_old(self):
        """Whether the environment is the one that `old` marked, and works."""
        tool = subprocess.run([self.folder / ".venv" / "bin" / "python3", "-c", ""])
        return tool.returncode == 0 and (self.folder / ".venv" / "old").exists() and self.left == [".venv"]


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


@pytest.fixture
def old(copy):
    """A copy with an environment that is out of date."""
    assert copy.run("--cpu")[0] == 0
    (copy.folder / ".venv" / "old").touch()
    copy.change_lock()
    return copy


def test_a_new_environment_names_its_own_place_and_shows_its_progress(copy):
    code, out, err = copy.run("--cpu")
    assert (code, err, copy.left) == (0, [], [".venv"])
    assert [line[:10] for line in out] == ["environmen", "  1 of 3: ", "  2 of 3: ", "  3 of 3: ", "environmen"]
    assert "torch 2.0, CPU build" in out[1] and "the other 1 packages" in out[2] and out[4] == "environment: ready"
    assert "WARNING" in (copy.folder / ".build" / "setup_env.log").read_text()
    scripts = [path for path in (copy.folder / ".venv").glob("bin/*") if path.is_file() and not path.is_symlink()]
    for path in [copy.folder / ".venv" / "pyvenv.cfg", *scripts]:
        assert ".venv.new" not in path.read_text(), path
    told = f"source '{copy.folder}/.venv/bin/activate'; command -v tool; echo $VIRTUAL_ENV"
    place = str(copy.folder / ".venv")
    shown = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown == [f"{place}/bin/tool", place]
    assert copy.run() == (0, ["environment: up to date (.venv)"], [])
    assert copy.run("--quiet") == (0, [], [])


def test_the_fork_is_installed_anew_where_it_has_changed_and_not_for_a_cache(copy):
    assert copy.run("--cpu")[0] == 0
    before = copy.calls.read_text()
    for cache in ("trl/__pycache__/fork.pyc.1", "trl/classic/.ruff_cache/x"):
        (copy.folder / cache).parent.mkdir()
        (copy.folder / cache).touch()
        (copy.folder / cache).write_text(cache)
    assert copy.run() == (0, ["environment: up to date (.venv)"], []) and copy.calls.read_text() == before
    (copy.folder / "trl" / "classic" / "series").write_text("# none\n")
    assert copy.run("--quiet") == (0, [], [])
    calls = copy.calls.read_text().removeprefix(before).splitlines()
    assert len(calls) == 2 and all("--no-index" in call for call in calls) and copy.left == [".venv"]
    assert copy.run() == (0, ["environment: up to date (.venv)"], [])


def test_a_new_environment_takes_the_place_of_the_old_one(old):
    assert old.run("--cpu")[0] == 0
    assert old.left == [".venv"] and not (old.folder / ".venv" / "old").exists()
    shutil.move(old.folder / ".venv", old.folder / "elsewhere")
    (old.folder / ".venv").symlink_to("elsewhere")
    (old.folder / "elsewhere" / "old").touch()
    old.change_lock()
    assert old.run("--cpu")[0] == 0
    assert old.left == [".venv"] and not (old.folder / ".venv").is_symlink()
    assert (old.folder / "elsewhere" / "old").exists(), "what a link points at is not ours"


NO_NETWORK = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(Name or service not known)'\n"
    "ERROR: No matching distribution found for torch==2.0"
)
MISSING = "ERROR: No matching distribution found for torch==2.0"


@pytest.mark.parametrize(
    "options, environment, expected",
    [
        (
            (),
            {"PIP": MISSING},
            ["pip failed on torch (No matching distribution found for torch==2.0)", "setup_env.log"],
        ),
        ((), {"PIP": NO_NETWORK}, ["no network for torch: connect, or", "--download DIR", "--offline DIR"]),
        ((), {"PIP": "Killed"}, ["pip failed on torch (it said nothing)", "setup_env.log"]),
        (("--offline", "."), {"PIP": MISSING}, [" does not serve for torch", "--download /", "Python 3.11.0"]),
        (("--offline", "nowhere"), {}, ["no folder /", "/nowhere; ", "--download"]),
        (("--use-system-torch",), {}, ["cannot import torch", "without the option"]),
        ((), {"FORK": "fork.py: cannot obtain trl 0.21.0: connect to the network"}, ["fork.py: cannot obtain trl"]),
        ((), {"PYTHON": "/nowhere/python"}, ["no Python 3.11 or newer", "PYTHON=/path/to/python"]),
        (("--ofline",), {}, ["unknown option --ofline", "--help"]),
        (("--offline",), {}, ["--offline needs a folder"]),
    ],
)
def test_a_set_up_that_fails_keeps_the_old_environment_and_says_why_in_one_line(old, options, environment, expected):
    old.environment["PYTHONPATH"] = str(old.folder)
    (old.folder / "torch.py").write_text("raise ImportError")
    code, out, err = old.run("--cpu", *options, **environment)
    assert code in (1, 2) and len(err) == 1 and err[0].startswith("setup_env: "), err
    for text in expected:
        assert text in err[0]
    assert not any("ready" in line or "WARNING" in line for line in out)
    assert old.is_old()
    assert old.run("--cpu")[0] == 0, "the next try is not hindered"


def test_without_git_the_remedy_is_named_before_anything_is_made(old, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for path in os.scandir(folder) if os.path.isdir(folder) else ():
            if path.name != "git" and not (tools / path.name).is_symlink():
                (tools / path.name).symlink_to(path.path)
    code, out, err = old.run("--cpu", PATH=str(tools))
    assert (code, out, len(err)) == (2, [], 1)
    assert "git is missing" in err[0] and "install it" in err[0]
    assert old.is_old()


def alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def start_and_hang(copy):
    process = copy.start("--cpu", PIP="hang")
    note = copy.calls.with_name("calls.pid")
    until(lambda: note.exists() and note.read_text().endswith("\n"))
    return process, int(note.read_text())


@pytest.mark.parametrize("sent, to_all", [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, True)])
def test_an_interrupted_set_up_ends_at_once_and_keeps_the_old_environment(old, sent, to_all):
    process, pip = start_and_hang(old)
    assert (old.folder / ".venv" / "old").exists(), "in use while the new one is made"
    (os.killpg if to_all else os.kill)(process.pid, sent)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (128 + sent, "setup_env: interrupted; .venv is as it was\n")
    assert not alive(pip) and old.is_old()


def test_a_set_up_after_one_that_was_killed_waits_for_its_pip_and_clears_up(old):
    process, pip = start_and_hang(old)
    process.kill()
    process.wait()
    assert (old.folder / ".venv" / "old").exists() and old.left == [".venv", ".venv.new"]
    second = old.start("--cpu")
    assert second.stdout.readline() == "environment: another set-up is at work here, waiting for its end\n"
    os.kill(pip, signal.SIGKILL)
    assert second.communicate(timeout=60)[1] == "" and second.returncode == 0
    assert old.left == [".venv"] and not (old.folder / ".venv" / "old").exists()
    process.stdout.close(), process.stderr.close()


@pytest.mark.parametrize("pip", ["", MISSING])
def test_a_set_up_killed_between_its_renames_is_recovered_from(old, pip):
    (old.folder / ".venv").rename(old.folder / ".venv.old")
    (old.folder / ".venv.new").mkdir()
    code, _, _ = old.run("--cpu", PIP=pip)
    assert code == bool(pip) and old.left == [".venv"]
    assert old.is_old() == bool(pip)


def test_of_two_set_ups_at_once_the_second_waits_and_finds_it_done(copy):
    first, _ = start_and_hang(copy)
    second = copy.start("--cpu")
    assert "waiting" in second.stdout.readline()
    copy.calls.with_name("calls.go").touch()
    assert first.communicate(timeout=60)[0].endswith("environment: ready\n")
    assert second.communicate(timeout=60) == ("environment: up to date (.venv)\n", "")
    assert copy.left == [".venv"]


def test_a_download_leaves_the_environment_alone_and_its_failure_is_one_line(old):
    code, out, err = old.run("--download", "wheels", "--cuda")
    assert (code, err) == (0, []) and out[-1].endswith(f"--offline {old.started_in}/wheels") and old.is_old()
    calls = old.calls.read_text().splitlines()[-3:]
    assert all(f"--dest {old.started_in}/wheels" in call for call in calls), "where the user stands"
    assert [call.split()[-1] for call in calls] == ["torch==2.0", "requirements.lock", "trl==0.21.0"]
    code, out, err = old.run("--download", "wheels", "--cpu", PIP=NO_NETWORK)
    assert code == 1 and len(err) == 1 and "no network for torch" in err[0] and old.is_old()


def test_the_cpu_build_is_looked_for_before_pypis_larger_one_is_taken(copy):
    code, out, _ = copy.run("--cpu")
    assert code == 0 and copy.calls.read_text().splitlines()[0].endswith("torch==2.0+cpu")
    only_pypi = STUB.replace('elif [ -n "$PIP" ]', 'elif [[ "$*" == *+cpu* ]]')
    copy.stub.write_text(only_pypi)
    copy.change_lock()
    code, out, _ = copy.run("--cpu", PIP=MISSING)
    assert code == 0 and any("taking PyPI's" in line for line in out)
    tried = [call.split()[-1] for call in copy.calls.read_text().splitlines()[4:]]  # each installs the fork at last
    assert tried[:4] == ["torch==2.0+cpu", "torch==2.0+cpu", "torch==2.0", "requirements.lock"]


def test_what_keeps_trainings_from_the_gpu_is_said_when_it_is_set_up_for_one(old):
    (old.folder / "rloo_memory").mkdir()
    check = "import sys; print('gpu: no compiler', file=sys.stderr); sys.exit(1)"
    (old.folder / "rloo_memory" / "cuda_check.py").write_text(check)
    old.change_lock()
    code, _, err = old.run("--cuda")
    assert code == 0 and err == ["gpu: no compiler"]
    old.change_lock()
    assert old.run("--cpu")[2] == []

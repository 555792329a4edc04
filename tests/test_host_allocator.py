"""The launcher puts another malloc in place, once, and does not claim one that is not there."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_memory import host_allocator
from rloo_memory.errors import ConfigError
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import command_line

ROOT = Path(__file__).resolve().parent.parent
STARTS = """
import os, sys
from pathlib import Path
with Path(sys.argv[1], "starts").open("a") as file:
    print(os.getpid(), file=file)
"""
ACTIVATE = f"""{STARTS}
from rloo_memory import host_allocator
host_allocator.activate(sys.argv[2])
print(host_allocator.active(), os.environ["LD_PRELOAD"])
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """A folder with a library that can be preloaded, under the name of each allocator and another one."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler (cc) for the stand-in library")
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("libtcmalloc_minimal.so.4", "libjemalloc.so.2", "libother.so.1"):
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", folder / name]
        subprocess.run(command, input="int stand_in;", text=True, check=True)
    return folder


def python(*arguments, **environment):
    """What a Python process printed. With LD_LIBRARY_PATH it finds stand-ins before libraries that are installed."""
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment = {**inherited, "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in environment.items()}}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, error = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's processes, too
        output, error = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


def starts(folder):
    return (folder / "starts").read_text().split()


@linux
@pytest.mark.parametrize("name, file", [("tcmalloc", "libtcmalloc_minimal.so.4"), ("jemalloc", "libjemalloc.so.2")])
def test_the_process_starts_itself_again_once_and_the_library_is_loaded(name, file, libraries, tmp_path):
    result = python("-c", ACTIVATE, tmp_path, name, LD_LIBRARY_PATH=libraries)
    assert result.stdout.split() == [name, str(libraries / file)], result.stderr
    first, second = starts(tmp_path)
    assert first == second, "the process must keep its number"


@linux
def test_a_library_that_was_preloaded_by_hand_is_taken_as_it_is(libraries, tmp_path):
    preload = libraries / "libjemalloc.so.2"
    result = python("-c", ACTIVATE, tmp_path, "jemalloc", LD_PRELOAD=preload)
    assert result.stdout.split() == ["jemalloc", str(preload)] and len(starts(tmp_path)) == 1, result.stderr


@linux
def test_other_preloads_stay_and_another_allocator_goes(libraries, tmp_path):
    given = f"{libraries / 'libjemalloc.so.2'} {libraries / 'libother.so.1'}"
    result = python("-c", ACTIVATE, tmp_path, "tcmalloc", LD_LIBRARY_PATH=libraries, LD_PRELOAD=given)
    expected = f"{libraries / 'libtcmalloc_minimal.so.4'}:{libraries / 'libother.so.1'}"
    assert result.stdout.split() == ["tcmalloc", expected], result.stderr


@linux
def test_the_launcher_says_which_library_is_loaded(libraries):
    """The dataset does not exist, so that nothing is trained; the allocator comes first."""
    words = ("balanced", "--dataset_name", "no_such.csv", "--host_allocator", "tcmalloc")
    result = python("-m", "rloo_memory.launch", *words, LD_LIBRARY_PATH=libraries)
    assert result.stdout == f"host allocator: {libraries / 'libtcmalloc_minimal.so.4'}\n", result.stderr
    assert result.returncode == 2 and "dataset 'no_such.csv': it is not here" in result.stderr


@linux
@pytest.mark.torch
def test_workers_of_torchrun_start_again_and_still_find_each_other(libraries, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        f"{ACTIVATE}\nimport torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "Path(sys.argv[1], f'rank{dist.get_rank()}').write_text(host_allocator.active())\n"
        "dist.destroy_process_group()\n"
    )
    result = python(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        2,
        script,
        tmp_path,
        "jemalloc",
        LD_LIBRARY_PATH=libraries,
        OMP_NUM_THREADS=1,
    )
    ranks = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert ranks == {"rank0": "jemalloc", "rank1": "jemalloc"}, result.stderr[-2000:]
    assert len(starts(tmp_path)) == 4 and len(set(starts(tmp_path))) == 2


@linux
def test_a_preload_that_the_linker_ignored_is_refused(tmp_path):
    (tmp_path / "libtcmalloc_minimal.so.4").write_text("not a library")
    preload = tmp_path / "libtcmalloc_minimal.so.4"
    result = python("-m", "rloo_memory.launch", "balanced", "--host_allocator", "tcmalloc", LD_PRELOAD=preload)
    line = result.stderr.splitlines()[-1]
    assert result.returncode == 2 and line.startswith("launch: host_allocator 'tcmalloc' is not active"), result.stderr
    assert str(preload) in line and not result.stdout


@linux
def test_a_library_that_cannot_be_loaded_is_refused_after_one_new_start(tmp_path):
    """Its header is that of a library for this machine, and nothing follows."""
    (tmp_path / "libjemalloc.so.2").write_bytes(Path(sys.executable).read_bytes()[:64])
    result = python("-c", ACTIVATE, tmp_path, "jemalloc", LD_LIBRARY_PATH=tmp_path)
    assert "ConfigError: host_allocator 'jemalloc' is not active" in result.stderr and not result.stdout
    assert len(starts(tmp_path)) == 2


@linux
def test_an_interpreter_that_drops_ld_preload_does_not_loop(libraries, tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    code = ACTIVATE.replace("host_allocator.activate", f"sys.executable = {str(wrapper)!r}\nhost_allocator.activate")
    result = python("-c", code, tmp_path, "tcmalloc", LD_LIBRARY_PATH=libraries)
    assert "ConfigError: host_allocator 'tcmalloc' is not active: LD_PRELOAD is ''" in result.stderr
    assert len(starts(tmp_path)) == 2


@linux
@pytest.mark.parametrize("name, remedy", [("tcmalloc", "libtcmalloc-minimal4"), ("jemalloc", "libjemalloc2")])
def test_a_library_that_is_not_installed_is_refused_with_the_remedy(name, remedy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host_allocator, "folders", lambda: [tmp_path])
    assert launch.main(["balanced", "--host_allocator", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"launch: host_allocator {name!r} is not installed; apt install {remedy} ")
    assert error.count("\n") == 1


@linux
def test_a_32_bit_library_is_passed_over(tmp_path, monkeypatch):
    ours = Path(sys.executable).read_bytes()[:20]
    for folder, header in (("32", ours[:4] + b"\x01" + ours[5:]), ("right", ours)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libtcmalloc.so.4").write_bytes(header)
    monkeypatch.setattr(host_allocator, "folders", lambda: [tmp_path / "no", tmp_path / "32", tmp_path / "right"])
    assert host_allocator.find("tcmalloc") == tmp_path / "right" / "libtcmalloc.so.4"
    shutil.rmtree(tmp_path / "right")
    with pytest.raises(ConfigError, match="not installed"):
        host_allocator.find("tcmalloc")


@pytest.mark.parametrize(
    "setting, parts",
    [
        ("tcmaloc", ["unknown host_allocator 'tcmaloc'", "did you mean tcmalloc?"]),
        ("jemaloc", ["unknown host_allocator 'jemaloc'", "did you mean jemalloc?"]),
        ("7", ["unknown host_allocator", "choose one of system, tcmalloc, jemalloc"]),
        ("", ["unknown host_allocator", "choose one of system, tcmalloc, jemalloc"]),
    ],
)
def test_an_unknown_allocator_is_refused_naming_the_nearest(setting, parts, tmp_path, capsys):
    profile = tmp_path / "profile.yaml"
    profile.write_text(f"host_allocator: {setting!r}\n")
    for argv in (["balanced", "--host_allocator", setting], [str(profile)]):
        assert launch.main(argv) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(part in error for part in parts), error


def test_the_command_line_goes_before_the_profile(tmp_path):
    profile = tmp_path / "profile.yaml"
    profile.write_text("beta: 0.0\nhost_allocator: jemalloc\n")
    for words, allocator in (
        ([str(profile), "--max_steps", "2"], "jemalloc"),
        ([str(profile), "--host-allocator=tcmalloc"], "tcmalloc"),
        (["balanced"], "system"),
    ):
        assert command_line.host_allocator(words) == allocator


def test_another_system_than_linux_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert launch.main(["balanced", "--host_allocator", "jemalloc"]) == 2
    assert "host_allocator 'jemalloc' needs Linux" in capsys.readouterr().err


@linux
def test_a_program_that_calls_the_launcher_is_not_replaced(libraries, monkeypatch, capsys):
    monkeypatch.setattr(host_allocator, "folders", lambda: [libraries])
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail(f"execve{command}"))
    assert launch.main(["balanced", "--host_allocator", "jemalloc"]) == 2
    assert f"LD_PRELOAD={libraries / 'libjemalloc.so.2'}" in capsys.readouterr().err

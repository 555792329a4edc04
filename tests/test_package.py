"""What `pip install .` gives: the command in any folder, its data, and one line where `trl` is not the fork."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from fork_tool import fork, obtain

from experiments.arms import ARMS
from experiments.builds import build
from experiments.config import ROOT
from rloo_memory import __main__ as command


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel of this clone, unpacked in a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "rloo_memory", folder / "clone" / "rloo_memory", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", folder / "clone")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "./clone"]
    subprocess.run([*pip, "--wheel-dir", "."], check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(installed, folder, *words, trl=None):
    path = os.pathsep.join(map(str, filter(None, (installed, trl))))
    script = "import sys, rloo_memory.__main__ as m; print(m.__file__, file=sys.stderr); sys.exit(m.main())"
    result = subprocess.run(
        [sys.executable, "-P", "-c", script, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "MODEL_PATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    where, *error = result.stderr.splitlines()
    assert where.startswith(str(installed))
    return result.returncode, result.stdout, error


def test_the_wheel_holds_the_product_and_its_data_and_nothing_else(installed):
    tops = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"rloo_memory"}
    ours = {
        path.relative_to(ROOT)
        for path in (ROOT / "rloo_memory").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {path.suffix for path in ours} == {".py", ".yaml", ".json", ".jsonl"}
    assert {path.relative_to(installed) for path in (installed / "rloo_memory").rglob("*") if path.is_file()} == ours
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "rloo-memory = rloo_memory.__main__:main" in points.read_text()


def test_its_commands_run_in_any_folder(installed, tmp_path):
    code, out, _ = run(installed, tmp_path, "launch", "--help")
    assert code == 0 and "single_gpu_24gb" in out
    words = "doctor --profile single_gpu_24gb --model qwen3-0.6b --prompt 64 --device-memory 23.5GiB".split()
    code, out, error = run(installed, tmp_path, *words)
    assert code == 0 and "fits: " in out, error
    assert (tmp_path / "fits.yaml").exists()
    code, out, error = run(installed, tmp_path, "launch", "fits.yaml")
    assert code == 2 and "MODEL_PATH=hub:qwen3-0.6b downloads it" in error[-1]


@pytest.mark.parametrize("words", [["plan", "--model", "qwen3-0.6b", "--prompt", "64"], ["launch", "balanced"]])
def test_another_trl_is_told_in_one_line(installed, tmp_path, words):
    words = [*words, "--model_name_or_path", "random:tiny-qwen3"] if words[0] == "launch" else words
    code, out, error = run(installed, tmp_path, *words, trl=build(ARMS["stock"]))
    assert code == 2 and "has no prefix sharing: in the clone of rloo-memory run python trl/fork.py wheel" in error[-1]


def test_a_word_that_is_no_command_is_told_in_one_line(capsys):
    assert command.main(["plam"]) == 2
    assert capsys.readouterr().err == "rloo-memory: no command 'plam'; choose one of: plan, doctor, launch, check\n"
    assert command.main([]) == 0 and "rloo-memory plan" in capsys.readouterr().out


def test_the_way_back_that_docs_name_takes_the_fork_away():
    """`pip install trl` does not: to pip the fork is that version already."""
    released = obtain(fork.load_lines(ROOT / "trl")["current"]).parent
    for page in ("docs/faq.md", "docs/tutorial.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert "`pip install --force-reinstall --no-deps trl==1.16.0`" in text, page

    def asked(*words):
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links", released]
        return subprocess.run([*pip, *words], capture_output=True, text=True).stdout

    assert "already satisfied" in asked("--no-deps", "trl")
    assert "Would install trl-1.16.0\n" in asked("--force-reinstall", "--no-deps", "trl==1.16.0")

"""What the project declares and locks, and what `pip install .` gives: the command in any folder and its data."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.arms import ARMS
from experiments.builds import build
from experiments.config import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BESIDE = {"pyproject.toml", "README.md", "LICENSE"}  # what a wheel is made of beside the package
NOT_LOCKED = {"deepspeed", "images", "vllm"}  # groups for environments of their own


def test_the_lock_is_what_the_project_needs_at_versions_that_serve_and_nothing_more():
    rows = [row.split("==") for row in (ROOT / "requirements.lock").read_text().splitlines()[1:]]
    lock = {canonicalize_name(name): version for name, version in rows}
    groups = [group for name, group in PROJECT["dependency-groups"].items() if name not in NOT_LOCKED]
    todo = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["build-system"]["requires"],
        *(text for group in groups for text in group),
    ]
    needed = set()
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in lock and name.startswith(("cuda-", "nvidia-", "triton")):
            continue  # of torch's CUDA build, which pins them itself
        assert name in lock and requirement.specifier.contains(lock[name], prereleases=True), requirement
        if name not in needed:
            todo += importlib.metadata.requires(name) or []
        needed.add(name)
    assert needed == lock.keys()


def test_what_the_package_imports_it_declares():
    text = "\n".join(path.read_text() for path in (ROOT / "rloo_memory").rglob("*.py"))
    providers = importlib.metadata.packages_distributions()
    imported = {*re.findall(r"^ *(?:import|from) (\w+)", text, re.M)}
    assert imported.isdisjoint({"experiments", "visualization", "tests"}), "no package has them"
    known = imported & providers.keys() - {"rloo_memory", "vllm"}
    used = {canonicalize_name(name) for module in known for name in providers[module]} - {"rloo-memory"}
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"]}
    assert used - {"pillow"} <= declared, "pillow: the group images"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """This clone's wheel, unpacked."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("*.pyc")
    shutil.copytree(ROOT / "rloo_memory", folder / "clone" / "rloo_memory", ignore=ignored)
    for name in BESIDE:
        shutil.copy(ROOT / name, folder / "clone")
    zipfile.ZipFile(wheel(folder, "./clone")).extractall(folder / "site")
    return folder / "site"


def wheel(folder, of):
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", of]
    subprocess.run(pip, check=True, cwd=folder)
    return next(folder.glob("*.whl"))


def run(site, folder, words, trl=""):
    script = "import sys, rloo_memory.__main__ as m; assert m.__file__.startswith(sys.argv.pop(1)); sys.exit(m.main())"
    environment = {"PYTHONPATH": f"{site}:{trl}", "MODEL_PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-c", script, str(site), *words.split()]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


def test_the_wheel_holds_the_product_and_its_data_and_nothing_else(site):
    files = {path.relative_to(site) for path in site.rglob("*") if path.is_file()}
    ours = {path.relative_to(ROOT) for path in (ROOT / "rloo_memory").rglob("*.*") if path.suffix != ".pyc"}
    assert {path for path in files if not path.parts[0].endswith(".dist-info")} == ours
    (points,) = site.glob("*.dist-info/entry_points.txt")
    left = {path.name for path in (site.parent / "clone").iterdir()}
    assert left == {"rloo_memory", *BESIDE}, "from which the next wheel would be made"
    assert "rloo-memory=rloo_memory.__main__:main" in points.read_text()


def test_the_sdist_gives_the_same_wheel(site, tmp_path):
    build_sdist = "import flit_core.buildapi as flit, sys; print(flit.build_sdist(sys.argv[1]))"
    command = [sys.executable, "-c", build_sdist, str(tmp_path)]
    made = subprocess.run(command, cwd=site.parent / "clone", check=True, capture_output=True, text=True)
    with zipfile.ZipFile(wheel(tmp_path, f"./{made.stdout.strip()}")) as files:
        assert set(files.namelist()) == {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}


PLAN = "plan --model tiny-qwen3 --prompt 64 --arms stock,shared"
LAUNCH = "launch balanced --model_name_or_path random:tiny-qwen3"


def test_a_trl_that_is_too_old_is_told_in_one_line(site, tmp_path):
    for words in (PLAN, LAUNCH):
        result = run(site, tmp_path, words, trl=build(ARMS["classic-baseline"]))
        assert result.returncode == 2 and "is older than 1.14: pip install" in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_in_any_folder_beside_trl_as_released_it_plans_and_trains_with_shared_prompts(site, planned, tmp_path):
    trl, quick = build(ARMS["stock"]), "--max_steps 1 --max_completion_length 8 --prompt_tokens 48 --output_dir out"
    expected = planned(*PLAN.split()[1:]).stdout
    assert "\nshared " in expected and run(site, tmp_path, PLAN, trl).stdout == expected
    launch = run(site, tmp_path, f"{LAUNCH} {quick} --report_to none --predict_memory false", trl)
    assert launch.returncode == 0 and "with prefix sharing" in launch.stdout, launch.stderr
    record = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert record["settings"]["prefix_sharing"] and record["versions"]["trl"] == "1.16.0"

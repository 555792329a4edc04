"""What the project declares, what it locks and what it imports are the same packages, on Python 3.11 and 3.12 and with
the CPU and the CUDA build of torch."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.config import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK_LINES = (ROOT / "requirements.lock").read_text().splitlines()
LOCK = {canonicalize_name(name): version for name, version in (line.split("==") for line in LOCK_LINES[1:])}
STAMP = ROOT / ".venv" / ".stamp"
OWN_TORCH = not (STAMP.exists() and "system-torch" in STAMP.read_text())

# What the metadata of torch's CUDA build ask for, on PyPI; the CPU build asks for the same without the CUDA packages.
TORCH_VERSION = "2.13.0"
TORCH_CUDA = (
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
    "cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.3"
    '; platform_system == "Linux"',
    'cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"',
    'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
    'nvidia-cusparselt-cu13==0.8.1; platform_system == "Linux"',
    'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"',
    'nvidia-nvshmem-cu13==3.4.5; platform_system == "Linux"',
    'triton==3.7.1; platform_system == "Linux" and python_version < "3.15"',
    'optree>=0.13.0; extra == "optree"',
    'opt-einsum>=3.3; extra == "opt-einsum"',
    'pyyaml; extra == "pyyaml"',
)

# Declared, and used without an import here
NOT_IMPORTED = {"bitsandbytes": "transformers imports it", "pytest-xdist": "pytest -n", "ruff": "make lint", "wheel": "trl/fork.py"}

# Groups that are not locked, and what is imported of them: `make test-deepspeed`, `make test-vllm` make environments
OPTIONAL_GROUPS, OPTIONAL = {"deepspeed", "images", "vllm"}, {"deepspeed", "vllm"}


def of_cuda(name):
    """Whether a package that torch asks for is its CUDA build's: torch pins those itself, so they are not locked."""
    return name == "triton" or name.startswith(("cuda-", "nvidia-"))


def declared():
    """Every requirement of the project and of its groups, but the optional ones."""
    groups = [group for name, group in PROJECT["dependency-groups"].items() if name not in OPTIONAL_GROUPS]
    return [*PROJECT["project"]["dependencies"], *(text for group in groups for text in group)]


def demands(roots, python, torch):
    """Normalized name -> [(who asks, requirement)] of all that `roots` come to on that Python, by the metadata of what
    is installed. `torch` is what torch asks for."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    found, followed = {}, set()
    todo = [("pyproject.toml", Requirement(text)) for text in roots]
    while todo:
        asker, requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append((asker, requirement))
        for extra in {"", *requirement.extras} - {extra for other, extra in followed if other == name}:
            followed.add((name, extra))
            for child in map(Requirement, torch if name == "torch" else requires(name)):
                applies = child.marker is None or child.marker.evaluate(environment | {"extra": extra})
                if applies and not (name == "torch" and of_cuda(canonicalize_name(child.name))):
                    todo.append((name, child))
    return found


def requires(name):
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # then it is not in the lock either, or the test of the installed versions tells


def problems(needed, lock):
    """One text for each package that is locked for nothing, needed but not locked, or locked at a wrong version."""
    found = [f"{name}: nothing needs it, remove it from requirements.lock" for name in lock.keys() - needed.keys()]
    for name, asked in needed.items():
        if name not in lock:
            found.append(f"{name}: {asked[0][0]} needs it, add it to requirements.lock")
            continue
        for asker, requirement in asked:
            if not requirement.specifier.contains(lock[name], prereleases=True):
                found.append(f"{name}: {asker} needs {requirement.specifier}, requirements.lock has {lock[name]}")
    return sorted(found)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_the_lock_is_what_the_project_and_its_groups_need_and_nothing_more(python, build):
    torch = [text for text in TORCH_CUDA if build == "cuda" or not of_cuda(canonicalize_name(Requirement(text).name))]
    assert problems(demands(declared(), python, torch), LOCK) == []


def test_a_lock_with_more_or_less_is_told_by_the_packages_name():
    needed = demands(declared(), "3.11", TORCH_CUDA)
    changed = {**LOCK, "nab": "0.0.23", "numpy": "1.0"}
    del changed["sympy"], changed["execnet"]
    told = problems(needed, changed)
    assert "execnet: pytest-xdist needs it, add it to requirements.lock" in told
    assert "nab: nothing needs it, remove it from requirements.lock" in told
    assert "sympy: torch needs it, add it to requirements.lock" in told
    assert any(re.fullmatch(r"numpy: pandas needs \S+, requirements.lock has 1.0", text) for text in told)
    assert all(text.startswith(("execnet:", "nab:", "sympy:", "numpy:")) for text in told)
    assert demands(["torch"], "3.12", ['tzdata; sys_platform == "win32"', 'optree; extra == "x"']).keys() == {"torch"}
    assert demands(["torch"], "3.12", ['tzdata; python_version >= "3.12"']).keys() == {"torch", "tzdata"}


def test_the_lock_is_one_line_of_explanation_and_sorted_exact_versions():
    assert LOCK_LINES[0].startswith("# Every version, for Python 3.11 and 3.12.")
    assert len(LOCK) == len(LOCK_LINES) - 1 and list(LOCK) == sorted(LOCK)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in LOCK_LINES[1:])


def test_the_environment_holds_the_versions_of_the_lock():
    def installed(name):
        try:
            return importlib.metadata.version(name).split("+")[0]  # torch 2.13.0+cpu
        except importlib.metadata.PackageNotFoundError:
            return None

    assert {name: installed(name) for name in LOCK if OWN_TORCH or name != "torch"} == {
        name: version for name, version in LOCK.items() if OWN_TORCH or name != "torch"
    }


def test_what_torch_asks_for_is_recorded_for_the_locked_version():
    assert LOCK["torch"] == TORCH_VERSION, "renew TORCH_CUDA from the new version's metadata"
    if not OWN_TORCH:
        pytest.skip("the system's torch may be another version")

    def shared(texts):
        every = map(Requirement, texts)
        return {str(requirement) for requirement in every if not of_cuda(canonicalize_name(requirement.name))}

    assert shared(importlib.metadata.requires("torch")) == shared(TORCH_CUDA)


def test_what_is_imported_is_declared_and_what_is_declared_is_used():
    sources = [
        path
        for folder in ("examples", "rloo_memory", "experiments", "visualization", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    scripts = {path.stem for path in (ROOT / "tests").rglob("*.py")}  # probes import each other by name
    own = {"examples", "rloo_memory", "experiments", "visualization", "tests", "fork"} | scripts
    imported = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    providers = importlib.metadata.packages_distributions()
    third_party = imported - own - sys.stdlib_module_names - OPTIONAL
    third_party -= {"prefix_grouper"}  # a rival, compared with where it is
    assert third_party <= providers.keys()
    used = {canonicalize_name(name) for module in third_party for name in providers[module]}
    assert used | NOT_IMPORTED.keys() == {canonicalize_name(Requirement(text).name) for text in declared()}
    assert not used & NOT_IMPORTED.keys()


def test_the_version_is_that_of_the_newest_section_of_the_changelog():
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert PROJECT["project"]["version"] == newest[1]
    assert (newest[2] == "unreleased") == (".dev" in newest[1])


def test_what_the_readmes_commands_write_is_ignored_and_results_are_not(tmp_path):
    """Results of other machines may be committed."""
    ignored = """
        .venv/bin/python .venv.new/x .venv.old/x .venv-vllm/.stamp .build/x fits.yaml fit.yaml
        trl-1.16.0+fork.abc1234-py3-none-any.whl .venv-deepspeed/bin/python my-trl/trl/x.py trainer_output/memory.json
        results/nvidia-h200/combined_memory.csv results/nvidia-h200/shared_seed_k2_r0/run.json
        results/nvidia-h200/charts/phases.png results/nvidia-h200/charts/bench/peak_comparison.svg
        results/nvidia-h200/bench_samples.jsonl results/nvidia-h200/on_gpu/device.log
    """.split()
    kept = """
        results/nvidia-h200/runs.jsonl results/nvidia-h200/bench.csv
        results/nvidia-h200/charts/audit.png results/nvidia-h200/charts/bench/idea.svg
        results/nvidia-h200/report.html trl/current/overlay/trl/x.py experiments/profiles/fits.yaml
        docs/fit.yaml
    """.split()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    command = ["git", "check-ignore", *ignored, *kept]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.split() == ignored

"""The folder that goes to a machine without network, git and pip, and the trial of it."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from experiments.builds import build
from experiments.config import ROOT
from experiments.evidence.gpu.expected_peaks import predict_cells
from experiments.evidence.gpu.plans import PLANS
from rloo_memory.arms import ARMS
from rloo_memory.commit import SOURCES, source_commit
from rloo_memory.errors import ConfigError
from rloo_memory.storage import read_json, write_json

# What such a machine lacks, or has in another version than requirements.lock, beside torch, accelerate, tokenizers,
# pandas, pyarrow, psutil and nvidia-ml-py, for its Python. The fork needs transformers as it is pinned.
TARGET_PYTHON = "3.12"
WHEELS = ("datasets", "dill", "multiprocess", "peft", "transformers")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES = 60 * 2**20  # of the folder and the files of the project
PREDICTING = ("rloo_memory/plan", "rloo_memory/models.py", "experiments/evidence/gpu/plans.py", "trl/current")
TRIAL = "device,kernels,cells-small,published-k2"
TRIAL_MINUTES = "8"


@dataclass(frozen=True)
class Folder:
    """What `run` makes, and what the machine reads."""

    path: Path

    @property
    def wheels(self) -> Path:
        return self.path / "wheels"

    @property
    def site(self) -> Path:
        """The wheels unpacked, on the machine."""
        return self.path / "site"

    @property
    def forks(self) -> Path:
        return self.path / "fork"

    @property
    def predictions(self) -> Path:
        return self.path / "predictions.json"

    @property
    def source(self) -> Path:
        return self.path / "SOURCE_COMMIT"

    def packages(self) -> Path | None:
        """Where packages are imported from that this Python lacks or has in another version; None where it has all."""
        wheels = sorted(self.wheels.glob("*.whl"))
        if all(has(*wheel.name.split("-")[:2]) for wheel in wheels):
            return None
        unpack_wheels(wheels, self.site)
        return self.site

    def install(self, root: Path) -> None:
        """Put the builds of TRL where the arms look for them, unless they are there."""
        for made in sorted(self.forks.glob("*/FORK.json")):
            there = root / ".build" / "fork" / made.parent.name
            if read_json(there / "FORK.json") != read_json(made):
                shutil.rmtree(there, ignore_errors=True)
                shutil.copytree(made.parent, there)

    def source_commit(self, root: Path) -> str | None:
        """The commit that this copy of the project was prepared from, marked if its sources have changed since. None
        where git knows it."""
        said = read_json(self.source)
        if not isinstance(said, dict) or is_known_to_git(root):
            return None
        return said["commit"] if said["sources_sha256"] == digest(root) else f"{said['commit']}-dirty"


def is_known_to_git(root: Path) -> bool:
    """Whether git is there and says a commit. A `.git` can be carried to where there is no git."""
    try:
        return subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True).returncode == 0
    except OSError:
        return False


def has(name: str, wanted: str) -> bool:
    """Whether this Python has that version of a package."""
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


def unpack_wheels(wheels: list[Path], site: Path) -> None:
    """Make `site` hold what is in the wheels. One that was unpacked before is left as it is."""
    for wheel in wheels:
        if not (site / f"{'-'.join(wheel.name.split('-')[:2])}.dist-info" / "RECORD").is_file():
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(site)


def pinned() -> dict[str, str]:
    """The versions of `WHEELS` in requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    versions = dict(line.lower().split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: versions[name] for name in WHEELS}


def digest(root: Path, sources: tuple[str, ...] = SOURCES) -> str:
    """One hash over these sources; by default over those that decide what is measured. Caches are none."""
    paths = [path for name in sources for path in [root / name, *(root / name).rglob("*")] if path.is_file()]
    names = {path.relative_to(root): path for path in paths}
    lines = [
        f"{name.as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for name, path in sorted(names.items())
        if not any(part == "__pycache__" or part.startswith(".") for part in name.parts)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def run(folder: Folder, python: str, trial: bool) -> int:
    """Fill the folder, say its size, and try it. Raises `ConfigError`."""
    folder.path.mkdir(parents=True, exist_ok=True)
    commit = source_commit()
    if commit == "unknown" or commit.endswith("-dirty"):
        print(f"commit {commit}: nothing measured so is resumed; commit what is changed first", file=sys.stderr)
    print("packages", flush=True)
    fetch(folder.wheels)
    print("builds of TRL", flush=True)
    shutil.rmtree(folder.forks, ignore_errors=True)
    for dest in sorted({build(arm) for arm in ARMS.values()}):
        shutil.copytree(dest, folder.forks / dest.name, ignore=shutil.ignore_patterns("__pycache__"))
    print("predictions", flush=True)
    planner = digest(ROOT, PREDICTING)
    if (read_json(folder.source) or {}).get("planner_sha256") != planner:
        folder.predictions.unlink(missing_ok=True)
    write_json(folder.source, {"commit": commit, "sources_sha256": digest(ROOT), "planner_sha256": planner})
    predict_cells(planned_cells(), folder.predictions)
    for stale in (folder.site, folder.path / "trial"):
        shutil.rmtree(stale, ignore_errors=True)
    mine, project = size(folder.path), sum(path.stat().st_size for path in tracked())
    print(f"{folder.path}: {mine / 2**20:.1f} MiB, the project {project / 2**20:.1f} MiB", flush=True)
    if mine + project > MOST_BYTES:
        raise ConfigError(f"together above {MOST_BYTES >> 20} MiB: remove results that need not travel")
    if trial:
        tried(folder, python)
    return 0


def planned_cells() -> list:
    return [cell for plan in PLANS.values() for cell in plan.cells if cell.device == "cuda"]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tracked() -> list[Path]:
    """The project's own files: those that git knows, and those that it does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(f"{ROOT} is no git repository: prepare in a clone, then carry it") from None
    return [ROOT / name for name in said.split("\0") if name and (ROOT / name).is_file()]


def fetch(folder: Path) -> None:
    """Download the pinned wheels into `folder`, unless these very versions are there. Raises `ConfigError`."""
    wanted = [f"{name}=={number}" for name, number in pinned().items()]
    if all(list(folder.glob(f"{name.replace('==', '-')}-*.whl")) for name in wanted):
        return
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    with tempfile.TemporaryDirectory() as temp:
        command = [
            *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input"),
            *("--retries", "1", "--no-deps", "--only-binary=:all:", "--implementation", "cp"),
            *("--python-version", TARGET_PYTHON, *platforms, "-d", temp, *wanted),
        ]
        pip = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(Path(temp).glob("*.whl"))
        if pip.returncode or len(wheels) < len(WHEELS):
            reason = (pip.stderr.strip().splitlines() or ["pip brought none"])[-1]
            remedy = f"connect to the network, or put their wheels into {folder}"
            raise ConfigError(f"cannot fetch {', '.join(wanted)}: {remedy} ({reason})")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for wheel in wheels:
            shutil.copy(wheel, folder)


def tried(folder: Folder, python: str) -> None:
    """Run the first items at small size on the CPU, in a copy of the project, as on the machine: an empty home,
    nothing on the PATH, no git, and no network where the system lets us take it away. Raises `ConfigError` where that
    fails."""
    with tempfile.TemporaryDirectory(prefix="on-gpu-") as temp:
        root, home, archive = Path(temp, "project"), Path(temp, "home"), Path(temp, "out", "trial.tar.gz")
        home.mkdir()
        for path in tracked():
            target = root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        shutil.copytree(folder.path, root / ".gpu", ignore=shutil.ignore_patterns("site", "trial"))
        alone = ["unshare", "-rn"] if without_network() else []
        environment = {"HOME": str(home), "PATH": str(home), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        options = ("--device", "cpu", "--minutes", TRIAL_MINUTES, "--out", str(archive), "--only", TRIAL)
        command = [*alone, python, "-m", "experiments.evidence.on_gpu", "run", *options]
        if alone:
            command[0] = shutil.which("unshare")
        print(f"trial{'' if alone else ', with the network: unshare is not permitted here'}: {python}", flush=True)
        result = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(result.stdout.decode(errors="replace"), end="", flush=True)
        states = [json.loads(path.read_text()) for path in (root / "results").glob("cpu-*/on_gpu/items.json")]
        done = {name for items in states for name, state in items.items() if state["state"] == "done"}
        if missing := sorted(set(TRIAL.split(",")) - done) or result.returncode or not archive.is_file():
            kept = shutil.copytree(root / "results", folder.path / "trial", dirs_exist_ok=True)
            raise ConfigError(f"the trial failed ({missing}); what it left is in {kept}")
        commits, mine = {state["commit"] for items in states for state in items.values()}, read_json(folder.source)
        if commits != {mine["commit"]}:
            raise ConfigError(f"the trial took itself for {', '.join(commits)}, not {mine['commit']}; prepare again")
        print(f"trial passed: {TRIAL}, commit {mine['commit']}, archive {archive.stat().st_size / 1024:.0f} KiB")


def without_network() -> bool:
    """Whether this user may start a process without a network."""
    try:
        return subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    except OSError:
        return False

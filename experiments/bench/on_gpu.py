"""What `run_gpu.sh` needs around its commands: a folder for a machine without network, git or pip, and the way home.

    python -m experiments.bench.on_gpu prepare                       # here
    python -m experiments.bench.on_gpu here --device cuda            # there: run_gpu.sh asks it
    python -m experiments.bench.on_gpu unpack gpu_evidence.tar.gz    # here

`prepare` fills the folder .gpu with what a machine with torch lacks beside this project: wheels, the arms' TRL, the
commit. Then it tries `run_gpu.sh` at small size in a bare copy. `here` prints the environment of all measurements for
a shell. `unpack` puts an archive below results/ and adds what the planner predicts of the cells that were measured.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from experiments.arms import ARMS
from experiments.bench.samples import COLUMNS, TABLE, Cell, read_table
from experiments.builds import build
from experiments.commit import SOURCES, source_commit
from experiments.config import ROOT
from experiments.measuring import need
from experiments.record import write_csv
from experiments.run_options import Parser
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.storage import read_json, write_json

# What such a machine lacks, or has in another version than requirements.lock, beside torch, accelerate, tokenizers,
# pandas, pyarrow, psutil and nvidia-ml-py, for its Python. The fork needs transformers as it is pinned.
TARGET_PYTHON = "3.12"
WHEELS = ("datasets", "dill", "multiprocess", "peft", "transformers")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# All that any command of run_gpu.sh imports, so that what is missing is said before the first one begins
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "datasets", "pandas", "pyarrow", "xxhash", "psutil", "pynvml",
)  # fmt: skip
FOLDER = ROOT / ".gpu"
MOST_BYTES = 60 * 2**20  # of the folder and the files of the project
CALLED = (  # by run_gpu.sh
    "bash", "cat", "cut", "dirname", "grep", "gzip", "mkdir", "mv", "readlink", "rm", "sed", "sleep", "sort", "tail",
    "tar", "wc",
)  # fmt: skip
TRIAL = ("device", "kernels", "cells-small", "published-k2")
SETTINGS = {  # the same for all that is compared; an arm that has cuDNN's attention first asks for it
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def main(argv: list[str] | None = None) -> int:
    return exit_code("on_gpu", run, argv)


def run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m experiments.bench.on_gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("prepare", help="fill the folder that goes to the machine, and try it")
    sub.add_argument("--python", default=sys.executable, help="for the trial, one like the machine's; default: this")
    sub.add_argument("--without-trial", action="store_true", help="do not try what was prepared")
    sub = commands.add_parser("here", help="the environment of all measurements, for a shell")
    sub.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    sub = commands.add_parser("unpack", help="put an archive's results below results/, and predictions beside them")
    sub.add_argument("archive", type=Path)
    sub.add_argument("--results", type=Path, default=ROOT / "results")
    args = parser.parse_args(argv)
    if args.command == "here":
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in here(args.device).items()))
    elif args.command == "prepare":
        prepare(FOLDER)
        if not args.without_trial:
            tried(FOLDER, args.python)
    else:
        for machine in unpack(args.archive, args.results):
            predict(args.results / machine)
            print(args.results / machine)
    return 0


def here(device: str) -> dict[str, str]:
    """The environment of every measurement on this machine, with the MACHINE's name and the COMMIT. What `prepare`
    made is put into its place. Raises `ConfigError` for a device or a package that is not there."""
    install_builds(FOLDER / "fork")
    paths, environment = [str(ROOT)], {**SETTINGS}
    if site := packages(FOLDER):
        paths.append(str(site))
        sys.path.insert(1, str(site))
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    if commit := carried_commit(FOLDER, ROOT):
        environment["SOURCE_COMMIT"] = os.environ["SOURCE_COMMIT"] = commit
    need(*PACKAGES)
    if device == "cuda" and segments_grow(environment):
        environment |= SEGMENTS
    return {**environment, "MACHINE": machine_name(device, environment), "COMMIT": source_commit()}


def segments_grow(environment: dict[str, str]) -> bool:
    """Whether torch can allocate in segments that grow: some virtual machines do not let it map memory so."""
    script = "import torch; x = torch.ones(2**26, device='cuda'); print(x.sum().item())"
    tried = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment | SEGMENTS, capture_output=True
    )
    return tried.returncode == 0


def machine_name(device: str, environment: dict[str, str]) -> str:
    """The name of the folder below results/. Asked of another process: one that has asked holds some of the device."""
    command = [sys.executable, "-m", "experiments.run_device", "--device", device]
    asked = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    if asked.returncode:
        raise ConfigError((asked.stderr.strip().splitlines() or ["no device"])[-1].removeprefix("device: "))
    return asked.stdout.strip().splitlines()[-1]


def install_builds(builds: Path) -> None:
    """Put the builds of TRL where the arms look for them, unless they are there."""
    for made in sorted(builds.glob("*/FORK.json")):
        there = ROOT / ".build" / "fork" / made.parent.name
        if read_json(there / "FORK.json") != read_json(made):
            shutil.rmtree(there, ignore_errors=True)
            shutil.copytree(made.parent, there)


def packages(folder: Path) -> Path | None:
    """Where packages are imported from that this Python lacks or has in another version; None where it has all."""
    wheels = sorted((folder / "wheels").glob("*.whl"))
    if all(has(*wheel.name.split("-")[:2]) for wheel in wheels):
        return None
    site = folder / "site"
    for wheel in wheels:
        if not (site / f"{'-'.join(wheel.name.split('-')[:2])}.dist-info" / "RECORD").is_file():
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(site)
    return site


def has(name: str, wanted: str) -> bool:
    """Whether this Python has that version of a package."""
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


def carried_commit(folder: Path, root: Path) -> str | None:
    """The commit that this copy of the project was prepared from, marked if its sources have changed since. None
    where git knows it: a `.git` can be carried to where there is no git."""
    said = read_json(folder / "commit.json")
    if said is None or is_known_to_git(root):
        return None
    return said["commit"] if said["sources_sha256"] == digest(root) else f"{said['commit']}-dirty"


def is_known_to_git(root: Path) -> bool:
    try:
        return subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True).returncode == 0
    except OSError:
        return False


def digest(root: Path) -> str:
    """One hash over the sources that decide what is measured. Caches are none."""
    paths = [path for name in SOURCES for path in [root / name, *(root / name).rglob("*")] if path.is_file()]
    names = {path.relative_to(root): path for path in paths}
    lines = [
        f"{name.as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for name, path in sorted(names.items())
        if not any(part == "__pycache__" or part.startswith(".") for part in name.parts)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def prepare(folder: Path) -> None:
    """Fill the folder and say its size. Raises `ConfigError`."""
    folder.mkdir(parents=True, exist_ok=True)
    commit = source_commit()
    if commit == "unknown" or commit.endswith("-dirty"):
        print(f"commit {commit}: nothing measured so is resumed; commit what is changed first", file=sys.stderr)
    fetch(folder / "wheels")
    for stale in ("fork", "site", "trial"):
        shutil.rmtree(folder / stale, ignore_errors=True)
    for dest in sorted({build(arm) for arm in ARMS.values()}):
        shutil.copytree(dest, folder / "fork" / dest.name, ignore=shutil.ignore_patterns("__pycache__"))
    write_json(folder / "commit.json", {"commit": commit, "sources_sha256": digest(ROOT)})
    mine = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    project = sum(path.stat().st_size for path in tracked())
    print(f"{folder}: {mine / 2**20:.1f} MiB, the project {project / 2**20:.1f} MiB", flush=True)
    if mine + project > MOST_BYTES:
        raise ConfigError(f"together above {MOST_BYTES >> 20} MiB: remove results that need not travel")


def fetch(folder: Path) -> None:
    """Download the pinned wheels into `folder`, unless these very versions are there. Raises `ConfigError`."""
    wanted = [f"{name}=={number}" for name, number in pinned().items()]
    if all(list(folder.glob(f"{name.replace('==', '-')}-*.whl")) for name in wanted):
        return
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input"),
        *("--retries", "1", "--no-deps", "--only-binary=:all:", "--implementation", "cp"),
        *("--python-version", TARGET_PYTHON, *platforms, "-d", str(folder), *wanted),
    ]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode:
        reason = (pip.stderr.strip().splitlines() or ["pip brought none"])[-1]
        remedy = f"connect to the network, or put their wheels into {folder}"
        raise ConfigError(f"cannot fetch {', '.join(wanted)}: {remedy} ({reason})")


def pinned() -> dict[str, str]:
    """The versions of `WHEELS` in requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    versions = dict(line.lower().split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: versions[name] for name in WHEELS}


def tracked() -> list[Path]:
    """The project's own files: those that git knows, and those that it does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(f"{ROOT} is no git repository: prepare in a clone, then carry it") from None
    return [ROOT / name for name in said.split("\0") if name and (ROOT / name).is_file()]


def tried(folder: Path, python: str) -> None:
    """Run the first items at small size on the CPU, in a copy of the project, as on the machine: an empty home, no
    git, and no network where the system lets us take it away. Raises `ConfigError` where that fails."""
    with tempfile.TemporaryDirectory(prefix="on-gpu-") as temp:
        root, home = Path(temp, "project"), Path(temp, "home")
        (home / "bin").mkdir(parents=True)
        for name in CALLED:
            (home / "bin" / name).symlink_to(shutil.which(name))
        for path in tracked():
            target = root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        shutil.copytree(folder, root / ".gpu", ignore=shutil.ignore_patterns("site", "trial"))
        alone = [shutil.which("unshare"), "-rn"] if without_network() else []
        environment = {"HOME": str(home), "PATH": str(home / "bin"), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHON": python, "MINUTES": "8"}
        print(f"trial{'' if alone else ', with the network: unshare is not permitted here'}: {python}", flush=True)
        command = [*alone, home / "bin" / "bash", root / "run_gpu.sh", "--device", "cpu", *TRIAL]
        result = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(result.stdout.decode(errors="replace"), end="", flush=True)
        done = {path.stem: path.read_text() for path in (root / "results").glob("*/on_gpu/*.done")}
        if (
            missing := sorted(set(TRIAL) - set(done))
            or result.returncode
            or not (root / "gpu_evidence.tar.gz").exists()
        ):
            kept = shutil.copytree(root / "results", folder / "trial", dirs_exist_ok=True)
            raise ConfigError(f"the trial failed ({missing}); what it left is in {kept}")
        mine = json.loads((folder / "commit.json").read_text())["commit"]
        if others := {said.split()[0] for said in done.values()} - {mine}:
            raise ConfigError(f"the trial took itself for {', '.join(others)}, not {mine}; prepare again")
        print(f"trial passed: {', '.join(TRIAL)}, commit {mine}")


def without_network() -> bool:
    """Whether this user may start a process without a network."""
    try:
        return subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def unpack(archive: Path, results: Path) -> list[str]:
    """Put what `run_gpu.sh` packed below `results`. Returns the names of the machines. Raises `ConfigError`."""
    try:
        with tarfile.open(archive) as opened:
            entries = opened.getmembers()
            for entry in entries:  # Python 3.11 has `filter="data"` in some releases only
                outside = entry.name.startswith("/") or ".." in Path(entry.name).parts
                if outside or not (entry.isfile() or entry.isdir()):
                    raise tarfile.TarError(f"{entry.name} is no file below {results}")
            opened.extractall(results, entries)
            return sorted({entry.name.split("/")[0] for entry in entries})
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ConfigError(f"cannot unpack {archive} ({error}); give the archive that run_gpu.sh wrote") from None


def predict(folder: Path) -> None:
    """Add to bench.csv what the planner says of each cell and way that was measured; on the machine its time is too
    dear for that."""
    from experiments.bench import trainings
    from rloo_memory.plan.predict import predict

    rows = [row for row in read_table(folder) if not row["metric"].endswith("_predicted_bytes")]
    cells = {
        (row["measurement"], row["model"], row["prompt_tokens"], row["completion_tokens"], row["k"], row["way"]): row
        for row in rows
        if row["measurement"].startswith("cells-")
    }
    known = {}
    for number, ((_, model, *sizes, way), row) in enumerate(cells.items(), start=1):
        cell, device = Cell(model, *map(int, sizes)), row["device_kind"]
        setup = trainings.setup_of(cell, way, device)
        if (model, setup) not in known:  # with a mask as without, with cuDNN first as without
            known[model, setup] = predict(way, setup, trainings.config_of(cell, device)).phases
        print(f"predicted {number} of {len(cells)}: {cell}, {way}", flush=True)
        for peak in known[model, setup]:
            size = {"metric": f"{peak.phase}_predicted_bytes", "unit": "bytes", "repeats": 1, "failure": ""}
            rows.append(row | size | dict.fromkeys(("median", "low", "high"), peak.total))
    if cells:
        write_csv(folder / TABLE, COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(main())

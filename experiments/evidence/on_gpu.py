"""All that only a GPU can show, prepared here and run there.

    python -m experiments.evidence.on_gpu prepare [--into .gpu]
    python -m experiments.evidence.on_gpu run --minutes 9 --out gpu.tar.gz [--device cuda]
    python -m experiments.evidence.on_gpu unpack gpu.tar.gz

`prepare` fills a folder with all that a machine with torch and transformers, but without a network, git or pip, needs
beside this project. `run` goes through the items of evidence in order of priority and begins what fits into the
minutes; the same command goes on from there. After every item, and now and then within one, the results lie in one
archive, which `unpack` puts below results/. Exit code 1 of `run`: some item failed, the last line names it.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from experiments.config import ROOT
from experiments.evidence.common import minutes, need
from experiments.evidence.gpu import archive, items, prepare
from experiments.evidence.gpu.prepare import Folder
from experiments.evidence.gpu.session import Session
from experiments.processes import stoppable
from experiments.record import make_writable
from experiments.run_options import Parser, directory
from rloo_memory.commit import source_commit
from rloo_memory.errors import ConfigError, choose, exit_code

SETTINGS = {  # the same for all that is compared; an arm that has cuDNN's attention first asks for it
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
# All that any item imports, so that what is missing is said before the first one begins
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "datasets", "pandas", "pyarrow", "xxhash", "psutil", "pynvml",
)  # fmt: skip
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def main(argv: list[str] | None = None) -> int:
    with stoppable():
        return exit_code("on_gpu", run, argv)


def run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m experiments.evidence.on_gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("prepare", help="fill the folder that goes to the machine, and try it")
    sub.add_argument("--into", type=directory, default=ROOT / ".gpu", help="default: .gpu")
    sub.add_argument(
        "--python", default=sys.executable, help="for the trial: one like the machine's; default: this one"
    )
    sub.add_argument("--without-trial", action="store_true", help="do not try what was prepared")
    sub = commands.add_parser("run", help="on the machine")
    sub.add_argument("--minutes", type=minutes, required=True, help="begin nothing that may take longer")
    sub.add_argument("--out", type=Path, required=True, help="the archive, a .tar.gz")
    sub.add_argument("--device", default="cuda", help="cuda, or cpu: the same programs at small size")
    sub.add_argument("--results", type=directory, default=ROOT / "results", help="holds one folder a machine")
    sub.add_argument("--folder", type=directory, default=ROOT / ".gpu", help="what prepare made; default: .gpu")
    sub.add_argument("--only", help="some items by name, with commas between")
    sub.add_argument("--again", default="", help="items to repeat although they are done")
    sub = commands.add_parser("unpack", help="put an archive's results below results/")
    sub.add_argument("archive", type=Path)
    sub.add_argument("--results", type=directory, default=ROOT / "results")
    args = parser.parse_args(argv)
    if args.command == "prepare":
        return prepare.run(Folder(args.into.absolute()), args.python, not args.without_trial)
    if args.command == "unpack":
        for name in archive.unpack(args.archive, args.results):
            print(f"{args.results / name}")
        return 0
    return run_items(args)


def run_items(args: argparse.Namespace) -> int:
    """The items that fit, on this machine."""
    begun = time.monotonic()
    if args.device not in ("cuda", "cpu"):
        raise ConfigError(f"--device {args.device!r} is neither cuda nor cpu; choose the GPU by CUDA_VISIBLE_DEVICES")
    folder = Folder(args.folder.absolute())
    folder.install(ROOT)
    environment = surroundings(folder, args.device)
    os.environ.update(environment)
    need(*PACKAGES)
    machine = args.results.absolute() / machine_name(args.device, environment)
    make_writable(machine)
    make_writable(args.out.absolute().parent)
    planned = (items.on_cuda if args.device == "cuda" else items.on_cpu)(folder.predictions)
    chosen = pick(planned, args.only) if args.only is not None else planned
    again = {item.name for item in pick(planned, args.again)} if args.again else set()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {text}", flush=True)

    def pack() -> None:
        for name in archive.pack(machine, args.out.absolute()):
            say(f"left out of the archive, too large: {name}")

    session = Session(machine, source_commit(), args.minutes - (time.monotonic() - begun) / 60, environment, say, pack)
    for name in again:
        session.states.pop(name, None)
    say(f"{machine.name}, commit {session.commit}, {len(chosen)} items, {session.left():.0f} s")
    try:
        failed = session.run(chosen)
    finally:
        pack()
    say(f"results: {machine}, and all of it in {args.out}: {args.out.stat().st_size / 2**20:.2f} MiB")
    if failed:
        say(f"failed: {', '.join(failed)}; each says why in {machine.name}/on_gpu/<item>.log")
    return 1 if failed else 0


def pick(planned: list, names: str) -> list:
    """The items of these names, in the order of the plan. Raises `ConfigError` for an unknown one."""
    wanted = [choose("item", name, {item.name: item for item in planned}) for name in names.split(",")]
    return [item for item in planned if item.name in wanted]


def surroundings(folder: Folder, device: str) -> dict[str, str]:
    """The environment of every item: the same settings for all, and packages of the folder that are missing here."""
    environment = {**os.environ, **SETTINGS}
    paths = [str(ROOT)]
    if packages := folder.packages():
        paths.append(str(packages))
        sys.path.insert(1, str(packages))
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    if commit := folder.source_commit(ROOT):
        environment.setdefault("SOURCE_COMMIT", commit)
    if device == "cuda" and grows(environment):
        environment |= SEGMENTS
    return environment


def grows(environment: dict[str, str]) -> bool:
    """Whether torch can allocate in segments that grow: some virtual machines do not let it map memory so."""
    script = "import torch; x = torch.ones(2**26, device='cuda'); print(x.sum().item())"
    tried = subprocess.run([sys.executable, "-c", script], env=environment | SEGMENTS, capture_output=True)
    return tried.returncode == 0


def machine_name(device: str, environment: dict[str, str]) -> str:
    """The name of the folder below results/. Asked of another process: one that has asked holds some of the device."""
    command = [sys.executable, "-m", "experiments.run_device", "--device", device]
    asked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if asked.returncode:
        raise ConfigError((asked.stderr.strip().splitlines() or ["no device"])[-1].removeprefix("device: "))
    return asked.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())

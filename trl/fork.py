"""Build, check and export the fork: pinned upstream wheels, and the patches and overlay files beside this file.

    python trl/fork.py build LINE DEST [--patches NAME[,NAME...] | --no-patches]
    python trl/fork.py check
    python trl/fork.py export LINE DIR

A line is a table of UPSTREAM.toml and a folder of the same name. `series` names its patches in order. `overlay/` holds
whole new files at their upstream paths, each claimed by one patch. git patches, the rest is Python's own. Without a
network, FORK_WHEELS=DIR says where upstream's wheels are.
"""

import argparse
import email.message
import email.utils
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent


class ForkError(Exception):
    """Problems to report, one a line."""


@dataclass
class Line:
    name: str
    folder: Path
    version: str
    wheel: str
    sha256: str
    tag: str
    mode: str  # "stack": the patches apply in order. "alternatives": each applies alone, to untouched upstream


@dataclass
class Patch:
    name: str
    header: dict[str, str]
    diff: str
    claims: list[str]  # files of the overlay that come with this patch


def load_lines() -> dict[str, Line]:
    tables = tomllib.loads((ROOT / "UPSTREAM.toml").read_text())
    return {name: Line(name, ROOT / name, **table) for name, table in tables.items()}


def read_patches(line: Line) -> list[Patch]:
    """The patches of `line` in the order of its series."""
    rows = (line.folder / "series").read_text().splitlines()
    return [read_patch(line.folder / row) for row in rows if not row.startswith("#")]


def read_patch(path: Path) -> Patch:
    head, diff = path.read_text(encoding="utf-8").split("\ndiff --git ", 1)
    # DEP-3 has the form of a mail's header, in which "." stands for an empty line
    fields = email.message_from_string(head).items()
    header = {key: re.sub(r"\n (\.$)?", "\n", value, flags=re.M) for key, value in fields}
    return Patch(path.name, header, f"diff --git {diff}", re.findall(r"[^,\s]+", header.get("Overlay", "")))


def select(line: Line, wanted: tuple[str, ...] | None) -> list[Patch]:
    """The patches of `line` that are called `wanted`, or all for None."""
    patches = read_patches(line)
    names = [patch.name for patch in patches]
    wanted = names if wanted is None else [name.removesuffix(".patch") + ".patch" for name in wanted]
    if not set(wanted) <= set(names):
        raise ForkError(f"{line.name} has no patch {', '.join(set(wanted) - set(names))}, but {', '.join(names)}")
    if line.mode == "alternatives" and len(wanted) > 1:
        raise ForkError(f"{line.name} holds alternatives: --no-patches, or --patches and one of {', '.join(names)}")
    return [patch for patch in patches if patch.name in wanted]


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def obtain(line: Line) -> Path:
    """The verified upstream wheel of `line`: from FORK_WHEELS if that is set, else from a cache that pip fills."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rloo-memory", "wheels")
    wheel = Path(os.environ.get("FORK_WHEELS") or cache, line.wheel)
    if not wheel.is_file():
        if os.environ.get("FORK_WHEELS"):
            raise ForkError(f"{wheel.parent} holds no {line.wheel}: put it there, or unset FORK_WHEELS")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temp:
            options = "--disable-pip-version-check --no-input --retries 2 --no-deps --only-binary=:all: -d .".split()
            command = [sys.executable, "-m", "pip", "download", *options, f"trl=={line.version}"]
            pip = subprocess.run(command, cwd=temp, capture_output=True, text=True)
            if pip.returncode:
                remedy = f"connect to the network, or set FORK_WHEELS to a folder with {line.wheel}"
                reason = pip.stderr.strip().split("\n")[-1]
                raise ForkError(f"cannot obtain trl {line.version}: {remedy} ({reason})")
            os.replace(Path(temp, line.wheel), wheel)
    if (found := digest(wheel)) != line.sha256:
        raise ForkError(f"{wheel} has sha256 {found}, pinned is {line.sha256}: delete it and fetch it again")
    return wheel


def git(folder: Path, *words: str, text: str = "") -> subprocess.CompletedProcess:
    """git in `folder`, which is given `text`, with nobody's settings."""
    if not shutil.which("git"):
        raise ForkError("git is not installed or not on PATH: install it, it applies the patches")
    # Inside somebody's repository `git apply` takes paths as relative to that one, and silently skips the rest:
    # GIT_DIR stops the search for it
    alone = {"GIT_DIR": str(folder / ".git"), "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", "HOME": os.devnull}
    alone |= {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    return subprocess.run(["git", *words], cwd=folder, env=alone, input=text, capture_output=True, encoding="utf-8")


def unpack(line: Line, patches: list[Patch], tree: Path) -> list[str]:
    """Unpack upstream's package into `tree` and apply the hunks of `patches`, without fuzz. What does not apply."""
    with zipfile.ZipFile(obtain(line)) as archive:  # what is beside the package would shadow folders of the user's
        archive.extractall(tree, [name for name in archive.namelist() if name.startswith(("trl/", "trl-"))])
    problems = []
    for patch in patches:
        # `git apply` and not `patch`: every context line must match. `--reject` names every hunk that does not
        result = git(tree, "apply", "--reject", "--whitespace=nowarn", "--include=trl/*", "-", text=patch.diff)
        if result.returncode:
            said = re.findall("^error: (?!while searching for:)(.+)", result.stderr, re.M) or [result.stderr]
            problems += [f"{line.name}/{patch.name} does not apply: {text}" for text in said]
    return problems


def build(line: Line, dest: Path, patches: tuple[str, ...] | None) -> str:
    """Build `line` with `patches` into `dest`, and say what was done. On a ForkError `dest` is as it was."""
    chosen = select(line, patches)
    claims = sorted(path for patch in chosen for path in patch.claims)
    # All that decides what is built; `format` is to be raised when the same should build something else
    record = {"format": 2, "line": line.name, "version": line.version, "wheel_sha256": line.sha256}
    record["patches"] = {patch.name: digest(line.folder / patch.name) for patch in chosen}
    record["overlay"] = {path: digest(line.folder / "overlay" / path) for path in claims}
    what = f"{dest}: trl {line.version}, {', '.join(patch.name for patch in chosen) or 'no patches'}"
    dest.parent.mkdir(parents=True, exist_ok=True)
    with open(__file__, "a") as lock:  # several runs at once ask for the same build
        fcntl.flock(lock, fcntl.LOCK_EX)
        if dest.exists() and any(dest.iterdir()):
            if not (dest / "FORK.json").is_file():
                raise ForkError(f"{dest} exists and is no build of this tool: name another place, or remove it")
            if json.loads((dest / "FORK.json").read_text()) == record:
                return f"{what}: up to date"
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix=".fork-") as temp:
            tree = Path(temp, "new")
            if problems := unpack(line, chosen, tree):
                raise ForkError("\n".join(problems))
            for path in (path for path in claims if path.startswith("trl/")):
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(line.folder / "overlay" / path, tree / path)
            (tree / "FORK.json").write_text(json.dumps(record, indent=2) + "\n")
            if dest.exists():
                dest.rename(Path(temp, "replaced"))
            tree.rename(dest)
    return f"{what}: built"


def check() -> str:
    """Say how many patches apply. Raises ForkError with what a series leaves out, and with all that does not apply."""
    lines, problems = load_lines().values(), []
    for line in lines:
        patches, overlay = read_patches(line), line.folder / "overlay"
        loose = {path.name for path in line.folder.glob("*.patch")} - {patch.name for patch in patches}
        problems += [f"{line.name}/{name} is not listed in {line.name}/series" for name in loose]
        claims, files = [overlay / path for patch in patches for path in patch.claims], [*overlay.rglob("*.py")]
        wrong = [path for path in {*claims, *files} if not claims.count(path) == files.count(path) == 1]
        problems += [f"{path} needs to be there, and one patch to claim it" for path in wrong]
        for group in [[patch] for patch in patches] if line.mode == "alternatives" else [patches]:
            with tempfile.TemporaryDirectory() as temp:
                problems += unpack(line, group, Path(temp))
    if problems:
        raise ForkError("\n".join(problems))
    return "\n".join(f"{line.name}: {len(read_patches(line))} patches apply to trl {line.version}" for line in lines)


def export(line: Line, dest: Path) -> str:
    """Write `line` to `dest` as mails of git's user for `git am` on the tag, alternatives each to an own folder."""
    check()
    if dest.exists() and any(dest.iterdir()):
        raise ForkError(f"{dest} is not empty: name another folder, or remove it")
    command = ["git", "-c", "user.useConfigOnly=true", "var", "GIT_AUTHOR_IDENT"]
    author = subprocess.run(command, capture_output=True, text=True)
    if author.returncode:
        remedy = "git config --global user.name 'Your Name'; git config --global user.email you@your.host"
        raise ForkError(f"the mails need your name and address: {remedy}")
    patches = read_patches(line)
    for patch in patches:
        added = ["diff", "--no-index", "--full-index", "--", os.devnull]
        diffs = [patch.diff, *(git(line.folder / "overlay", *added, path).stdout for path in patch.claims)]
        subject, _, body = patch.header["Description"].partition("\n")
        mail = email.message.EmailMessage()
        mail["From"] = email.utils.formataddr(re.match("(.*) <(.*)>", author.stdout).groups())
        mail["Subject"] = f"[PATCH] {subject}"
        mail.set_content(f"{body}\n---\n{''.join(diffs)}", cte="8bit")
        folder = dest / Path(patch.name).stem if line.mode == "alternatives" else dest
        folder.mkdir(parents=True, exist_ok=True)
        (folder / patch.name).write_bytes(b"From %040d Mon Sep 17 00:00:00 2001\n" % 0 + mail.as_bytes())
    return f"{dest}: {len(patches)} patches for git am on {line.tag}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="build | check | export")
    lines, functions = load_lines(), {"build": build, "check": check, "export": export}
    for command in functions:
        sub = commands.add_parser(command)
        if command != "check":
            sub.add_argument("line", choices=lines)
            sub.add_argument("dest", type=lambda text: Path(text).resolve())
        if command == "build":
            sub.add_argument("--patches", type=lambda text: tuple(text.split(",")), metavar="NAME[,NAME...]")
            sub.add_argument("--no-patches", dest="patches", action="store_const", const=(), help="upstream alone")
    args = vars(parser.parse_args())
    if "line" in args:
        args["line"] = lines[args["line"]]
    try:
        print(functions[args.pop("command")](**args))
    except (ForkError, OSError) as error:
        sys.exit("\n".join(f"fork.py: {problem}" for problem in str(error).splitlines()))


if __name__ == "__main__":
    main()

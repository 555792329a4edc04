"""Build, pack, check and export the fork: pinned upstream wheels, and the patches and overlay files beside this file.

    python trl/fork.py build LINE DEST [--patches NAME[,NAME...] | --no-patches] [--wheels DIR] [--force]
    python trl/fork.py wheel LINE DIR [--patches NAME[,NAME...]] [--wheels DIR]
    python trl/fork.py check [LINE...]
    python trl/fork.py export LINE DIR

A line is a table of UPSTREAM.toml and a folder of the same name: `series` names its patches in order, `overlay/` holds
whole new files at their upstream paths (`overlay/trl/...`). Standard library only; `git apply` does the patching.
One file on purpose: it runs before anything is installed, by path, and can be carried to another project as it is.
"""

import argparse
import base64
import contextlib
import csv
import email
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

FORMAT = 1  # part of every fingerprint: raise it when the same inputs should build something else
HEADER_FIELDS = ("Description", "Origin", "Forwarded", "Last-Update")
PATCHABLE = ("trl/", "docs/", "tests/")  # only trl/ is in the wheel, the rest is for the exported series
# The fixed first line of `git format-patch`: git recognises a patch mail by it, and we an earlier export.
MAIL_START = "From " + "0" * 40 + " Mon Sep 17 00:00:00 2001\n"


class ForkError(Exception):
    """A problem to report: every argument is one line."""


class WheelUnavailable(ForkError):
    """The upstream wheel could not be obtained (as opposed to: it is the wrong one)."""


@dataclass(frozen=True)
class Line:
    name: str
    folder: Path
    version: str
    wheel: str
    sha256: str
    tag: str
    mode: str  # "stack": the patches apply in order. "alternatives": each applies alone, to untouched upstream


@dataclass(frozen=True)
class Patch:
    name: str
    label: str  # LINE/NAME, for messages
    sha256: str
    header: dict[str, str]
    diff: str
    paths: tuple[str, ...]  # that the diff touches
    claims: tuple[str, ...]  # overlay files that come with this patch alone


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files_below(folder: Path) -> dict[str, Path]:
    """Relative name -> path of every file below `folder`, bytecode left out, sorted."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path for path in found}


def load_lines(root: Path) -> dict[str, Line]:
    """Read `root/UPSTREAM.toml`. Raises ForkError where it is missing, malformed or incomplete."""
    source = root / "UPSTREAM.toml"
    try:
        return {name: Line(name, root / name, **table) for name, table in tomllib.loads(source.read_text()).items()}
    except FileNotFoundError:
        raise ForkError(f"{source} is missing") from None
    except (ValueError, TypeError) as error:  # no TOML, or a line without its texts
        raise ForkError(f"{source} is malformed: {error}") from None


def find_line(root: Path, name: str) -> Line:
    """The line called `name`. Raises ForkError, listing the lines, where there is none."""
    lines = load_lines(root)
    if name not in lines:
        raise ForkError(f"unknown line {name!r}: the lines are {', '.join(lines)}")
    return lines[name]


def read_series(line: Line) -> tuple[str, ...]:
    """The patch names of `line`, in order. Raises ForkError for a missing series and for a bad entry."""
    series = line.folder / "series"
    if not series.is_file():
        raise ForkError(f"{line.name}/series is missing (it may be empty)")
    rows = (row.partition("#")[0].strip() for row in series.read_text(encoding="utf-8").splitlines())
    names = tuple(row for row in rows if row)
    for name in names:
        if not re.fullmatch(r"[\w.+-]+\.patch", name) or names.count(name) > 1:
            raise ForkError(f"{line.name}/series: {name!r} is listed twice or is no name of a .patch file beside it")
    return names


def read_patch(path: Path) -> Patch:
    """Read one patch and its DEP-3 header. Raises ForkError for a missing file, no diff, and a path elsewhere."""
    label = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise ForkError(f"{label} is listed in {path.parent.name}/series but missing")
    text = path.read_text(encoding="utf-8")
    head, start, rest = text.partition("diff --git ")
    named = r"^(?:(?:diff --git|---|\+\+\+) [ab]/|(?:rename|copy) (?:from|to) )(\S+)"
    paths = tuple(dict.fromkeys(re.findall(named, start + rest, re.M)))
    if not paths:
        raise ForkError(f"{label} holds no diff")
    if outside := [name for name in paths if not name.startswith(PATCHABLE) or ".." in name.split("/")]:
        raise ForkError(*[f"{label} touches {name!r}, outside {', '.join(PATCHABLE)}" for name in outside])
    fields = email.message_from_string(head).items()
    # DEP-3 writes an empty line as a point
    header = {name: "\n".join(row.strip().removeprefix(".") for row in value.splitlines()) for name, value in fields}
    claims = tuple(re.findall(r"[^,\s]+", header.get("Overlay", "")))
    return Patch(path.name, label, sha256(text.encode()), header, start + rest, paths, claims)


def overlay_files(line: Line) -> dict[str, bytes]:
    """Upstream path -> content of every overlay file. Raises ForkError for one outside the patchable folders."""
    files = {name: path.read_bytes() for name, path in files_below(line.folder / "overlay").items()}
    if outside := [name for name in files if not name.startswith(PATCHABLE)]:
        raise ForkError(*[f"{line.name}/overlay/{name} lies outside {', '.join(PATCHABLE)}" for name in outside])
    return files


def select(line: Line, wanted: tuple[str, ...] | None) -> tuple[list[Patch], dict[str, bytes]]:
    """The patches to apply and the overlay files that come with them.

    `wanted` None means the whole series, () untouched upstream. An overlay file comes with the patch that claims it.
    Raises ForkError for an unknown name, and where a line of alternatives is not given exactly one.
    """
    if wanted == ():
        return [], {}
    names = read_series(line)
    wanted = wanted and tuple(name.removesuffix(".patch") + ".patch" for name in wanted)
    if unknown := [name for name in wanted or () if name not in names]:
        raise ForkError(f"{line.name} has no patch {', '.join(unknown)}: its series is {', '.join(names) or 'empty'}")
    if line.mode == "alternatives" and (wanted is None or len(wanted) != 1):
        choice = ", ".join(names) or "(an empty series)"
        raise ForkError(f"{line.name} holds alternatives: pass --no-patches, or --patches with just one of {choice}")
    chosen = [read_patch(line.folder / name) for name in names if wanted is None or name in wanted]
    claims = {path for patch in chosen for path in patch.claims}
    return chosen, {path: data for path, data in overlay_files(line).items() if path in claims}


def obtain(line: Line, wheels: Path | None = None) -> Path:
    """The verified upstream wheel of `line`: from `wheels` or FORK_WHEELS if given, else the cache, else through pip.

    Raises WheelUnavailable where it cannot be had, ForkError where its hash is not the pinned one.
    """
    named = wheels or os.environ.get("FORK_WHEELS")
    folder = Path(named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rloo-memory", "wheels"))
    if (folder / line.wheel).is_file():
        return verified(folder / line.wheel, line)
    if named:  # the user says where wheels are: no network behind their back
        raise WheelUnavailable(f"{folder} holds no {line.wheel}: put it there, or go without --wheels and FORK_WHEELS")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temp:
        download = f"download -q --disable-pip-version-check --no-input --retries 2 --no-deps trl=={line.version} -d"
        command = [sys.executable, "-m", "pip", *download.split(), temp, "--only-binary=:all:"]
        pip = subprocess.run(command, cwd=temp, capture_output=True, text=True)
        if pip.returncode or not Path(temp, line.wheel).is_file():
            reason = (pip.stderr.strip().splitlines() or [f"pip brought no {line.wheel}"])[-1]
            remedies = f"connect to the network, or pass --wheels DIR (or FORK_WHEELS) where DIR holds {line.wheel}"
            raise WheelUnavailable(f"cannot obtain trl {line.version}: {remedies} ({reason})")
        os.replace(verified(Path(temp, line.wheel), line), folder / line.wheel)
    return folder / line.wheel


def verified(wheel: Path, line: Line) -> Path:
    """`wheel` itself. Raises ForkError where its hash is not the pinned one."""
    if (found := sha256(wheel.read_bytes())) != line.sha256:
        raise ForkError(f"{wheel} has sha256 {found}, pinned is {line.sha256}: delete it and fetch it again")
    return wheel


def unpack(wheel: Path, tree: Path) -> set[str]:
    """Unpack the package and its metadata into `tree` and return the package's paths.

    Left out is what some releases carry beside the package (`examples/`, `scripts/`): first on the import path it
    would shadow folders of the user's.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        archive.extractall(tree, [name for name in names if re.match(r"trl/|trl-[^/]*\.dist-info/", name)])
    return {name for name in names if name.startswith("trl/")}


def place(overlay: dict[str, bytes], tree: Path) -> None:
    """Write the package's share of the overlay files to `tree`."""
    for path, data in overlay.items():
        if path.startswith("trl/"):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)


def run_git(*arguments: str, **options) -> subprocess.CompletedProcess:
    """`subprocess.run` of git, its output captured. Raises ForkError where git is not installed."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, **options)
    except FileNotFoundError:
        raise ForkError("git is not installed or not on PATH: install it, it applies the patches") from None


def apply(patch: Patch, tree: Path) -> None:
    """Apply the package's share of `patch` to `tree`, without fuzz. Raises ForkError with one line per failure."""
    paths = [tree / path for path in patch.paths if path.startswith("trl/")]
    if not paths:
        return
    # `git apply` and not `patch`: every context line must match, and all files change or none. But inside somebody's
    # repository it takes paths as relative to that repository and silently skips the rest. A GIT_DIR that is no
    # repository stops the search for one; nothing else of the user's environment and settings may loosen the match.
    before = [path.read_bytes() if path.is_file() else None for path in paths]
    alone = {"GIT_DIR": os.devnull, "HOME": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    git = run_git(
        *("apply", "--whitespace=nowarn", "--include=trl/*", "-"),
        cwd=tree,
        env=alone | {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
        input=patch.diff.encode(),
    )
    if git.returncode:
        said = [row.removeprefix("error: ") for row in git.stderr.decode(errors="replace").splitlines()]
        reasons = [re.sub(r"^patch failed: (.+):(\d+)$", r"\1, line \2 does not match", row) for row in said]
        raise ForkError(
            *[
                f"{patch.label} does not apply: {reason}"
                for reason in reasons
                if not reason.endswith(": patch does not apply")  # git repeats the failed hunk's line so
            ]
        )
    for path, old in zip(paths, before, strict=True):
        if old == (path.read_bytes() if path.is_file() else None):
            raise ForkError(f"{patch.label} does not apply: git left {path.relative_to(tree)} as it was")


def tree_digest(tree: Path) -> str:
    """One hash over every file of a build but FORK.json and bytecode."""
    rows = [f"{name} {sha256(path.read_bytes())}" for name, path in files_below(tree).items() if name != "FORK.json"]
    return sha256("\n".join(rows).encode())


def built(dest: Path) -> str | None:
    """The fingerprint of the build in `dest`, None where nothing is. Raises ForkError where something else is."""
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return None
    remedy = "remove it, or pass --force to replace it"
    try:
        record = json.loads((dest / "FORK.json").read_text(encoding="utf-8"))
        fingerprint, files = record["fingerprint"], record["files_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        if (dest / "trl").is_dir():
            raise ForkError(f"{dest} is half-written (a trl folder without a valid FORK.json): {remedy}") from None
        raise ForkError(f"{dest} exists and is no build of this tool: name another place, {remedy}") from None
    if tree_digest(dest) != files:
        raise ForkError(f"{dest} was edited after it was built: save what you need of it, then {remedy}")
    return fingerprint


def refuse_source(root: Path, dest: Path) -> None:
    """Raises ForkError where `dest` lies in the folder of the sources or would replace it."""
    if dest.is_relative_to(root) or root.is_relative_to(dest):
        raise ForkError(f"{dest} would overwrite the fork's sources in {root}: name another place")


@contextlib.contextmanager
def replacing(dest: Path) -> Iterator[Path]:
    """A path next to `dest` to make a folder at: it becomes `dest` if the block ends well, and is gone if not.

    One process at a time gets that far in one parent folder.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{dest.name}.fork-"
    parent = os.open(dest.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: go on without
            fcntl.flock(parent, fcntl.LOCK_EX)
        for leftover in [path for path in dest.parent.iterdir() if path.name.startswith(prefix)]:
            shutil.rmtree(leftover, ignore_errors=True)  # we hold the lock, so its process was killed
        with tempfile.TemporaryDirectory(prefix=prefix, dir=dest.parent, ignore_cleanup_errors=True) as temp:
            new = Path(temp, "new")
            yield new
            if new.exists() and dest.exists():
                dest.rename(Path(temp, "replaced"))
            if new.exists():
                new.rename(dest)
    finally:
        os.close(parent)


def build(
    root: Path, name: str, dest: Path, patches: tuple[str, ...] | None, wheels: Path | None = None, force: bool = False
) -> str:
    """Build line `name` with `patches` (see `select`) into `dest` and say what was done.

    Raises ForkError where that is impossible; `dest` is then as it was.
    """
    line = find_line(root, name)
    refuse_source(root, dest)
    chosen, overlay = select(line, patches)
    record = {"format": FORMAT, "line": name, "version": line.version, "wheel_sha256": line.sha256}
    record["patches"] = [{"name": patch.name, "sha256": patch.sha256} for patch in chosen]
    record["overlay"] = [{"path": path, "sha256": sha256(data)} for path, data in overlay.items()]
    record["fingerprint"] = sha256(json.dumps(record).encode())
    what = f"{dest}: trl {line.version}, {', '.join(patch.name for patch in chosen) or 'no patches'}"
    if not force and built(dest) == record["fingerprint"]:
        return f"{what}: up to date"
    wheel = obtain(line, wheels)
    with replacing(dest) as tree:
        if not force and built(dest) == record["fingerprint"]:  # another process built it while we waited
            return f"{what}: up to date"
        upstream = unpack(wheel, tree)
        if shadowed := [path for path in overlay if path in upstream]:
            raise ForkError(f"{name}/overlay/{shadowed[0]} would overwrite an upstream file: make it a patch")
        place(overlay, tree)
        for patch in chosen:
            apply(patch, tree)
        record["files_sha256"] = tree_digest(tree)
        (tree / "FORK.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return f"{what}: built"


def fork_version(version: str, fingerprint: str) -> str:
    """The version of the wheel that packs the build with this fingerprint of upstream's `version`."""
    # `fork` is what to read in `pip list`, the digits say which: they begin the fingerprint in FORK.json. The patches'
    # names would be long in a stack, and the same after a patch changed. PEP 440 reads a part of digits alone as a
    # number, without leading zeros.
    return f"{version}+fork.{re.sub(r'^0+(?=[0-9]+$)', '', fingerprint[:7])}"


def pack(root: Path, name: str, dest: Path, patches: tuple[str, ...] | None, wheels: Path | None = None) -> str:
    """Write the build of line `name` with `patches` (see `select`) as a wheel into `dest` and say what was done.

    Other wheels of the fork of the same release are removed from `dest`. The same inputs give the same bytes. Raises
    ForkError where that is impossible, or the release itself would come out; `dest` is then as it was.
    """
    line = find_line(root, name)
    if dest.is_relative_to(root):  # a folder around the sources may well get one more file
        refuse_source(root, dest)
    if dest.exists() and not dest.is_dir():
        raise ForkError(f"{dest} is no folder: name the folder to write the wheel into")
    chosen, overlay = select(line, patches)
    if not chosen and not overlay:
        raise ForkError(f"{name} without patches is the release itself: pip install trl=={line.version}, or name some")
    with tempfile.TemporaryDirectory() as temp:
        tree = Path(temp, "tree")
        build(root, name, tree, patches, wheels)
        files = {path: source.read_bytes() for path, source in files_below(tree).items()}
    version = fork_version(line.version, json.loads(files["FORK.json"])["fingerprint"])
    old, info = f"trl-{line.version}.dist-info/", f"trl-{version}.dist-info/"
    if old + "METADATA" not in files:
        raise ForkError(f"{line.wheel} holds no {old}METADATA: correct version and wheel of [{name}] in UPSTREAM.toml")
    files = {path.replace(old, info): data for path, data in files.items() if path != old + "RECORD"}
    files[info + "FORK.json"] = files.pop("FORK.json")
    files[info + "top_level.txt"] = b"trl\n"  # upstream's may name the folders that `unpack` leaves out
    stated = f"Version: {version}".encode()
    files[info + "METADATA"] = re.sub(rb"^Version: .*", stated, files[info + "METADATA"], count=1, flags=re.M)
    files = dict(sorted(files.items(), key=lambda item: (item[0].startswith(info), item[0])))  # metadata last: PEP 427
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.writerow((path, f"sha256={digest}", len(data)))
    rows.writerow((info + "RECORD", "", ""))
    files[info + "RECORD"] = table.getvalue().encode()
    target = dest / line.wheel.replace(f"-{line.version}-", f"-{version}-")
    with replacing(target) as new, zipfile.ZipFile(new, "w") as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path)  # dated 1980 and not compressed: zlib's versions give different bytes
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    said = f"{target}: trl {version}, {', '.join(patch.name for patch in chosen) or 'no patches'}"
    for older in sorted(dest.glob(f"trl-{line.version}+fork.[0-9a-f]*.whl")):  # pip refuses two versions at once
        if older != target:
            older.unlink()
            said += f"; removed {older.name}"
    return said


def check(line: Line, wheels: Path | None = None) -> list[str]:
    """Every problem of `line`, one text each; none means that all its patches apply to pristine upstream.

    A stack is tried up to its first failure. Raises ForkError where the line cannot be checked at all.
    """
    names, overlay, patches = read_series(line), overlay_files(line), []
    loose = sorted(path.name for path in line.folder.glob("*.patch") if path.name not in names)
    problems = [f"{line.name}/{name} is not listed in {line.name}/series" for name in loose]
    for name in names:
        try:
            patches.append(read_patch(line.folder / name))
        except ForkError as error:
            problems += error.args
    for patch in patches:
        problems += [
            f"{patch.label} lacks the DEP-3 field {key}" for key in HEADER_FIELDS if not patch.header.get(key)
        ]
        problems += [f"{patch.label} claims {path}, not in overlay/" for path in patch.claims if path not in overlay]
        changed = [path for path in patch.paths if path in overlay]
        problems += [f"{patch.label} changes {path}: edit it in overlay/" for path in changed]
    for path in overlay:
        if (number := sum(path in patch.claims for patch in patches)) != 1:
            problems.append(f"{line.name}/overlay/{path} is claimed by {number} patches: it comes with one")
    with tempfile.TemporaryDirectory() as temp:
        wheel, tree = obtain(line, wheels), Path(temp, "tree")
        upstream = unpack(wheel, tree)
        problems += [f"{line.name}/overlay/{path} shadows an upstream file" for path in overlay if path in upstream]
        for patch in patches:
            if line.mode == "alternatives":
                shutil.rmtree(tree)
                unpack(wheel, tree)
            place({path: overlay[path] for path in patch.claims if path in overlay and path not in upstream}, tree)
            try:
                apply(patch, tree)
            except ForkError as error:
                problems += error.args
                if line.mode == "stack":
                    break
    return problems


def new_file(path: str, data: bytes) -> str:
    """The diff that creates `path`."""
    rows = data.decode().splitlines()
    added = "".join(f"+{row}\n" for row in rows)
    header = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{header}@@ -0,0 +1,{len(rows)} @@\n{added}"


def author(root: Path) -> str:
    """The user's git identity. Raises ForkError where git has none."""
    name, email = (run_git("config", key, cwd=root).stdout.decode().strip() for key in ("user.name", "user.email"))
    if not name or not re.fullmatch(r"[^<>\s]+@[^<>\s]+", email):
        said = f"user.name {name!r} and user.email {email!r}"
        remedy = "git config --global user.name 'Your Name'; git config --global user.email you@your.host"
        raise ForkError(f"the mails need your name and an address for answers, git has {said}: {remedy}")
    return f"{name} <{email}>"


def export(root: Path, name: str, dest: Path, wheels: Path | None = None) -> str:
    """Write line `name` to `dest` as mails for `git am` on the upstream tag and say what was done.

    Alternatives each get a folder of their own. Raises ForkError where the line does not pass `check`, or `dest` holds
    anything but an earlier export.
    """
    line = find_line(root, name)
    refuse_source(root, dest)
    names = read_series(line)
    if problems := check(line, wheels) if names else [f"{name}/series is empty: nothing to export"]:
        raise ForkError(*problems)
    mails = {}
    for group in [(patch,) for patch in names] if line.mode == "alternatives" else [names]:
        patches, overlay = select(line, group)
        for number, patch in enumerate(patches, 1):
            subject, _, body = patch.header["Description"].partition("\n")
            day = datetime.strptime(patch.header["Last-Update"], "%Y-%m-%d").strftime("%a, %d %b %Y 00:00:00 +0000")
            mine = [path for path in overlay if path in patch.claims]
            sender = patch.header.get("Author") or author(root)
            folder = patch.name.removesuffix(".patch") if line.mode == "alternatives" else ""
            mails[Path(folder, f"{number:04d}-{re.sub(r'^[0-9]+-', '', patch.name)}")] = (
                f"{MAIL_START}From: {sender}\nDate: {day}\n"
                f"Subject: [PATCH {number}/{len(patches)}] {subject}\n"
                "MIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\n\n"
                f"{body}\n---\n\n{''.join(new_file(path, overlay[path]) for path in mine)}{patch.diff}"
            )
    there = files_below(dest).values() if dest.is_dir() else [dest] if dest.exists() else []
    if any(not path.read_bytes().startswith(MAIL_START.encode()) for path in there):
        raise ForkError(f"{dest} holds more than an earlier export: name another place")
    with replacing(dest) as new:
        for path, mail in mails.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(mail.encode())
    return f"{dest}: {len(mails)} patches for git am on {line.tag}"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ForkError(f"{message} (see --help)")


def run(argv: list[str] | None) -> None:
    """Do what the command line says. Raises ForkError with the lines to report."""
    parser = Parser(prog="fork.py", description="Build, pack, check and export the fork of TRL.")
    common = Parser(add_help=False)
    common.add_argument("--wheels", type=Path, metavar="DIR", help="the only place to take the upstream wheel from")
    common.add_argument("--root", type=Path, default=Path(__file__).parent, help="the folder that holds UPSTREAM.toml")
    choice = Parser(add_help=False, parents=[common])
    choice.add_argument("line", metavar="LINE")
    which = choice.add_mutually_exclusive_group()
    names = "NAME[,NAME...]"
    which.add_argument("--patches", type=lambda text: tuple(text.split(",")), metavar=names, help="only these")
    which.add_argument("--no-patches", dest="patches", action="store_const", const=(), help="untouched upstream")
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("build", parents=[choice], help="make DEST/trl, importable with DEST on PYTHONPATH")
    sub.add_argument("dest", type=Path, metavar="DEST")
    sub.add_argument("--force", action="store_true", help="replace whatever DEST holds")
    sub = commands.add_parser("wheel", parents=[choice], help="write the fork into DIR as a wheel for pip install")
    sub.add_argument("dest", type=Path, metavar="DIR")
    sub = commands.add_parser("check", parents=[common], help="replay every patch on pristine upstream")
    sub.add_argument("lines", nargs="*", metavar="LINE")
    sub = commands.add_parser("export", parents=[common], help="write the patches for git am")
    sub.add_argument("line", metavar="LINE")
    sub.add_argument("dest", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    root = args.root.resolve()
    if args.command == "build":
        print(build(root, args.line, args.dest.resolve(), args.patches, args.wheels, args.force))
    elif args.command == "wheel":
        print(pack(root, args.line, args.dest.resolve(), args.patches, args.wheels))
    elif args.command == "export":
        print(export(root, args.line, args.dest.resolve(), args.wheels))
    else:
        lines = [find_line(root, name) for name in args.lines or load_lines(root)]
        problems = [problem for line in lines for problem in check(line, args.wheels)]
        if problems:
            raise ForkError(*dict.fromkeys(problems))  # a stray file is every line's problem: say it once
        for line in lines:
            print(f"{line.name}: {len(read_series(line))} patches apply to trl {line.version}")


def main(argv: list[str] | None = None) -> int:
    """The command line: 0, or 2 with one line on stderr for each problem."""
    try:
        run(argv)
        return 0
    except ForkError as error:
        problems = error.args
    except (OSError, UnicodeError, zipfile.BadZipFile) as error:
        problems = [error]
    for problem in problems:
        print(f"fork.py: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

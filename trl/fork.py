"""Build, pack, check and export the fork: pinned upstream wheels, and the patches and overlay files beside this file.

    python trl/fork.py build LINE DEST [--patches NAME[,NAME...] | --no-patches] [--wheels DIR] [--force]
    python trl/fork.py wheel LINE DIR [--patches NAME[,NAME...]] [--wheels DIR]
    python trl/fork.py check [LINE...]
    python trl/fork.py export LINE DIR

A line is a table of UPSTREAM.toml and a folder of the same name. `series` names its patches in order. `overlay/` holds
whole new files at their upstream paths, each claimed by one patch. Standard library only; git does the patching.
One file on purpose: it runs before anything is installed, by path, and can be carried to another project as it is.
"""

import argparse
import base64
import contextlib
import email
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
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

FORMAT = 1  # part of every fingerprint: raise it when the same inputs should build something else
HEADER_FIELDS = {"Description": ".+", "Origin": ".+", "Forwarded": ".+", "Last-Update": r"\d{4}-\d\d-\d\d"}
PATCHABLE = ("trl/", "docs/", "tests/")  # only trl/ is in the wheel, the rest is for the exported series
MAIL_START = b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\n"  # of every mail that git writes with --zero-commit
Names = tuple[str, ...] | None  # of the patches to apply: None for the whole series, () for untouched upstream


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
    paths: set[str]  # what the diff touches
    claims: dict[str, Path]  # upstream path -> source of the overlay files that come with this patch alone


def files_below(folder: Path) -> dict[str, Path]:
    """Relative name -> path of every file below `folder`, bytecode left out, sorted."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path for path in found}


def load_lines(root: Path) -> dict[str, Line]:
    """Read `root/UPSTREAM.toml`. Raises ForkError for a line that is incomplete."""
    tables = tomllib.loads((root / "UPSTREAM.toml").read_text(encoding="utf-8"))
    try:
        return {name: Line(name, root / name, **table) for name, table in tables.items()}
    except TypeError as error:
        raise ForkError(f"{root}/UPSTREAM.toml does not give what a line needs: {error}") from None


def find_line(root: Path, name: str) -> Line:
    """The line called `name`. Raises ForkError, listing the lines, where there is none."""
    lines = load_lines(root)
    if name not in lines:
        raise ForkError(f"unknown line {name!r}: the lines are {', '.join(lines)}")
    return lines[name]


def read_series(line: Line) -> tuple[str, ...]:
    """The patch names of `line`, in order."""
    rows = (line.folder / "series").read_text(encoding="utf-8").splitlines()
    return tuple(name for row in rows if (name := row.partition("#")[0].strip()))


def read_patch(path: Path) -> Patch:
    """Read one patch and its DEP-3 header. Raises ForkError where it has no diff of git, or one of other folders."""
    label, data = f"{path.parent.name}/{path.name}", path.read_bytes()
    head, *diff = re.split(r"^(?=diff --git )", data.decode(), maxsplit=1, flags=re.M)
    if not diff:
        raise ForkError(f"{label} holds no diff of git")
    # DEP-3 has the form of a mail's header, in which "." stands for an empty line
    fields = email.message_from_string(head).items()
    header = {key: re.sub(r"\n (\.$)?", "\n", value, flags=re.M) for key, value in fields}
    paths = {path for pair in re.findall(r"^diff --git a/(\S+) b/(\S+)$", diff[0], re.M) for path in pair}
    claims = {name: path.parent / "overlay" / name for name in re.findall(r"[^,\s]+", header.get("Overlay", ""))}
    if outside := [name for name in sorted({*paths, *claims}) if not name.startswith(PATCHABLE)]:
        raise ForkError(*[f"{label} touches {name!r}, outside {', '.join(PATCHABLE)}" for name in outside])
    return Patch(path.name, label, sha256(data).hexdigest(), header, diff[0], paths, claims)


def read_patches(line: Line) -> list[Patch]:
    """The whole series of `line`. Raises ForkError unless each overlay file belongs to just one patch."""
    patches = [read_patch(line.folder / name) for name in read_series(line)]
    claims = [(path, patch.name) for patch in patches for path in patch.claims]
    files = files_below(line.folder / "overlay")
    problems = [f"{line.name}/{name} claims {path}, not in overlay/" for path, name in claims if path not in files]
    for path in files:
        by = [name for claim, name in claims if claim == path]
        if len(by) != 1:
            problems.append(f"{line.name}/overlay/{path} needs one patch to claim it, has {', '.join(by) or 'none'}")
    if problems:
        raise ForkError(*problems)
    return patches


def select(line: Line, wanted: Names) -> list[Patch]:
    """The patches of `line` to apply. Raises ForkError for an unknown name, and unless there is just one of several
    alternatives."""
    if wanted == ():
        return []
    names = read_series(line)
    wanted = wanted and tuple(name.removesuffix(".patch") + ".patch" for name in wanted)
    if unknown := [name for name in wanted or () if name not in names]:
        raise ForkError(f"{line.name} has no patch {', '.join(unknown)}: its series is {', '.join(names) or 'empty'}")
    if line.mode == "alternatives" and (wanted is None or len(wanted) != 1):
        choice = ", ".join(names) or "(an empty series)"
        raise ForkError(f"{line.name} holds alternatives: pass --no-patches, or --patches with just one of {choice}")
    return [patch for patch in read_patches(line) if wanted is None or patch.name in wanted]


def obtain(line: Line, wheels: Path | None = None) -> Path:
    """The verified upstream wheel of `line`: from `wheels` or FORK_WHEELS if given, else the cache, else through pip.
    Raises WheelUnavailable where it cannot be had, ForkError where its hash is not the pinned one."""
    named = wheels or os.environ.get("FORK_WHEELS")
    folder = Path(named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rloo-memory", "wheels"))
    wheel = folder / line.wheel
    if named and not wheel.is_file():  # the user says where wheels are: no network behind their back
        raise WheelUnavailable(f"{folder} holds no {line.wheel}: put it there, or go without --wheels and FORK_WHEELS")
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        options = "-q --disable-pip-version-check --no-input --retries 2 --no-deps --only-binary=:all: -d .".split()
        command = [sys.executable, "-m", "pip", "download", *options, f"trl=={line.version}"]
        with tempfile.TemporaryDirectory(dir=folder) as temp:
            pip = subprocess.run(command, cwd=temp, capture_output=True, text=True)
            if pip.returncode or not Path(temp, line.wheel).is_file():
                reason = (pip.stderr.strip().splitlines() or [f"pip brought no {line.wheel}"])[-1]
                remedy = f"connect to the network, or pass --wheels DIR (or FORK_WHEELS) where DIR holds {line.wheel}"
                raise WheelUnavailable(f"cannot obtain trl {line.version}: {remedy} ({reason})")
            os.replace(Path(temp, line.wheel), wheel)
    if (found := sha256(wheel.read_bytes()).hexdigest()) != line.sha256:
        raise ForkError(f"{wheel} has sha256 {found}, pinned is {line.sha256}: delete it and fetch it again")
    return wheel


def unpack(wheel: Path, tree: Path) -> None:
    """Unpack the package and its metadata into `tree`. What is beside them would shadow folders of the user's."""
    with zipfile.ZipFile(wheel) as archive:
        members = (name for name in archive.namelist() if re.match(r"trl/|trl-[^/]*\.dist-info/", name))
        archive.extractall(tree, members)


def need_git() -> None:
    """Raises ForkError where git is missing: asked before any patch. A build that is there needs none."""
    if not shutil.which("git"):
        raise ForkError("git is not installed or not on PATH: install it, it applies the patches")


def run_git(folder: Path, *arguments: str, text: str = "") -> str:
    """What git answers to `text` in `folder`, with nobody's settings. Raises ForkError with its errors."""
    # Inside somebody's repository `git apply` takes paths as relative to that one, and silently skips the rest:
    # GIT_DIR stops the search for it
    alone = {"GIT_DIR": str(folder / ".git"), "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", "HOME": os.devnull}
    alone |= {"GIT_COMMITTER_NAME": "fork.py", "GIT_COMMITTER_EMAIL": "fork.py@localhost"}
    alone |= {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    git = subprocess.run(["git", *arguments], cwd=folder, env=alone, input=text.encode(), capture_output=True)
    if git.returncode:
        raise ForkError(*git.stderr.decode(errors="replace").splitlines() or [f"git {arguments[0]} failed"])
    return git.stdout.decode()


def apply(patch: Patch, tree: Path, folders: tuple[str, ...] = ("trl/",)) -> None:
    """Copy the overlay files of `patch` in `folders` to `tree` and apply its hunks of the package, without fuzz.
    Raises ForkError with one line for each hunk that does not match, and for a file that upstream has: `tree` is then
    without them."""
    for path, source in patch.claims.items():
        if (tree / path).exists():
            raise ForkError(f"{source} would overwrite an upstream file: make it a patch")
        if path.startswith(folders):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, tree / path)
    try:  # `git apply` and not `patch`: every context line must match. `--reject` names every hunk that does not
        run_git(tree, "apply", "--reject", "--whitespace=nowarn", "--include=trl/*", "-", text=patch.diff)
    except ForkError as error:
        said = [text[7:] for text in error.args if re.match("error: (?!while searching for:)", text)] or error.args
        said = [re.sub(r"^patch failed: (.+):(\d+)$", r"\1, the hunk @@ -\2 does not match", text) for text in said]
        raise ForkError(*[f"{patch.label} does not apply: {text}" for text in said]) from None


def tree_digest(tree: Path) -> str:
    """One hash over every file of a build but FORK.json and bytecode."""
    files = files_below(tree).items()
    rows = [f"{name} {sha256(path.read_bytes()).hexdigest()}" for name, path in files if name != "FORK.json"]
    return sha256("\n".join(rows).encode()).hexdigest()


def built(dest: Path) -> str | None:
    """The fingerprint of the build in `dest`, None where nothing is. Raises ForkError where something else is."""
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return None
    remedy = "remove it, or pass --force to replace it"
    try:
        record = json.loads((dest / "FORK.json").read_text(encoding="utf-8"))
        fingerprint, files = record["fingerprint"], record["files_sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        raise ForkError(f"{dest} exists and is no whole build of this tool: name another place, {remedy}") from None
    if tree_digest(dest) != files:
        raise ForkError(f"{dest} was edited after it was built: save what you need of it, then {remedy}")
    return fingerprint


def refuse_source(root: Path, dest: Path) -> None:
    """Raises ForkError where `dest` lies in the folder of the sources or would replace it."""
    if dest.is_relative_to(root) or root.is_relative_to(dest):
        raise ForkError(f"{dest} would overwrite the fork's sources in {root}: name another place")


@contextlib.contextmanager
def replacing(dest: Path) -> Iterator[Path]:
    """A path next to `dest` to make something at: it becomes `dest` if the block ends well, and is gone if not.
    One process at a time gets that far in one parent folder."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    temp = dest.with_name(f".{dest.name}.fork-new")
    parent = os.open(dest.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks: go on without
        fcntl.flock(parent, fcntl.LOCK_EX)
    try:
        shutil.rmtree(temp, ignore_errors=True)  # we hold the lock, so the process that left it was killed
        temp.mkdir()
        yield temp / "new"
        if (temp / "new").exists():
            if dest.exists():
                dest.rename(temp / "replaced")
            (temp / "new").rename(dest)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        os.close(parent)


def build(root: Path, name: str, dest: Path, patches: Names, wheels: Path | None = None, force: bool = False) -> str:
    """Build line `name` with `patches` into `dest` and say what was done.
    Raises ForkError where that is impossible; `dest` is then as it was."""
    line = find_line(root, name)
    refuse_source(root, dest)
    chosen = select(line, patches)
    overlay = sorted((path, source) for patch in chosen for path, source in patch.claims.items())
    record = {"format": FORMAT, "line": name, "version": line.version, "wheel_sha256": line.sha256}
    record["patches"] = [{"name": patch.name, "sha256": patch.sha256} for patch in chosen]
    record["overlay"] = [{"path": path, "sha256": sha256(source.read_bytes()).hexdigest()} for path, source in overlay]
    record["fingerprint"] = sha256(json.dumps(record).encode()).hexdigest()
    what = f"{dest}: trl {line.version}, {', '.join(patch.name for patch in chosen) or 'no patches'}"
    if not force and built(dest) == record["fingerprint"]:
        return f"{what}: up to date"
    if chosen:
        need_git()
    wheel = obtain(line, wheels)
    with replacing(dest) as tree:
        if not force and built(dest) == record["fingerprint"]:  # another process built it while we waited
            return f"{what}: up to date"
        unpack(wheel, tree)
        for patch in chosen:
            apply(patch, tree)
        record["files_sha256"] = tree_digest(tree)
        (tree / "FORK.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return f"{what}: built"


def fork_version(version: str, fingerprint: str) -> str:
    """The version of the wheel of a build: its digits begin the fingerprint in FORK.json."""
    # PEP 440 reads digits alone as a number, without leading zeros
    return f"{version}+fork.{re.sub(r'^0+(?=[0-9]+$)', '', fingerprint[:7])}"


def pack(root: Path, name: str, dest: Path, patches: Names, wheels: Path | None = None) -> str:
    """Write the build of line `name` with `patches` as a wheel into `dest` and say what was done. The same inputs give
    the same bytes. Other wheels of the fork of the same release are removed: pip refuses two versions at once.
    Raises ForkError where that is impossible, or the release itself would come out."""
    line = find_line(root, name)
    if dest.is_relative_to(root):  # a folder around the sources may well get one more file
        refuse_source(root, dest)
    if dest.exists() and not dest.is_dir():
        raise ForkError(f"{dest} is no folder: name the folder to write the wheel into")
    if not (chosen := select(line, patches)):
        raise ForkError(f"{name} without patches is the release itself: pip install trl=={line.version}, or name some")
    with tempfile.TemporaryDirectory() as temp:
        build(root, name, Path(temp, "tree"), patches, wheels)
        files = {path: source.read_bytes() for path, source in files_below(Path(temp, "tree")).items()}
    version = fork_version(line.version, json.loads(files["FORK.json"])["fingerprint"])
    old, info = f"trl-{line.version}.dist-info/", f"trl-{version}.dist-info/"
    files = {path.replace(old, info): data for path, data in files.items() if path != old + "RECORD"}
    if info + "METADATA" not in files:
        raise ForkError(f"{line.wheel} holds no {old}METADATA: correct version and wheel of [{name}] in UPSTREAM.toml")
    files[info + "FORK.json"] = files.pop("FORK.json")
    files[info + "top_level.txt"] = b"trl\n"  # upstream's may name the folders that `unpack` leaves out
    stated = f"Version: {version}".encode()
    files[info + "METADATA"] = re.sub(rb"^Version: .*", stated, files[info + "METADATA"], count=1, flags=re.M)
    files = dict(sorted(files.items(), key=lambda item: (item[0].startswith(info), item[0])))  # metadata last: PEP 427
    hashes = {path: base64.urlsafe_b64encode(sha256(data).digest()) for path, data in files.items()}
    rows = [f"{path},sha256={hashes[path].decode().rstrip('=')},{len(data)}\n" for path, data in files.items()]
    files[info + "RECORD"] = "".join([*rows, f"{info}RECORD,,\n"]).encode()
    target = dest / line.wheel.replace(f"-{line.version}-", f"-{version}-")
    with replacing(target) as new, zipfile.ZipFile(new, "w") as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path)  # dated 1980 and not compressed: zlib's versions give different bytes
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    said = f"{target}: trl {version}, {', '.join(patch.name for patch in chosen)}"
    older = rf"trl-{re.escape(line.version)}\+fork\.[0-9a-f]{{1,7}}-.+\.whl"
    for path in sorted(dest.iterdir()):
        if path != target and re.fullmatch(older, path.name):
            path.unlink()
            said += f"; removed {path.name}"
    return said


def check(line: Line, wheels: Path | None = None) -> list[str]:
    """Every problem of `line`, one text each; none means that all its patches apply to pristine upstream.
    Behind a hunk that fails a stack goes on without it. Raises ForkError where the line cannot be checked at all."""
    need_git()
    patches, wheel = read_patches(line), obtain(line, wheels)
    loose = sorted({path.name for path in line.folder.glob("*.patch")} - {patch.name for patch in patches})
    problems = [f"{line.name}/{name} is not listed in {line.name}/series" for name in loose]
    for patch in patches:
        missing = [key for key, form in HEADER_FIELDS.items() if not re.match(form, patch.header.get(key, ""))]
        problems += [f"{patch.label} lacks the DEP-3 field {key} like {HEADER_FIELDS[key]}" for key in missing]
        changed = sorted(path for path in patch.paths if (line.folder / "overlay" / path).exists())
        problems += [f"{patch.label} changes {path}: edit it in overlay/" for path in changed]
    for group in [[patch] for patch in patches] if line.mode == "alternatives" else [patches]:
        with tempfile.TemporaryDirectory() as temp:
            unpack(wheel, Path(temp))
            for patch in group:
                try:
                    apply(patch, Path(temp))
                except ForkError as error:
                    problems += error.args
    return problems


def user() -> str:
    """The user as git knows them, Name <email>. Raises ForkError where git knows none."""
    command = ["git", "-c", "user.useConfigOnly=true", "var", "GIT_AUTHOR_IDENT"]
    git = subprocess.run(command, capture_output=True, text=True)
    if git.returncode:
        remedy = "git config --global user.name 'Your Name'; git config --global user.email you@your.host"
        raise ForkError(f"the mails need your name and address ({git.stderr.strip().splitlines()[-1]}): {remedy}")
    return git.stdout.rpartition(">")[0] + ">"


def write_mails(line: Line, patches: list[Patch], tree: Path, folder: Path) -> None:
    """Commit `patches` one by one upon upstream in `tree`, and write each commit to `folder` as a mail.
    Raises ForkError where git refuses, as for an Author that is not Name <email>."""
    folder.mkdir(parents=True, exist_ok=True)
    run_git(tree, "init", "-q")
    run_git(tree, "add", "--all", "--force")
    run_git(tree, "commit", "-q", "-m", line.tag, "--author=TRL <>", "--date=2000-01-01T00:00:00Z")
    form = ["--zero-commit", "--no-signature", "--full-index", "--always", "--no-numbered"]
    for number, patch in enumerate(patches, 1):
        apply(patch, tree, PATCHABLE)
        run_git(tree, "add", "--all", "--force")
        who = [f"--author={patch.header.get('Author') or user()}", f"--date={patch.header['Last-Update']}T00:00:00Z"]
        message = patch.header["Description"].replace("\n", "\n\n", 1)
        run_git(tree, "commit", "-q", "--allow-empty", "-F", "-", *who, text=message)
        prefix = f"--subject-prefix=PATCH {number}/{len(patches)}"
        mail = run_git(tree, "format-patch", "-1", "--stdout", *form, prefix)
        # The wheel has no docs and no tests to apply hunks to: they go along as they are
        parts = re.split(r"^(?=diff --git )", patch.diff, flags=re.M)
        mail += "".join(part for part in parts if not part.startswith("diff --git a/trl/"))
        (folder / f"{number:04d}-{re.sub(r'^[0-9]+-', '', patch.name)}").write_text(mail, encoding="utf-8")


def export(root: Path, name: str, dest: Path, wheels: Path | None = None) -> str:
    """Write line `name` to `dest` as mails for `git am` on the upstream tag, alternatives each to a folder of its own.
    Raises ForkError where the line does not pass `check`, or `dest` holds anything but an earlier export."""
    line = find_line(root, name)
    refuse_source(root, dest)
    names = read_series(line)
    if problems := check(line, wheels) if names else [f"{name}/series is empty: nothing to export"]:
        raise ForkError(*problems)
    there = files_below(dest).values() if dest.is_dir() else [dest] if dest.exists() else []
    if any(not path.read_bytes().startswith(MAIL_START) for path in there):
        raise ForkError(f"{dest} holds more than an earlier export: name another place")
    groups = {Path(patch).stem: (patch,) for patch in names} if line.mode == "alternatives" else {"": names}
    with replacing(dest) as new:
        for folder, group in groups.items():
            with tempfile.TemporaryDirectory() as temp:
                unpack(obtain(line, wheels), Path(temp))
                write_mails(line, select(line, group), Path(temp), new / folder)
    return f"{dest}: {len(names)} patches for git am on {line.tag}"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ForkError(f"{message} (see --help)")


def check_lines(root: Path, names: list[str], wheels: Path | None = None) -> str:
    """Say how many patches apply, of the lines called `names` or of all. Raises ForkError with all problems."""
    lines = [find_line(root, name) for name in names or load_lines(root)]
    if problems := [problem for line in lines for problem in check(line, wheels)]:
        raise ForkError(*problems)
    return "\n".join(f"{line.name}: {len(read_series(line))} patches apply to trl {line.version}" for line in lines)


def run(argv: list[str] | None) -> str:
    """Do what the command line says, and say what was done. Raises ForkError with the lines to report."""
    parser = Parser(prog="fork.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="build | wheel | check | export")
    functions = {"build": build, "wheel": pack, "check": check_lines, "export": export}
    folder = {"type": lambda text: Path(text).resolve()}
    for command in functions:
        sub = commands.add_parser(command)
        sub.add_argument("--wheels", type=Path, metavar="DIR", help="the only place to take the upstream wheel from")
        sub.add_argument("--root", **folder, default=Path(__file__).resolve().parent, help="where UPSTREAM.toml is")
        if command == "check":
            sub.add_argument("names", metavar="LINE", nargs="*")
        else:
            sub.add_argument("name", metavar="LINE")
            sub.add_argument("dest", **folder, metavar="DEST" if command == "build" else "DIR")
        if command in ("build", "wheel"):
            which = sub.add_mutually_exclusive_group()
            names = {"type": lambda text: tuple(text.split(",")), "metavar": "NAME[,NAME...]"}
            which.add_argument("--patches", **names, help="only these")
            which.add_argument("--no-patches", dest="patches", action="store_const", const=(), help="upstream alone")
        if command == "build":
            sub.add_argument("--force", action="store_true", help="replace whatever DEST holds")
    args = vars(parser.parse_args(argv))
    return functions[args.pop("command")](**args)


def main(argv: list[str] | None = None) -> int:
    """The command line: 0, or 2 with one line on stderr for each problem."""
    try:
        print(run(argv))
        return 0
    except (ForkError, OSError, ValueError, zipfile.BadZipFile) as error:
        problems = error.args if isinstance(error, ForkError) else [error]
    for problem in problems:
        print(f"fork.py: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

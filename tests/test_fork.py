"""The fork tool on a tiny made-up upstream, and its check on the project's own patches."""

import base64
import csv
import email.policy
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile

import pytest
from fork_tool import ROOT, TOOL, fork, obtain

WHEEL = "trl-9.9.9-py3-none-any.whl"
TOY = "".join(f"line{n} = {n}\n" for n in range(1, 41))
UPSTREAM = {
    "trl/__init__.py": "from importlib.metadata import version\n\n__version__ = version('trl')\n",
    "trl/trainer/__init__.py": "",
    "trl/trainer/toy.py": TOY,
    "trl/trainer/other.py": "other = 1\n",
    "trl-9.9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: trl\nVersion: 9.9.9\n",
    "trl-9.9.9.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "trl-9.9.9.dist-info/RECORD": "",
    "scripts/stray.py": "",
}
PIP_ADDS = ("INSTALLER", "REQUESTED", "direct_url.json")
IN_GIT_ONLY = {"docs/guide.md": "one\ntwo\nthree\n", "tests/test_toy.py": "def test():\n    pass\n"}
HEADER = "Description: {}\n With a body, é and all.\n .\n Second paragraph.\nOrigin: other\nForwarded: no\n"
HEADER += "Author: Ada Löve <ada@example.org>\nLast-Update: 2026-01-31\n"


def change(path, number, new, text=TOY):
    """A git diff that replaces line `number` of `text`, with three lines of context."""
    rows = text.splitlines()
    first, last = max(1, number - 3), min(len(rows), number + 3)
    body = [f"-{row}\n+{new}" if n == number else f" {row}" for n, row in enumerate(rows, 1) if first <= n <= last]
    count = last - first + 1
    at = f"@@ -{first},{count} +{first},{count} @@"
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n" + "\n".join([at, *body]) + "\n"


def patch(subject, *diffs, extra=""):
    return HEADER.format(subject) + extra + "\n" + "".join(diffs)


class Project:
    """A folder of sources (UPSTREAM.toml, lines, patches) on the made-up upstream, and the tool run on it."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys
        self.root, self.wheels, self.dest = folder / "trl", folder / "wheels", folder / "out" / "build"
        self.wheels.mkdir()
        self.release(UPSTREAM)
        self.patches("pick", a=patch("A", change("trl/trainer/toy.py", 5, "five = 'a'")), b=self.one("b"))
        second = change("trl/trainer/toy.py", 5, "five = 'second'", TOY.replace("line5 = 5", "five = 'first'"))
        guide = change("docs/guide.md", 2, "TWO", IN_GIT_ONLY["docs/guide.md"])
        self.patches("pile", first=self.one("first"), second=patch("Do the second thing", second, guide))

    def release(self, files):
        """Make these files upstream's wheel, and pin it."""
        with zipfile.ZipFile(self.wheels / WHEEL, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        digest = hashlib.sha256((self.wheels / WHEEL).read_bytes()).hexdigest()
        table = f'version = "9.9.9"\nwheel = "{WHEEL}"\nsha256 = "{digest}"\ntag = "v9.9.9"\n'
        self.write("UPSTREAM.toml", f'[pick]\n{table}mode = "alternatives"\n[pile]\n{table}mode = "stack"\n')

    @staticmethod
    def one(word):
        return patch(f"Say {word}", change("trl/trainer/toy.py", 5, f"five = '{word}'"))

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def claim(self, path, text, name="first", line="pile"):
        """Add an overlay file to what a patch brings."""
        self.write(f"{line}/overlay/{path}", text)
        header = (self.root / line / f"{name}.patch").read_text()
        self.write(f"{line}/{name}.patch", header.replace("Origin:", f"Overlay: {path}\nOrigin:", 1))

    def patches(self, line, **texts):
        """Make `texts` the whole series of `line`."""
        for path in (self.root / line).glob("*.patch"):
            path.unlink()
        for name, text in texts.items():
            self.write(f"{line}/{name}.patch", text)
        self.write(f"{line}/series", "# in order\n" + "".join(f"{name}.patch\n" for name in texts))

    def run(self, command, *args):
        """Exit code, what stdout said, and the lines of stderr."""
        code = fork.main([command, *map(str, args), "--root", str(self.root), "--wheels", str(self.wheels)])
        said = self.capsys.readouterr()
        return code, said.out, said.err.splitlines()

    def build(self, *args, line="pile"):
        return self.run("build", line, self.dest, *args)

    def refused(self, command, *args):
        """The lines of stderr of a run that must fail, and leave no scratch folder."""
        code, out, lines = self.run(command, *args)
        assert (code, out) == (2, "") and lines and all(line.startswith("fork.py: ") for line in lines)
        assert not list(self.folder.rglob("*.fork-*"))
        return [line.removeprefix("fork.py: ") for line in lines]

    def toy(self):
        return (self.dest / "trl/trainer/toy.py").read_text().splitlines()[4]


@pytest.fixture
def project(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("FORK_WHEELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Project(tmp_path, capsys)


def snapshot(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def imported(site):
    """Where the trl of this folder says it is, its version and its fifth line."""
    code = "import trl, trl.trainer.toy as toy; print(trl.__file__, trl.__version__, toy.five)"
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": ""}
    python = [sys.executable, "-c", code]
    said = subprocess.run(python, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    return said.stdout.split()


def git(folder, *args):
    who = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_COMMITTER_NAME": "c", "GIT_COMMITTER_EMAIL": "c@example.org"}
    who |= {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org"}
    run = subprocess.run(["git", *map(str, args)], cwd=folder, capture_output=True, text=True, env=os.environ | who)
    assert run.returncode == 0, run.stderr
    return run.stdout


# build


def test_build_is_importable_with_its_version(project):
    tool = [sys.executable, TOOL, "build", "pile", project.dest, "--root", project.root]
    subprocess.run(tool, check=True, cwd=project.folder, env=os.environ | {"FORK_WHEELS": str(project.wheels)})
    assert imported(project.dest) == [str(project.dest / "trl/__init__.py"), "9.9.9", "second"]
    assert not (project.dest / "scripts").exists()  # beside the package in the wheel, not part of it
    assert project.build()[1].endswith("up to date\n")  # bytecode is no edit


def test_record_names_everything_that_went_in(project):
    project.claim("trl/new.py", "new = 1\n")
    project.build()
    record = json.loads((project.dest / "FORK.json").read_text())
    assert (record["line"], record["version"]) == ("pile", "9.9.9")
    assert [entry["name"] for entry in record["patches"]] == ["first.patch", "second.patch"]
    first = (project.root / "pile/first.patch").read_bytes()
    assert record["patches"][0]["sha256"] == hashlib.sha256(first).hexdigest()
    assert record["overlay"] == [{"path": "trl/new.py", "sha256": hashlib.sha256(b"new = 1\n").hexdigest()}]
    assert record["wheel_sha256"] == hashlib.sha256((project.wheels / WHEEL).read_bytes()).hexdigest()


def test_second_build_does_nothing_and_needs_no_wheel(project):
    project.dest.mkdir(parents=True)  # an empty folder is as good as none
    assert project.build()[1].endswith("second.patch: built\n")
    before = project.dest.stat().st_ino
    (project.wheels / WHEEL).unlink()
    start = time.monotonic()
    assert project.build()[:2] == (0, f"{project.dest}: trl 9.9.9, first.patch, second.patch: up to date\n")
    assert project.dest.stat().st_ino == before
    assert time.monotonic() - start < 1


def test_stale_build_is_replaced_whole(project):
    project.build()
    project.patches("pile", other=patch("Other", change("trl/trainer/toy.py", 5, "five = 'other'")))
    assert project.build()[0] == 0
    assert project.toy() == "five = 'other'"
    assert os.listdir(project.dest.parent) == ["build"]


def test_the_tool_starts_without_torch_and_trl():
    """Run from the repository root and as a script, where its own folder and a folder named trl are importable."""
    python = [sys.executable, "-X", "importtime"]
    said = subprocess.run([*python, TOOL, "--help"], cwd=ROOT, capture_output=True, text=True)
    loaded = {row.rpartition("|")[2].strip() for row in said.stderr.splitlines()}
    assert said.returncode == 0 and "tomllib" in loaded and not loaded & {"torch", "trl", "numpy", "transformers"}


@pytest.mark.parametrize("line, option, expected, new", [
    ("pick", "--patches=a", "five = 'a'", True),
    ("pick", "--patches=b.patch", "five = 'b'", False),
    ("pick", "--no-patches", "line5 = 5", False),
    ("pile", "--patches=first", "five = 'first'", True),
    ("pile", "--no-patches", "line5 = 5", False),
    ("pile", "--patches=second,first", "five = 'second'", True),  # applied in the order of the series
])  # fmt: skip
def test_choice_of_patches_and_of_the_files_that_they_claim(project, line, option, expected, new):
    project.claim("trl/extra/new.py", "new = 1\n", "a" if line == "pick" else "first", line)
    project.claim("tests/test_new.py", "", "b" if line == "pick" else "second", line)
    assert project.build(option, line=line)[0] == 0
    assert project.toy() == expected
    assert (project.dest / "trl/extra/new.py").exists() is new
    assert not (project.dest / "tests").exists()  # belongs to the git repository, not to the wheel


@pytest.mark.parametrize("line, options, said", [
    ("pick", [], "pick holds alternatives: pass --no-patches, or --patches with just one of a.patch, b.patch"),
    ("pick", ["--patches=a,b"], "pick holds alternatives"),
    ("pile", ["--patches=first,nope"], "pile has no patch nope.patch: its series is first.patch, second.patch"),
    ("pile", ["--patches="], "pile has no patch"),
    ("pile", ["--patches=first", "--no-patches"], "not allowed with argument"),
    ("nope", [], "unknown line 'nope': the lines are pick, pile"),
])  # fmt: skip
def test_refused_choices(project, line, options, said):
    (problem,) = project.refused("build", line, project.dest, *options)
    assert said in problem
    assert not project.dest.exists()


# wheel


@pytest.fixture
def packed(project):
    """What the packed stack holds: the wheel's path, its version and its files."""

    def pack(folder="dist", *options, line="pile"):
        code, said, problems = project.run("wheel", line, project.folder / folder, *options)
        assert (code, problems) == (0, [])
        (path,) = (project.folder / folder).iterdir()
        version = path.name.split("-")[1]
        assert said.startswith(f"{path}: trl {version}, ")
        with zipfile.ZipFile(path) as archive:
            return path, version, {name: archive.read(name) for name in archive.namelist()}

    return pack


def test_wheel_holds_the_build_under_one_version(project, packed):
    about = "Metadata-Version: 2.1\nName: trl\nVersion: {}\n\nIts text may say\nVersion: 1 as well.\n"
    metadata = {"METADATA": about.format("9.9.9"), "top_level.txt": "scripts\ntrl\n"}
    more = {"trl/data/card.md": "card"} | {f"trl-9.9.9.dist-info/{name}": text for name, text in metadata.items()}
    project.release(UPSTREAM | more)
    project.claim("trl/new.py", "new = 1\n")
    path, version, files = packed()
    project.build()
    record = json.loads((project.dest / "FORK.json").read_text())
    assert version == f"9.9.9+fork.{record['fingerprint'][:7]}" and path.name == f"trl-{version}-py3-none-any.whl"
    assert {name: data for name, data in files.items() if name.startswith("trl/")} == package(project.dest)
    assert files["trl/data/card.md"] == b"card" and files["trl/new.py"] == b"new = 1\n"
    info = {name.split("/")[1]: data.decode() for name, data in files.items() if not name.startswith("trl/")}
    assert info.keys() == {"FORK.json", "METADATA", "RECORD", "WHEEL", "top_level.txt"}
    assert {name.split("/")[0] for name in files} == {"trl", f"trl-{version}.dist-info"}
    assert info["METADATA"] == about.format(version)
    assert (info["top_level.txt"], json.loads(info["FORK.json"])) == ("trl\n", record)


def test_wheel_record_is_what_the_archive_holds(project, packed):
    project.claim("trl/new.txt", "é\n")
    _, version, files = packed()
    *rows, (own, *empty) = csv.reader(files[f"trl-{version}.dist-info/RECORD"].decode().splitlines())
    assert (own, empty) == (f"trl-{version}.dist-info/RECORD", ["", ""])
    assert [row[0] for row in rows] + [own] == list(files)  # every file once, RECORD at the end
    for name, digest, size in rows:
        padded = digest.removeprefix("sha256=") + "="
        assert base64.urlsafe_b64decode(padded) == hashlib.sha256(files[name]).digest()
        assert "=" not in digest.removeprefix("sha256=") and int(size) == len(files[name])


def test_wheel_is_the_same_bytes_every_time(project, packed, monkeypatch):
    first, _, files = packed("one", "--patches=a", line="pick")
    monkeypatch.setattr(time, "time", lambda: 2e9)
    old = os.umask(0o077)
    try:
        second, _, _ = packed("two", "--patches=a", line="pick")
    finally:
        os.umask(old)
    assert (first.name, first.read_bytes()) == (second.name, second.read_bytes())
    with zipfile.ZipFile(first) as archive:
        assert {entry.external_attr >> 16 for entry in archive.infolist()} == {0o100644}
    assert packed("one", "--patches=a", line="pick")[0] == first  # written over, and nothing left beside it
    other, _, others = packed("other", "--patches=b", line="pick")
    said = [found["trl/trainer/toy.py"].splitlines()[4] for found in (files, others)]
    assert said == [b"five = 'a'", b"five = 'b'"] and other.name != first.name
    assert list(files) == sorted(files, key=lambda name: (".dist-info/" in name, ".dist-info/RECORD" in name, name))


def test_wheel_takes_the_place_of_older_ones(project, packed):
    old, _, _ = packed()
    kept = [
        "trl-9.9.9+fork.mine-py3-none-any.whl",
        "trl-9.9.9-py3-none-any.whl",
        "trl-9.9.8+fork.1234567-py3-none-any.whl",
    ]
    for name in kept:
        (old.parent / name).write_text("mine")
    project.patches("pile", first=project.one("other"))  # other content, other label
    code, said, _ = project.run("wheel", "pile", old.parent)
    (new,) = set(os.listdir(old.parent)) - set(kept)
    assert code == 0 and new != old.name and said.strip().endswith(f"; removed {old.name}")
    assert all((old.parent / name).exists() for name in kept)


@pytest.mark.parametrize("digits, label", [
    ("f5ff0e0a", "fork.f5ff0e0"), ("0123456a", "fork.123456"), ("00a2345a", "fork.00a2345"), ("0000000a", "fork.0"),
])  # fmt: skip
def test_the_label_is_what_pip_makes_of_it(digits, label):
    version = pytest.importorskip("packaging.version").Version
    assert fork.fork_version("9.9.9", digits) == f"9.9.9+{label}" == str(version(f"9.9.9+fork.{digits[:7]}"))


def test_wheel_installs(project, packed, tmp_path):
    path, version, files = packed()
    site, pip = tmp_path / "site", [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pytest.skip("this Python has no pip")
    install = [*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", site, path]
    subprocess.run(install, check=True, capture_output=True)
    assert snapshot(site).keys() - files.keys() <= {f"trl-{version}.dist-info/{name}" for name in PIP_ADDS}
    assert imported(site) == [str(site / "trl/__init__.py"), version, "second"]


def test_wheel_that_cannot_be(project, tmp_path):
    (tmp_path / "file").write_text("mine")
    problem = f"{tmp_path}/file is no folder: name the folder to write the wheel into"
    assert project.refused("wheel", "pile", tmp_path / "file") == [problem]
    problem = "pile without patches is the release itself: pip install trl==9.9.9, or name some"
    assert project.refused("wheel", "pile", tmp_path / "new", "--no-patches") == [problem]
    assert "pick holds alternatives" in project.refused("wheel", "pick", tmp_path / "new")[0]
    project.release({name: text for name, text in UPSTREAM.items() if "METADATA" not in name})
    problem = "holds no trl-9.9.9.dist-info/METADATA: correct version and wheel of [pile] in UPSTREAM.toml"
    assert project.refused("wheel", "pile", tmp_path / "new") == [f"{WHEEL} {problem}"]
    assert not (tmp_path / "new").exists() and (tmp_path / "file").read_text() == "mine"


def test_wheel_into_a_folder_with_other_files_even_around_the_sources(project):
    before = snapshot(project.folder)
    assert project.run("wheel", "pile", project.folder)[0] == 0
    after = snapshot(project.folder)
    assert len(after) == len(before) + 1 and before.items() <= after.items()


# where the wheel comes from


@pytest.fixture
def cache(project):
    folder = project.folder / "cache/rloo-memory/wheels"
    folder.mkdir(parents=True)
    return folder


def run_from_cache(project, *options):
    code = fork.main(["build", "pile", str(project.dest), "--root", str(project.root), *options])
    return code, project.capsys.readouterr().err


def test_wrong_hash_names_both_and_is_never_used(project, cache):
    pinned = hashlib.sha256((project.wheels / WHEEL).read_bytes()).hexdigest()
    (cache / WHEEL).write_bytes(b"something else")
    code, said = run_from_cache(project)
    assert code == 2 and said.count("\n") == 1
    assert pinned in said and hashlib.sha256(b"something else").hexdigest() in said and f"{cache / WHEEL}" in said
    assert "delete it" in said and not project.dest.exists()


def test_unobtainable_wheel_names_both_remedies(project, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, said = run_from_cache(project)
    assert code == 2 and said.count("\n") == 1
    assert "network" in said and f"--wheels DIR (or FORK_WHEELS) where DIR holds {WHEEL}" in said
    assert not [path for path in project.folder.joinpath("cache").rglob("*") if path.name != "wheels"][1:]


def test_a_wheel_is_in_the_cache_unless_a_folder_is_named(project, cache):
    (project.wheels / WHEEL).rename(cache / WHEEL)
    (problem,) = project.refused("build", "pile", project.dest)
    assert f"{project.wheels} holds no {WHEEL}" in problem
    assert run_from_cache(project) == (0, "")  # without the option


def test_download_goes_through_pip_into_the_cache(project, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(project.wheels))
    assert run_from_cache(project) == (0, "")
    assert os.listdir(project.folder / "cache/rloo-memory/wheels") == [WHEEL]


# what is at DEST


@pytest.mark.parametrize("name, text", [
    ("thesis.txt", "years of work"), ("FORK.json", "{}"), ("FORK.json", "{"),
])  # fmt: skip
def test_what_is_no_build_is_left_alone_unless_forced(project, name, text):
    (project.dest / name).parent.mkdir(parents=True)
    (project.dest / name).write_text(text)
    (problem,) = project.refused("build", "pile", project.dest)
    assert "no whole build of this tool: name another place, remove it, or pass --force" in problem
    assert snapshot(project.dest) == {name: text.encode()}
    assert project.build("--force")[0] == 0
    assert project.toy() == "five = 'second'"


def test_edited_build_is_no_build(project):
    project.build()
    (project.dest / "trl/trainer/other.py").write_text("other = 2\n")
    (problem,) = project.refused("build", "pile", project.dest)
    assert "edited" in problem and (project.dest / "trl/trainer/other.py").read_text() == "other = 2\n"
    assert project.build("--force")[0] == 0
    assert (project.dest / "trl/trainer/other.py").read_text() == "other = 1\n"


def test_leftover_of_a_killed_build_is_swept(project):
    leftover = project.dest.parent / ".build.fork-new"
    (leftover / "new/trl").mkdir(parents=True)
    other = project.dest.parent / ".elsewhere.fork-new"
    other.mkdir()
    assert project.build()[0] == 0
    assert not leftover.exists() and other.exists()


@pytest.mark.parametrize("command, dest, options", [
    ("build", "trl/x", ["--force"]), ("build", "trl", ["--force"]), ("build", "", ["--force"]),
    ("wheel", "trl", []), ("wheel", "trl/pile/x", []), ("export", "trl/pile", []),
])  # fmt: skip
def test_dest_in_or_around_the_sources(project, command, dest, options):
    before = snapshot(project.root)
    problem = f"{project.folder / dest} would overwrite the fork's sources in {project.root}: name another place"
    assert project.refused(command, "pile", project.folder / dest, *options)[0].startswith(problem)
    assert snapshot(project.root) == before


def test_builds_at_the_same_time_build_once(project):
    said = []
    arguments = (project.root, "pile", project.dest, None, project.wheels)
    threads = [threading.Thread(target=lambda: said.append(fork.build(*arguments))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line.rpartition(" ")[2] for line in said) == ["built", "date", "date", "date"]


# how patches apply


def test_failing_patch_leaves_nothing_and_names_every_hunk_that_fails(project):
    project.build()
    before = snapshot(project.dest)
    other = TOY.replace("line19 = 19", "line19 = 'elsewhere'").replace("line29 = 29", "line29 = 'elsewhere'")
    bad = [change("trl/trainer/toy.py", number, "new = 1", other) for number in (20, 30)]
    good = change("trl/trainer/toy.py", 5, "five = 5")
    missing = change("trl/trainer/gone.py", 5, "five = 5")
    hunks = "".join(diff[diff.index("@@") :] for diff in bad)
    project.patches("pile", first=patch("First", good + hunks, missing), second=patch("Second", bad[0]))
    failed = [
        "pile/first.patch does not apply: trl/trainer/toy.py, the hunk @@ -17 does not match",
        "pile/first.patch does not apply: trl/trainer/toy.py, the hunk @@ -27 does not match",
        "pile/first.patch does not apply: trl/trainer/gone.py: No such file or directory",
    ]
    assert sorted(project.refused("build", "pile", project.dest)) == sorted(failed)
    behind = "pile/second.patch does not apply: trl/trainer/toy.py, the hunk @@ -17 does not match"
    assert sorted(project.refused("check", "pile")) == sorted([*failed, behind])
    assert snapshot(project.dest) == before


@pytest.mark.parametrize("old, new", [("line2 = 2", "line2 = 3"), ("line8 = 8", "line8  =  8")])
def test_fuzz_is_refused(project, monkeypatch, old, new):
    """One line of context differs: at the edge, where `patch` would forgive it, or only in white space, which the user
    has told git to forgive."""
    identity(monkeypatch, project.folder, "[apply]\n\tignoreWhitespace = change\n")
    project.patches("pile", first=patch("First", change("trl/trainer/toy.py", 5, "five = 5", TOY.replace(old, new))))
    (problem,) = project.refused("build", "pile", project.dest)
    assert "trl/trainer/toy.py, the hunk @@ -2 does not match" in problem
    assert project.refused("check", "pile") == [problem]
    assert not project.dest.exists()


@pytest.mark.parametrize("in_hook", [False, True])
def test_inside_an_unrelated_repository(project, monkeypatch, in_hook):
    """There `git apply` skips every path in silence unless it is kept from finding that repository."""
    git(project.folder, "init", "-q")
    if in_hook:
        monkeypatch.setenv("GIT_DIR", str(project.folder / ".git"))
        monkeypatch.setenv("GIT_WORK_TREE", str(project.folder))
    monkeypatch.chdir(project.folder)
    assert project.build()[0] == 0
    assert project.toy() == "five = 'second'"


# check


def test_check_passes_and_counts(project):
    assert project.run("check") == (
        0,
        "pick: 2 patches apply to trl 9.9.9\npile: 2 patches apply to trl 9.9.9\n",
        [],
    )


def drop(field):
    text = patch("First", change("trl/trainer/toy.py", 5, "five = 5"))
    return "".join(row for row in text.splitlines(True) if not row.startswith(field + ":"))


@pytest.mark.parametrize("text, said", [
    (drop("Origin"), "pile/first.patch lacks the DEP-3 field Origin"),
    (drop("Description"), "pile/first.patch lacks the DEP-3 field Description"),
    (drop("Forwarded"), "pile/first.patch lacks the DEP-3 field Forwarded"),
    (drop("Last-Update"), "pile/first.patch lacks the DEP-3 field Last-Update"),
    (Project.one("x").replace("2026-01-31", "31 January"), "pile/first.patch lacks the DEP-3 field Last-Update"),
    (patch("X", change("setup.py", 5, "x")), "pile/first.patch touches 'setup.py', outside trl/, docs/, tests/"),
    (patch("X"), "pile/first.patch holds no diff"),
    (Project.one("x").removesuffix(" line8 = 8\n"), "pile/first.patch does not apply: corrupt patch"),
    (patch("X", change("trl/trainer/toy.py", 5, "x"), extra="Overlay: trl/no.py\n"), "claims trl/no.py, not in"),
    (patch("X", change("trl/trainer/toy.py", 5, "x"), extra="Overlay: setup.py\n"), "touches 'setup.py', outside"),
])  # fmt: skip
def test_check_of_one_bad_patch(project, text, said):
    project.patches("pile", first=text)
    (problem,) = project.refused("check")
    assert said in problem


def test_check_names_unlisted_and_missing(project):
    project.write("pile/stray.patch", Project.one("x"))
    assert project.refused("check") == ["pile/stray.patch is not listed in pile/series"]
    project.write("pile/series", "first.patch\nsecond.patch\ngone.patch  # soon\n")
    (problem,) = project.refused("check")
    assert "No such file" in problem and str(project.root / "pile/gone.patch") in problem


def test_stack_replays_one_after_another_and_alternatives_each_alone(project):
    second = (project.root / "pile/second.patch").read_text()  # fits after the first only
    project.patches("pile", second=second, first=Project.one("first"))
    (problem,) = project.refused("check", "pile")
    assert problem.startswith("pile/second.patch does not apply")
    project.patches("pick", a=Project.one("first"), b=second, c=Project.one("c"))
    (problem,) = project.refused("check", "pick")
    assert problem.startswith("pick/b.patch does not apply")


# overlay


def test_overlay_that_would_overwrite_upstream(project):
    project.claim("trl/trainer/other.py", "mine = 1\n")
    (problem,) = project.refused("build", "pile", project.dest)
    assert problem.endswith("pile/overlay/trl/trainer/other.py would overwrite an upstream file: make it a patch")
    assert project.refused("check", "pile")[0] == problem
    assert not project.dest.exists()


def test_an_overlay_file_belongs_to_just_one_patch(project):
    project.write("pile/overlay/trl/new.py", "new = 1\n")
    none = ["pile/overlay/trl/new.py needs one patch to claim it, has none"]
    assert project.refused("check", "pile") == project.refused("build", "pile", project.dest) == none
    project.claim("trl/new.py", "new = 1\n", "first")
    assert project.run("check", "pile")[0] == 0
    project.claim("trl/new.py", "new = 1\n", "second")
    two = ["pile/overlay/trl/new.py needs one patch to claim it, has first.patch, second.patch"]
    assert project.refused("check", "pile") == project.refused("export", "pile", project.dest) == two


def test_no_patch_may_change_an_overlay_file_not_even_an_earlier_patchs(project):
    """Whoever reads it there reads what runs."""
    first = patch("First", change("trl/trainer/toy.py", 9, "nine = 9"))
    project.patches("pile", first=first, second=patch("Second", change("trl/new.py", 5, "five = 5")))
    project.claim("trl/new.py", TOY)
    assert project.refused("check", "pile") == ["pile/second.patch changes trl/new.py: edit it in overlay/"]


# export


def commit(folder):
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "upstream")


def checkout(folder, *mails):
    """A git repository as upstream's tag has it, with these mails applied: the wheel's package, and what only the
    repository holds."""
    for name, text in (UPSTREAM | IN_GIT_ONLY).items():
        if "dist-info" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    commit(folder)
    git(folder, "am", "-q", *mails)


def package(folder):
    return {name: data for name, data in snapshot(folder).items() if name.startswith("trl/")}


def test_exported_stack_applies_with_git_am(project, tmp_path):
    project.claim("tests/test_extra.py", "def test(): pass\n", "first")
    for name, text in {"__init__": "", "no_newline": "x = 1\n\ny = 2", "words": "word = 'é'\n"}.items():
        project.write(f"pile/overlay/trl/extra/{name}.py", text)
    names = "trl/extra/__init__.py, trl/extra/no_newline.py,\n trl/extra/words.py"
    text = (project.root / "pile/second.patch").read_text()
    project.write("pile/second.patch", text.replace("Origin:", f"Overlay: {names}\nOrigin:"))
    mails = tmp_path / "mails"
    assert project.run("export", "pile", mails) == (0, f"{mails}: 2 patches for git am on v9.9.9\n", [])
    assert sorted(snapshot(mails)) == ["0001-first.patch", "0002-second.patch"]
    repository = tmp_path / "repository"
    checkout(repository, *sorted(mails.iterdir()))
    assert git(repository, "log", "--format=%an <%ae> %ad %s", "--date=iso", "-2").splitlines() == [
        "Ada Löve <ada@example.org> 2026-01-31 00:00:00 +0000 Do the second thing",
        "Ada Löve <ada@example.org> 2026-01-31 00:00:00 +0000 Say first",
    ]
    assert git(repository, "log", "--format=%b", "-1").strip() == "With a body, é and all.\n\nSecond paragraph."
    assert git(repository, "rev-list", "--count", "HEAD").strip() == "3"
    assert git(repository, "status", "--porcelain") == ""
    project.build()
    assert package(repository) == package(project.dest)
    assert (repository / "docs/guide.md").read_text() == "one\nTWO\nthree\n"
    assert (repository / "tests/test_extra.py").read_text() == "def test(): pass\n"
    added = git(repository, "show", "--format=", "--name-only", "--diff-filter=A", "HEAD")
    assert added.split() == [f"trl/extra/{name}.py" for name in ("__init__", "no_newline", "words")]


def identity(monkeypatch, folder, text):
    """Make `text` all that git knows of the user."""
    (folder / "gitconfig").write_text(text)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(folder / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder))


def test_mails_are_from_the_user_of_git(project, tmp_path, monkeypatch):
    nobody = project.one("x").replace("Author: Ada Löve <ada@example.org>\n", "")
    project.patches("pile", first=nobody)
    identity(monkeypatch, tmp_path, "[user]\n\tname = Grace Höpper\n\temail = grace@example.org\n")
    assert project.run("export", "pile", tmp_path / "mails")[0] == 0
    mail = email.message_from_bytes((tmp_path / "mails/0001-first.patch").read_bytes(), policy=email.policy.default)
    assert mail["From"] == "Grace Höpper <grace@example.org>"


@pytest.mark.parametrize("known, said", [
    ("[user]\n\tname = Grace\n", "no email was given"),
    ("[user]\n\temail = grace@example.org\n", "no name was given"),
])  # fmt: skip
def test_mails_without_an_address_for_answers_are_refused(project, tmp_path, monkeypatch, known, said):
    project.patches("pile", first=project.one("x").replace("Author: Ada Löve <ada@example.org>\n", ""))
    identity(monkeypatch, tmp_path, known)
    (problem,) = project.refused("export", "pile", tmp_path / "mails")
    assert said in problem and "git config --global user.email" in problem
    assert not (tmp_path / "mails").exists()


def test_the_author_of_a_patch_needs_an_address(project, tmp_path):
    project.patches("pile", first=project.one("x").replace("<ada@example.org>", "at home"))
    assert "'Ada Löve at home' is not 'Name <email>'" in project.refused("export", "pile", tmp_path / "mails")[0]


@pytest.mark.parametrize("command", ["build", "check", "export"])
def test_without_git_one_line_says_what_to_install(project, tmp_path, monkeypatch, command):
    """What is built needs none."""
    there = ("build", "pile", tmp_path / "there")
    project.run(*there)
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (problem,) = project.refused(command, "pile", *([] if command == "check" else [project.dest]))
    assert problem == "git is not installed or not on PATH: install it, it applies the patches"
    assert not project.dest.exists()
    assert "up to date" in project.run(*there)[1]


def test_exported_alternatives_apply_each_alone(project, tmp_path):
    mails = tmp_path / "mails"
    assert project.run("export", "pick", mails)[0] == 0
    assert sorted(snapshot(mails)) == ["a/0001-a.patch", "b/0001-b.patch"]
    for name in ("a", "b"):
        repository = tmp_path / f"repository-{name}"
        checkout(repository, mails / name / f"0001-{name}.patch")
        project.build("--patches", name, line="pick")
        assert package(repository) == package(project.dest)


def test_a_patch_of_docs_alone_is_exported(project, tmp_path):
    """The wheel has no docs, the checkout has."""
    project.patches("pile", first=patch("Docs", change("docs/guide.md", 2, "TWO", IN_GIT_ONLY["docs/guide.md"])))
    assert project.run("export", "pile", tmp_path / "mails")[0] == 0
    repository = tmp_path / "repository"
    checkout(repository, tmp_path / "mails/0001-first.patch")
    assert (repository / "docs/guide.md").read_text() == "one\nTWO\nthree\n"
    said = git(repository, "log", "--format=%B", "-1").strip()
    assert said == "Docs\n\nWith a body, é and all.\n\nSecond paragraph."


def test_export_twice_gives_the_same_bytes(project, tmp_path):
    project.claim("trl/new.py", "new = 1\n")
    for folder in ("one", "two", "two"):  # the second time over the first
        assert project.run("export", "pile", tmp_path / folder)[0] == 0
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_export_refuses_what_it_must_not_replace_or_cannot_vouch_for(project, tmp_path):
    mails = tmp_path / "mails"
    mails.mkdir()
    (mails / "mine.txt").write_text("mine")
    assert "more than an earlier export" in project.refused("export", "pile", mails)[0]
    project.write("pile/stray.patch", Project.one("x"))
    assert project.refused("export", "pile", tmp_path / "new") == ["pile/stray.patch is not listed in pile/series"]
    assert not (tmp_path / "new").exists()
    project.patches("pick")
    assert "nothing to export" in project.refused("export", "pick", tmp_path / "new")[0]


# UPSTREAM.toml


def test_malformed_and_missing_toml_and_no_command(project):
    text = (project.root / "UPSTREAM.toml").read_text()
    project.write("UPSTREAM.toml", text.replace("[pile]", "[pile"))
    assert "at line 7" in project.refused("check")[0]
    project.write("UPSTREAM.toml", text.replace('version = "9.9.9"', ""))
    assert "missing 1 required positional argument: 'version'" in project.refused("check")[0]
    (project.root / "UPSTREAM.toml").unlink()
    assert f"{project.root}/UPSTREAM.toml" in project.refused("check")[0]
    assert fork.main([]) == 2
    assert "arguments are required" in project.capsys.readouterr().err.splitlines()[0]


# the project's own patches


@pytest.fixture(params=fork.load_lines(ROOT / "trl").values(), ids=lambda line: line.name)
def upstream(request):
    """Each line of the project and its wheel."""
    return request.param, obtain(request.param)


def test_the_projects_own_patches_apply(upstream, capsys):
    assert fork.main(["check", upstream[0].name]) == 0, capsys.readouterr().err


def test_no_file_of_upstream_is_stored_and_none_shadows_it(upstream, tmp_path):
    fork.unpack(upstream[1], tmp_path)
    # An __init__.py may well be the licence header alone, or empty: the same in a new package as upstream
    known = {data for path, data in package(tmp_path).items() if not path.endswith("__init__.py")}
    stored = {f"trl/{name}": path.read_bytes() for name, path in fork.files_below(ROOT / "trl").items()}
    assert not stored.keys() & package(tmp_path).keys() and not known & set(stored.values())


STACKS = [line for line in fork.load_lines(ROOT / "trl").values() if line.mode == "stack"]


@pytest.mark.parametrize("upstream", STACKS, ids=lambda line: line.name, indirect=True)
def test_the_projects_own_series_applies_with_git_am_and_is_what_is_built(upstream, tmp_path, monkeypatch):
    """Without the two files of upstream's docs, which the released wheel does not hold."""
    line, wheel = upstream[0].name, upstream[1]
    identity(monkeypatch, tmp_path, "[user]\n\tname = Grace\n\temail = grace@example.org\n")
    repository, built, mails = tmp_path / "repository", tmp_path / "built", tmp_path / "mails"
    fork.unpack(wheel, repository)
    commit(repository)
    fork.build(ROOT / "trl", line, built, None)
    fork.export(ROOT / "trl", line, mails)
    assert [mail.name for mail in sorted(mails.iterdir())] == list(fork.read_series(upstream[0]))
    for mail in sorted(mails.iterdir()):
        if mail.name.endswith("-docs.patch"):
            assert set(fork.read_patch(ROOT / "trl" / line / mail.name).paths) <= {
                "docs/source/paper_index.md", "docs/source/reducing_memory_usage.md"
            }  # fmt: skip
        else:
            git(repository, "am", "-q", "--exclude=docs/*", mail)
    assert package(repository) == package(built)
    overlay = ROOT / "trl" / line / "overlay/tests"
    assert {path.name: path.read_bytes() for path in (repository / "tests").iterdir()} == {
        path.name: path.read_bytes() for path in overlay.glob("*.py")
    }

"""trl/fork.py in a copy of its folder, inside somebody's repository, where `git apply` would skip every path."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from fork_tool import LINES, ROOT, files, fork, obtain

LEAN = "0003-lean-logits.patch"


class Copy:
    def __init__(self, folder):
        self.folder, self.dest = folder, folder / "out" / "build"
        shutil.copytree(ROOT / "trl", folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["git", "init", "-q", folder], check=True)
        (folder / "gitconfig").write_text("[user]\n\tname = Grace Höpper\n\temail = grace@example.org\n")
        self.environment = {"GIT_CONFIG_GLOBAL": str(folder / "gitconfig")}
        for line in LINES.values():
            self.environment["FORK_WHEELS"] = str(obtain(line).parent)

    def run(self, *words, **environment):
        """Exit code, and the lines that were said."""
        command, here = [sys.executable, self.folder / "trl/fork.py", *words], os.environ | self.environment
        result = subprocess.run(command, env=here | environment, cwd=self.folder, capture_output=True, text=True)
        return result.returncode, (result.stdout + result.stderr).splitlines()

    def edit(self, name, old, new):
        text = (self.folder / "trl" / name).read_text()
        assert old in text
        (self.folder / "trl" / name).write_text(text.replace(old, new, 1))


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


@pytest.mark.parametrize("words, lean, new", [
    (["classic", "--no-patches"], False, False), (["classic", "--patches", "0003-lean-logits"], True, False),
    (["first"], False, True), (["first", "--patches", "0002-prefix-sharing-docs.patch"], False, False),
])  # fmt: skip
def test_a_build_has_the_patches_that_were_asked_for_and_the_files_that_they_claim(copy, words, lean, new):
    command = ["build", words[0], copy.dest, *words[1:]]
    code, (said,) = copy.run(*command)
    assert code == 0 and said.endswith(": built") and os.listdir(copy.dest.parent) == ["build"]
    assert ("batch_generation_with_logprobs" in (copy.dest / "trl/trainer/rloo_trainer.py").read_text()) is lean
    assert (copy.dest / "trl/models/group_packing.py").exists() is new
    assert {path.name.split("-")[0] for path in copy.dest.iterdir()} == {"trl", "FORK.json"}, "no tests, no scripts"
    there = {"PATH": "", "FORK_WHEELS": "/nowhere"}  # what is built needs no git and no wheel
    assert copy.run(*command, **there) == (0, [said.removesuffix("built") + "up to date"])


def test_a_stale_build_is_replaced_and_what_is_no_build_is_left_alone(copy):
    command = ["build", "classic", copy.dest, "--patches", LEAN]
    copy.run(*command)
    copy.edit(f"classic/{LEAN}", "+    batch_generation_with_logprobs,", "+    another_name,")
    assert copy.run(*command)[1][0].endswith(": built")
    assert "another_name" in (copy.dest / "trl/trainer/rloo_trainer.py").read_text()
    code, (said,) = copy.run("build", "first", copy.folder)
    assert code == 1 and said.endswith("is no build of this tool: name another place, or remove it")


@pytest.mark.parametrize("words, environment, said", [
    ("build classic x", {}, "classic holds alternatives: --no-patches, or --patches and one of 0001-string-"),
    ("check", {"FORK_WHEELS": "/nowhere"}, "/nowhere holds no trl-0.21.0-py3-none-any.whl: put it there, or unset"),
    ("check", {"FORK_WHEELS": "", "XDG_CACHE_HOME": "cache", "PIP_NO_INDEX": "1"}, "connect to the network, or set"),
    ("check", {"PATH": ""}, "git is not installed or not on PATH: install it"),
    ("export first x", {"GIT_CONFIG_GLOBAL": os.devnull}, "git config --global user.email"),
])  # fmt: skip
def test_what_a_user_can_meet_is_one_line_with_the_remedy(copy, words, environment, said):
    code, lines = copy.run(*words.split(), **environment)
    assert code == 1 and len(lines) == 1 and lines[0].startswith("fork.py: ") and said in lines[0]
    assert not (copy.folder / "x").exists()


def test_a_wheel_that_is_not_the_pinned_one_is_never_used(copy):
    (copy.folder / LINES["first"].wheel).write_bytes(b"something else")
    code, (said,) = copy.run("build", "first", copy.dest, FORK_WHEELS=str(copy.folder))
    assert code == 1 and f"pinned is {LINES['first'].sha256}: delete it" in said and not copy.dest.exists()


def test_check_tells_what_a_series_leaves_out_and_an_overlay_file_that_no_patch_or_two_claim(copy):
    copy.edit("classic/series", f"{LEAN}\n", "")
    copy.edit("first/0002-prefix-sharing-docs.patch", "Origin:", "Overlay: trl/models/group_packing.py\nOrigin:")
    (copy.folder / "trl/first/overlay/trl/more.py").touch()
    code, (loose, *wrong) = copy.run("check")
    assert code == 1 and loose == f"fork.py: classic/{LEAN} is not listed in classic/series"
    assert all(line.endswith("needs to be there, and one patch to claim it") for line in wrong)
    assert {line.split()[1].rpartition("/")[2] for line in wrong} == {"more.py", "group_packing.py"}


@pytest.mark.parametrize("name, mails", [("current", "*"), ("first", "*"), ("classic", f"{LEAN[:-6]}/*")])
def test_mails_give_with_git_am_what_is_built_and_no_file_of_upstream_is_stored(copy, name, mails):
    """Without two files of upstream's docs, which the released wheel does not hold."""
    choice = ["--patches", LEAN] if name == "classic" else []
    copy.run("build", name, copy.dest, *choice)
    assert copy.run("export", name, "mails")[0] == 0
    written = "".join(path.read_text() for path in (copy.folder / "mails").rglob("*.patch"))
    assert not re.search("filler|placeholder|your.?name|you@|todo", written, re.I)
    upstream, repository = copy.folder / "upstream", copy.folder / "repository"
    fork.unpack(LINES[name], [], upstream)
    shutil.copytree(upstream / "trl", repository / "trl")
    me = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org"]
    mails = [path for path in sorted((copy.folder / "mails").glob(mails)) if not path.name.endswith("-docs.patch")]
    for command in ("init -q", "add .", "commit -qm upstream", "am -q --exclude=docs/*"):
        words = [*me, *command.split(), *(mails if command.startswith("am") else [])]
        subprocess.run(words, cwd=repository, check=True, capture_output=True)
    assert files(repository / "trl") == files(copy.dest / "trl")
    overlay = files(ROOT / "trl" / name / "overlay")
    tests = {f"tests/{path}": data for path, data in files(repository / "tests").items()}
    assert tests == {path: data for path, data in overlay.items() if path.startswith("tests/")}
    assert not files(upstream).keys() & overlay.keys()
    said = subprocess.run([*me, "log", "--format=%an <%ae>%n%B", "-1"], cwd=repository, capture_output=True, text=True)
    author, subject, empty, *_ = said.stdout.splitlines()
    first_lines = mails[-1].read_text()
    assert (author, empty) == ("Grace Höpper <grace@example.org>", "") and subject in first_lines

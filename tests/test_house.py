"""What prose and commands name is there, and no file is too long to read."""

import re
from pathlib import Path

import pytest

from experiments.config import ROOT

LINES = 420
PROSE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "trl/README.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


FOLDERS = ("rloo_memory", "experiments", "visualization", "tests", "trl/*/overlay/trl")
FILES = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/**/*.py"))] + [ROOT / "trl" / "fork.py"]


def test_no_file_is_too_long_to_read():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > LINES}


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_paths_and_commands_in_prose_lead_somewhere(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s:]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link
    if page.parent.name == "trl":
        return  # its paths are upstream's
    text = re.sub(r"\]\([^)]*\)|\S*://\S*", " ", text)
    tops = "rloo_memory|experiments|visualization|tests|trl|docs|results"
    for path in re.findall(rf"(?<![\w/.<>*$}}-])(?:\./)?((?:{tops})/[\w./*-]*|[\w-]+\.sh\b)(?![<{{\w*])", text):
        assert list(ROOT.glob(path.rstrip("./"))), path
    assert {path.name for path in FILES}.issuperset(re.findall(r"`(\w+\.py)`", text))


def test_what_is_installed_names_no_program_that_is_not():
    installed = "\n".join(path.read_text() for path in FILES if path.is_relative_to(ROOT / "rloo_memory"))
    assert not re.findall(r"-m (?:experiments|visualization)\S*", installed)


def test_commands_name_modules_that_can_be_started():
    texts = [path.read_text() for path in (*PROSE, ROOT / "Makefile", *ROOT.glob("*.sh"), *FILES)]
    asked = re.findall(r"-m ((?:rloo_memory|experiments|visualization)(?:\.\w++)*+)(?!\.?\{)", "\n".join(texts))
    for name in set(asked):
        path = ROOT / name.replace(".", "/")
        assert "__main__" in (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text(), name

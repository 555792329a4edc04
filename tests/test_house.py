"""What prose and commands name is there, and no file is too long to read."""

import re
from pathlib import Path

import pytest

from experiments.config import ROOT

LINES = 420
PROSE = [ROOT / "README.md", ROOT / "trl" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def modules() -> dict[str, Path]:
    """Our modules by the name under which they are imported."""
    found = {}
    for folder in (ROOT, *sorted(ROOT.glob("trl/*/overlay"))):
        for top in ("rloo_memory", "experiments", "visualization", "tests") if folder == ROOT else ("trl",):
            for path in sorted((folder / top).rglob("*.py")):
                found[".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()
SOURCES = {name: path.read_text() for name, path in MODULES.items()}


def test_no_file_is_too_long_to_read():
    paths = [*MODULES.values(), ROOT / "trl" / "fork.py"]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
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
    files = {path.name for path in [*MODULES.values(), *ROOT.glob("trl/*.py")]}
    assert files.issuperset(re.findall(r"`(\w+\.py)`", text))


def test_commands_name_modules_that_can_be_started():
    texts = [path.read_text() for path in (*PROSE, ROOT / "Makefile", *ROOT.glob("*.sh"))] + [*SOURCES.values()]
    asked = re.findall(r"-m ((?:rloo_memory|experiments|visualization)(?:\.\w++)*+)(?!\.?\{)", "\n".join(texts))
    code = {name: SOURCES.get(f"{name}.__main__", SOURCES.get(name, "")) for name in asked}
    assert not [name for name, source in code.items() if "__main__" not in source]

"""The house keeps its order: which package may import which, and paths and commands in prose."""

import ast
import re
from pathlib import Path

import pytest

from experiments.config import ROOT

# The fork needs nothing of ours, the wheel nothing of the harness, and charts neither torch nor TRL
MAY_NOT_IMPORT = {
    "trl": {"rloo_memory", "experiments", "visualization", "tests"},
    "rloo_memory": {"experiments", "visualization", "tests"},
    "experiments": {"visualization", "tests"},
    "visualization": {"torch", "trl", "rloo_memory", "tests"},
}
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


def imports(source: str) -> set[str]:
    """Of a module, also inside functions; what is imported relatively is of its own package."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {*names, *(node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level)}


def test_imports_run_from_top_to_bottom():
    for name, source in SOURCES.items():
        forbidden = MAY_NOT_IMPORT.get(name.split(".")[0], set())
        assert not {each for each in imports(source) if each.split(".")[0] in forbidden}, name
        harness = {each for each in imports(source) if each.startswith("experiments")}
        assert not name.startswith("visualization.") or harness <= {"experiments.run_record"}, name


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

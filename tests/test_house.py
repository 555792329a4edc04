"""The house keeps its order: who may import whom, no private names across modules, lengths, and paths in prose."""

import ast
import re
from pathlib import Path

import pytest

from experiments.config import ROOT

# What a room, or a module beside the rooms, may import of its own package. experiments/ may import all of rloo_memory/
PRODUCT = {path.stem for path in (ROOT / "rloo_memory").glob("*.py")} - {"__init__", "__main__"}
SHARED = "prefix_sharing"  # a link to the fork's, which imports nothing of ours
BESIDE = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
MAY_IMPORT = {
    "rloo_memory": {
        "launch": {"launch", "hooks", "plan", "settings", *PRODUCT},
        "hooks": {"hooks", *PRODUCT},
        "plan": {"plan", "settings", SHARED, *PRODUCT},
        "settings": {"settings", *PRODUCT},
        **dict.fromkeys(PRODUCT, {SHARED, *PRODUCT}),
        "__main__": set(),
    },
    "experiments": {
        "checks": {"checks", "workload", *BESIDE},
        "bench": {"bench", "checks", "workload", *BESIDE},
        "fitting": {"fitting", *BESIDE - {"train", "suite"}},
        "workload": {"workload", "config", "arms"},
        "train": {"workload", *BESIDE - {"suite"}},
        "suite": {"workload", *BESIDE},
        **{module: BESIDE - {"train", "suite"} for module in BESIDE - {"train", "suite", "config", "arms", "commit"}},
        "config": {"arms"},
        "arms": set(),
        "commit": set(),
    },
}
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


def imports(name: str) -> list[tuple[str, str]]:
    """(what module `name` imports, the name that it has there), also inside functions."""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.Import):
            found += [(alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []  # `from .x import y`
            start = ".".join([*above, *filter(None, [node.module])])
            found += [(f"{start}.{alias.name}", alias.asname or alias.name) for alias in node.names]
    return found


def may_import(name: str, imported: str) -> bool:
    package, room, *_ = [*name.split("."), "__init__"]
    top, *rest = imported.split(".")
    if package == "visualization":
        return top not in ("torch", "trl", "rloo_memory") and (top != "experiments" or rest[:1] == ["run_record"])
    if top == package and package in MAY_IMPORT:
        return MAY_IMPORT[package].get(room, set()).issuperset(rest[:1])
    return top not in ("visualization", "experiments") and (top != "rloo_memory" or package == "experiments")


def test_imports_run_from_top_to_bottom():
    for package, rules in MAY_IMPORT.items():
        rooms = {name.split(".")[1] for name in MODULES if name.startswith(f"{package}.")}
        assert rooms == rules.keys(), "a room without a rule, or a rule without a room"
    checked = [name for name in MODULES if "." in name and not name.startswith("tests.")]
    assert not [(name, each) for name in checked for each, _ in imports(name) if not may_import(name, each)]


def test_no_module_uses_the_private_names_of_another():
    wrong = []
    for name, source in SOURCES.items():
        ours = {here: full for full, here in imports(name) if full in MODULES}
        used = [full for full, _ in imports(name) if full not in MODULES and full.rpartition(".")[0] in MODULES]
        for node in ast.walk(ast.parse(source)):
            private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
            if private and ast.unparse(node.value) in ours:
                used.append(f"{ours[ast.unparse(node.value)]}.{node.attr}")
        wrong += [(name, each) for each in used if re.search(r"\._(?!\w*__$)\w*$", each)]
    assert not wrong


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

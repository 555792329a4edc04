"""The house keeps its order: who may import whom, no private names across modules, names, lengths, and paths in prose.

Imports are read from the sources, also those inside functions. Nothing but one small process runs."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from experiments.config import ROOT

# What a room, or a module beside the rooms, may import of its own package. experiments/ may import all of rloo_memory/
PRODUCT = {path.stem for path in (ROOT / "rloo_memory").glob("*.py")} - {"__init__", "__main__"}
BESIDE = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
MAY_IMPORT = {
    "rloo_memory": {
        "launch": {"launch", "hooks", "plan", "settings", *PRODUCT},
        "hooks": {"hooks", *PRODUCT},
        "plan": {"plan", "settings", *PRODUCT},
        "settings": {"settings", *PRODUCT},
        **dict.fromkeys(PRODUCT, PRODUCT),
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
# Rooms of the planner from the ground up: none imports a later one, nor a module beside them but what is asked
FLOORS = ("simulation", "scale_up", "accuracy")
ASKED = {"setups", "checkpoint", "images", "peaks", "engine", "options"}
LINES = 420
LONGER = {  # -> why
    "trl/fork.py": "runs before anything is installed",
    "tests/test_fork.py": "a table of damaged inputs",
    "tests/test_launch.py": "tables of bad input",
    "tests/test_memory_monitor.py": "one process under many conditions",
}
STARTS_FAST = (  # before the sampler's first sample, the budget, or the word on what is missing
    "memory_monitor", "config", "record", "suite", "train", "checks.exactness", "checks.model_families",
    "checks.planner_check", "checks.kernels", "checks.device_facts", "bench.__main__", "bench.on_gpu",
    "bench.step_profile",
)  # fmt: skip
HEAVY = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy", "pandas", "matplotlib")


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


def imports(name: str, source: str) -> list[tuple[int, str, str, str]]:
    """Every import of module `name`: (line, what is imported, the name it has here, what that name stands for)."""
    package = name.split(".") if is_room(name) else name.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                here = alias.asname or alias.name.split(".")[0]
                found.append((node.lineno, alias.name, here, alias.name if alias.asname else here))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []  # `from .x import y`
            for alias in node.names:
                full = ".".join([*above, *filter(None, [node.module]), alias.name])
                found.append((node.lineno, full, alias.asname or alias.name, full))
    return found


def wrong_arrows(name: str, source: str) -> list[str]:
    package, room, *_ = [*name.split("."), "__init__"]
    wrong = []
    for line, full, _, _ in imports(name, source):
        top, *rest = full.split(".")
        if package == "visualization":
            bad = top in ("torch", "trl", "rloo_memory") or top == "experiments" and rest[:1] != ["run_record"]
        elif top == package and package in MAY_IMPORT:
            bad = not MAY_IMPORT[package].get(room, set()).issuperset(rest[:1])
        else:
            bad = top == "visualization" or top == "experiments" or top == "rloo_memory" and package != "experiments"
        if bad:
            wrong.append(f"{name}, line {line}: imports {full}")
    return wrong


def private_names(name: str, source: str) -> list[str]:
    """Private names of other modules of ours that this one imports, reads, or sets by its name."""
    wrong, stands_for = [], {}
    for line, full, here, bound in imports(name, source):
        stands_for[here] = bound
        module, _, member = full.rpartition(".")
        if module in MODULES and is_private(member) and full not in MODULES:
            wrong.append(f"{name}, line {line}: {member} of {module}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            of, member = node.value, node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            of, member = node.args[0], str(node.args[1].value)  # getattr, monkeypatch.setattr
        else:
            continue
        first, *rest = ast.unparse(of).split(".")
        module = ".".join([stands_for.get(first, ""), *rest])
        if module in MODULES and module != name and is_private(member):
            wrong.append(f"{name}, line {node.lineno}: {member} of {module}")
    return wrong


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def missing_modules(text: str) -> list[str]:
    """Modules of ours that a command in `text` starts and that are not there, or do nothing when started."""
    asked = re.findall(r"-m ((?:rloo_memory|experiments|visualization)(?:\.\w++)*+)(?!\.?\{)", text)
    return sorted({name for name in asked if "__main__" not in SOURCES.get(f"{name}.__main__", SOURCES.get(name, ""))})


def is_room(name: str) -> bool:
    return name in MODULES and MODULES[name].name == "__init__.py"


def missing_paths(text: str, folder: Path) -> list[str]:
    """Links, relative to `folder`, paths from the root, and names of Python files, of `text` that lead nowhere. A `*`
    stands for some."""
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    text = re.sub(r"\]\([^)]*\)|\S*://\S*", " ", text)
    tops = "rloo_memory|experiments|visualization|tests|trl|docs|results"
    paths = re.findall(rf"(?<![\w/.<>*$}}-])(?:\./)?((?:{tops})/[\w./*-]*|[\w-]+\.sh\b)(?![<{{\w*])", text)
    gone = [link for link in links if link and not (folder / link).exists()]
    gone += [path for path in paths if not list(ROOT.glob(path.rstrip("./")))]
    files = {path.name for path in MODULES.values()} | {"fork.py"}
    return sorted({*gone, *(name for name in re.findall(r"`(\w+\.py)`", text) if name not in files)})


def test_imports_run_from_top_to_bottom():
    for package, rules in MAY_IMPORT.items():
        rooms = {name.split(".")[1] for name in MODULES if name.startswith(f"{package}.")}
        assert rooms == rules.keys(), "a room without a rule, or a rule without a room"
    checked = {name: source for name, source in SOURCES.items() if "." in name and not name.startswith("tests.")}
    wrong = [line for name, source in checked.items() for line in wrong_arrows(name, source)]
    assert not wrong, "\n".join(wrong)


def test_the_planner_is_built_in_floors():
    wrong = []
    for floor, room in enumerate(FLOORS):
        below = {*FLOORS[: floor + 1], *ASKED}
        for name in (name for name in MODULES if name.startswith(f"rloo_memory.plan.{room}.")):
            for line, full, _, _ in imports(name, SOURCES[name]):
                if full.startswith("rloo_memory.plan.") and full.split(".")[2] not in below:
                    wrong.append(f"{name}, line {line}: imports {full}")
    assert not wrong, "\n".join(wrong)


def test_no_module_uses_the_private_names_of_another():
    wrong = [line for name, source in SOURCES.items() for line in private_names(name, source)]
    assert not wrong, "\n".join(wrong)


def test_no_two_rooms_have_a_module_of_the_same_name():
    rooms = defaultdict(set)
    for name, path in MODULES.items():
        if name.startswith(("rloo_memory.", "experiments.", "visualization.")) and path.name != "__main__.py":
            room, _, module = name.rpartition(".")
            rooms[module].add(room)
    rooms["plan"] -= {"visualization.charts"}  # draws what rloo_memory.plan predicts
    assert not {module: sorted(places) for module, places in rooms.items() if len(places) > 1}


def test_no_file_is_too_long_to_read():
    paths = [*MODULES.values(), ROOT / "trl" / "fork.py"]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    too_long = {name: length for name, length in lengths.items() if length > LINES}
    assert not {name: length for name, length in too_long.items() if name not in LONGER}
    assert LONGER.keys() <= too_long.keys(), "the list names a file that is not that long, or gone"


def test_what_must_start_fast_imports_nothing_heavy():
    script = f"import sys, {', '.join('experiments.' + name for name in STARTS_FAST)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert loaded.returncode == 0, loaded.stderr
    assert "experiments.suite" in loaded.stdout.split() and not set(HEAVY) & set(loaded.stdout.split())


PROSE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [*PROSE, ROOT / "Makefile", *sorted(ROOT.glob("*.sh"))]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_paths_in_prose_are_there(path):
    assert not missing_paths(path.read_text(), path.parent)


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("path", [*PROSE, ROOT / "trl" / "README.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings_that_are_there(path):
    links = [link.split("#") for link in re.findall(r"\]\(([^)\s:]+#[^)\s]+)\)", path.read_text())]
    pages = {(path.parent / file if file else path).resolve(): file for file, _ in links}
    known = {page: headings(page) for page in pages if page.suffix == ".md"}
    assert not [
        f"{file}#{anchor}"
        for file, anchor in links
        if anchor not in known.get((path.parent / file if file else path).resolve(), {anchor})
    ]


def test_commands_name_modules_that_can_be_started():
    texts = {path.name: path.read_text() for path in COMMANDS} | SOURCES
    del texts["tests.test_house"]  # names made-up ones below
    assert not {name: missing for name, text in texts.items() if (missing := missing_modules(text))}


@pytest.mark.parametrize(
    "rule, name, source",
    [
        (wrong_arrows, "rloo_memory.plan.doctor", "from rloo_memory.launch import inputs"),
        (wrong_arrows, "rloo_memory.plan.doctor", "def f():\n    import experiments.checks.kernels"),
        (wrong_arrows, "rloo_memory.plan.doctor", "from visualization.plan import draw"),
        (wrong_arrows, "visualization.load", "import torch.nn"),
        (wrong_arrows, "visualization.load", "from rloo_memory import models"),
        (wrong_arrows, "trl.models.prefix_sharing", "import experiments"),
        (wrong_arrows, "rloo_memory.settings.profiles", "from ..plan import predict"),
        (private_names, "tests.x", "from experiments.record import _x"),
        (private_names, "tests.x", "from experiments import record as r\nr._x"),
        (private_names, "tests.x", "import experiments.record\nexperiments.record._x()"),
        (private_names, "tests.x", "import experiments.record as r\nmonkeypatch.setattr(r, '_x', 1)"),
        (private_names, "trl.models.other", "from trl.models.prefix_sharing import _x"),
        (private_names, "trl.models.prefix_sharing", "from ..models.prefix_sharing import _x"),
    ],
)
def test_each_rule_finds_what_breaks_it(rule, name, source):
    assert len(rule(name, source)) == 1


def test_each_rule_leaves_alone_what_keeps_it():
    assert not wrong_arrows("experiments.checks.kernels", "from rloo_memory.launch import inputs\nimport torch")
    assert not wrong_arrows("experiments.train", "def f():\n    from experiments.workload import data")
    assert not private_names("tests.x", "from torch.utils._pytree import tree_map\nself._x\nrecord._x")
    assert not private_names("experiments.record", "def f():\n    return _x")


def test_paths_that_lead_nowhere_are_found():
    text = "[a](gone.md) [b](docs/log.md#x) `experiments/gone.py` ./gone.sh results/<your machine>/ tests/probes/s*.py"
    assert missing_paths(text + "`nowhere.py`, `config.py`", ROOT) == [
        "experiments/gone.py", "gone.md", "gone.sh", "nowhere.py"
    ]  # fmt: skip
    text = "python -m experiments.gone; -m experiments.suite; -m rloo_memory.hooks; -m rloo_memory.plan, -m pytest"
    assert missing_modules(text + "-m rloo_memory.phases") == [
        "experiments.gone", "rloo_memory.hooks", "rloo_memory.phases"
    ]  # fmt: skip

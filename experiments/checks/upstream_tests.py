"""TRL's own RLOO and GRPO tests on TRL as released: untouched, and with `share_prompts` called before each training.

    git clone https://github.com/huggingface/trl TRL
    python -m experiments.checks.upstream_tests TRL

Models, tokenizers and prompts that the tests take from the Hugging Face Hub are made here, tiny and random, so nothing
is downloaded. A test that fails untouched needs a GPU, a processor for images, or another release: it says nothing
about sharing, and is not run with it. Writes results/<machine>/upstream_tests.csv, a row a test. Exit code 4 if a test
that passes untouched fails with shared prompts in another way than by a refusal.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from experiments.arms import ARMS
from experiments.builds import build
from experiments.checks.tiny_families import tiny_config
from experiments.config import ROOT
from experiments.measuring import EXIT_VERDICT, FACTS, Place, need, place
from experiments.processes import end_with
from experiments.record import write_csv
from experiments.run_options import Parser
from rloo_memory.errors import ConfigError, program
from rloo_memory.models import build_tokenizer

FILES = ("test_rloo_trainer.py", "test_grpo_trainer.py")
COLUMNS = ("test", "untouched", "called", "reason", "tests_commit", *FACTS)
VOCAB = 300  # all bytes and some words
ON_THE_HUB = re.compile(r'"trl-internal-testing/(tiny-(\w+?For\w+)[\w.-]*)"')
PROMPTS = ["The sky is blue", "What is better than ugly?", "A sea of green", "Say one more word, and then", "Why"] * 4
# The tests may be of another day than the release: what they ask it for and it does not have is not installed
OTHER_RELEASE = """
import importlib
import re
from pathlib import Path

here = importlib.import_module("trl.import_utils")
for name in re.findall(r"\\bis_\\w+_available\\b", Path("tests/testing_utils.py").read_text()):
    if not hasattr(here, name):
        setattr(here, name, lambda *args: False)
"""
CALLED = """
from rloo_memory import share_prompts
from trl import GRPOTrainer, RLOOTrainer


def called(own):
    def train(self, *args, **kwargs):
        share_prompts(self)
        return own(self, *args, **kwargs)

    return train


for trainer in (GRPOTrainer, RLOOTrainer):
    trainer.train = called(trainer.train)
"""


def make_models(folder: Path, tests: str) -> None:
    """What the tests take from the hub by name, of text: an image's processor cannot be made of nothing."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for name, class_name in dict(ON_THE_HUB.findall(tests)).items():
        model_class = getattr(transformers, class_name, None)
        if model_class is None or "Conditional" in class_name:
            continue
        config = tiny_config(model_class.config_class, vocab_size=VOCAB)
        if "SequenceClassification" in class_name:
            config.num_labels = 1
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder / name)
        build_tokenizer(PROMPTS, VOCAB).save_pretrained(folder / name)


def make_prompts(folder: Path) -> None:
    """The prompts of `trl-internal-testing/zen`, as text and as chats."""
    page = "---\nconfigs:\n"
    for name in ("standard_prompt_only", "conversational_prompt_only"):
        page += f"- config_name: {name}\n  data_files:\n"
        (folder / name).mkdir(parents=True)
        prompts = PROMPTS if name.startswith("standard") else [[{"role": "user", "content": x}] for x in PROMPTS]
        for split, rows in (("train", prompts[:17]), ("test", prompts[17:])):
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps({"prompt": x}) + "\n" for x in rows))
            page += f"  - split: {split}\n    path: {name}/{split}.jsonl\n"
    (folder / "README.md").write_text(f"{page}---\n")


def outcomes(folder: Path, tree: Path, tests: list[str], *options: str) -> dict[str, tuple[str, str]]:
    """(passed, failed or skipped; why) of each of pytest's `tests`, by name, with the TRL in `tree`. Raises
    `ConfigError`."""
    report = folder / "report.xml"
    print("with", tree, *options, flush=True)
    words = "-P -m pytest -q -p no:cacheprovider -p other_release -W ignore -n 2 --dist worksteal".split()
    command = [sys.executable, *words, f"--junitxml={report}", *options, *tests]
    paths = os.pathsep.join(map(str, (tree, folder, ROOT)))
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    dies = partial(end_with, os.getpid())
    done = subprocess.run(command, cwd=folder, env=environment, preexec_fn=dies, capture_output=True, text=True)
    if done.returncode not in (0, 1) or "error during collection" in done.stdout:  # else all passed, or some failed
        said = " ".join((done.stdout + done.stderr).split())[-300:]
        raise ConfigError(f"pytest ended with exit code {done.returncode} with the TRL in {tree}: {said}")
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname').removeprefix('tests.')}.{case.get('name')}"
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        found[name] = outcome, "" if problem is None else " ".join(problem.get("message", "").split())
    return found


def as_argument(test: str) -> str:
    """`test_file.Class.test[a.b]`, as reports call a test, for pytest."""
    path, bracket, case = test.partition("[")
    file, *names = path.split(".")
    return f"tests/{file}.py::{'::'.join(names)}{bracket}{case}"


def compared(clone: Path, here: Place) -> list[dict]:
    """A row a test."""
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    tests = "".join((clone / "tests" / file).read_text() for file in FILES)
    with tempfile.TemporaryDirectory(prefix="upstream_tests_") as scratch:
        folder = Path(scratch)
        shutil.copytree(clone / "tests", folder / "tests")  # in the clone, its own trl would be imported
        make_models(folder / "trl-internal-testing", tests)
        make_prompts(folder / "trl-internal-testing" / "zen")
        (folder / "other_release.py").write_text(OTHER_RELEASE)
        (folder / "called.py").write_text(CALLED)
        released = build(ARMS["stock"])
        untouched = outcomes(folder, released, [f"tests/{file}" for file in FILES])
        passing = [as_argument(test) for test, (outcome, _) in untouched.items() if outcome == "passed"]
        called = outcomes(folder, released, passing, "-p", "called")
    rows = []
    for test, (outcome, why) in untouched.items():
        with_sharing, why_not = called.get(test, ("missing" if outcome == "passed" else "", ""))
        row = {"test": test, "untouched": outcome, "called": with_sharing, "tests_commit": commit.stdout.strip()}
        rows.append(row | {"reason": (why_not if outcome == "passed" else why)[:200], **here.facts})
    return rows


def is_wrong(row: dict) -> bool:
    """Whether a test that passes untouched fails here, and not by a refusal of prefix sharing."""
    refused = row["reason"].startswith(("ValueError: ", "ImportError: ")) and "prefix_sharing" in row["reason"]
    return row["untouched"] == "passed" and row["called"] != "passed" and not refused


@program("upstream_tests")
def main(argv: list[str] | None) -> int:
    parser = Parser("checks.upstream_tests", __doc__)
    parser.add_argument("clone", type=Path, help="a clone of TRL's repository")
    args = parser.parse_args(argv)
    if missing := [file for file in FILES if not (args.clone / "tests" / file).is_file()]:
        raise ConfigError(
            f"{args.clone} has no tests/{missing[0]}; name a clone of https://github.com/huggingface/trl"
        )
    need("pytest", "xdist")
    here = place(args)
    rows = compared(args.clone, here)
    path = here.folder / "upstream_tests.csv"
    write_csv(path, COLUMNS, rows)
    passing = [row for row in rows if row["untouched"] == "passed"]
    wrong = [row for row in rows if is_wrong(row)]
    shared = sum(row["called"] == "passed" for row in passing)
    print(f"{len(rows)} tests, {len(passing)} pass untouched; of these {shared} with share_prompts")
    for row in wrong:
        print(f"wrong: {row['test']}: {row['called']}: {row['reason']}")
    print(path)
    return EXIT_VERDICT if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""docs/models.md holds what the check of model families finds, and the check finds what is not exact."""

import re
import subprocess
import sys
import textwrap

import pytest

from experiments.checks import model_families
from experiments.checks.family_check import REFUSED, SHARED, UNTRIED
from experiments.config import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text()
# Heading -> the classes, or model types, under it
SECTIONS = {
    part.partition("\n")[0]: set(re.findall(r"`([\w-]+)`", re.sub(r"\([^)]*\)", "", part)))
    for part in PAGE.split("\n## ")[1:]
}
HEADING = {SHARED: "Shared", REFUSED: "Refused", UNTRIED: "Not tried"}


def survey(*arguments, before=""):
    """The command in a process of its own, with code run before it."""
    code = f"""
import sys
from experiments.checks import model_families
{textwrap.dedent(before)}
sys.exit(model_families.main({list(arguments)!r}))
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_each_name_of_both_mappings_is_on_the_page():
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    named = set().union(*SECTIONS.values())
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        assert not {(name, model) for name, model in mapping.items() if not {name, model} & named}


def test_no_model_on_the_page_is_shared_otherwise_than_exactly():
    counts = re.search(r"\n(\d+) share prompts exactly, \d+ are refused, \d+ could not be tried, \d+ are none", PAGE)
    assert counts and int(counts[1]) >= 80 and "WRONG" not in PAGE and "FAILS" not in PAGE


def table(result):
    """Without the last line, which counts the rows."""
    return [line.split(" | ") for line in result.stdout.splitlines() if " | " in line]


def verdicts(names):
    """What is found of each class that these families or classes have."""
    result = survey("--only", names)
    assert result.returncode == 0, result.stderr
    return {class_name.strip("`"): text for _, class_name, text, *_ in table(result)}


@pytest.mark.slow
def test_a_fifteenth_of_the_page_comes_out_again():
    """`make evidence` makes all of it."""
    names = sorted(name for heading in HEADING.values() for name in SECTIONS[heading] if name[0].isupper())[::15]
    found = verdicts(",".join(names))
    assert len(found) > 12 and found.keys() == set(names)
    assert all(name in SECTIONS[HEADING[text.split(":")[0]]] for name, text in found.items()), found


# Windows of 10 tokens are longer than the rows on which `enable_prefix_sharing` tries a model: what it cannot see.
# Each family is checked in a process of its own, which starts from what was broken here
BREAK = """
from unittest import mock

model_families.load()
from rloo_memory.prefix_sharing import cache as prefix_cache
from rloo_memory.prefix_sharing import routing

append = prefix_cache._SharedPrefixLayer.append
ignore_windows = lambda *args: None
lose_generated_values = lambda self, key, value: append(self, key, 0 * value)
for owner, name, broken in (
    (routing, "layer_window", ignore_windows),
    (prefix_cache._SharedPrefixLayer, "append", lose_generated_values),
):
    with mock.patch.object(owner, name, broken):
        assert model_families.main(["--only", "MistralForCausalLM"]) == 1
"""


@pytest.mark.slow
def test_what_is_not_exact_is_said_and_fails_the_command():
    result = survey("--only", "MistralForCausalLM", before=BREAK)
    assert result.returncode == 0, result.stderr
    windows, values, whole = (line for line in result.stdout.splitlines() if " | " in line)
    assert "| WRONG |" in windows and "| DIFFERS" in values and "| shared |" in whole
    assert result.stderr.count("not exact: MistralForCausalLM") == 2


def test_an_unknown_family_is_named(capsys):
    assert model_families.main(["--only", "lama"]) == 2 and "llama" in capsys.readouterr().err
    assert model_families.main(["--only", "llama", "--write", "x.md"]) == 2

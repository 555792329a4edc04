"""docs/models.md holds what the check of model families finds, and the check finds what is not exact."""

import re

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

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


def test_each_name_of_both_mappings_is_on_the_page():
    named = set().union(*SECTIONS.values())
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        assert not {(name, model) for name, model in mapping.items() if not {name, model} & named}


def test_no_model_on_the_page_is_shared_otherwise_than_exactly():
    counts = re.search(r"\n(\d+) share prompts exactly, \d+ are refused, \d+ could not be tried, \d+ are none", PAGE)
    assert counts and int(counts[1]) >= 80 and "WRONG" not in PAGE and "FAILS" not in PAGE


@pytest.mark.slow
def test_a_fifteenth_of_the_page_comes_out_again(forked):
    """`make evidence` makes all of it."""
    names = sorted(name for heading in HEADING.values() for name in SECTIONS[heading] if name[0].isupper())[::15]
    result = forked("experiments.checks.model_families", "--only", ",".join(names))
    assert result.returncode == 0, result.stderr
    rows = [line.split(" | ") for line in result.stdout.splitlines() if " | " in line]  # the last line counts them
    found = {class_name.strip("`"): text for _, class_name, text, *_ in rows}
    assert len(found) > 12 and found.keys() == set(names)
    assert all(name in SECTIONS[HEADING[text.split(":")[0]]] for name, text in found.items()), found


@pytest.mark.slow
def test_what_is_not_exact_is_said_and_fails_the_command(forked):
    result = forked("broken_sharing")
    assert result.returncode == 0, result.stderr
    windows, values, whole = (line for line in result.stdout.splitlines() if " | " in line)
    assert "| WRONG |" in windows and "| DIFFERS" in values and "| shared |" in whole
    assert result.stderr.count("not exact: MistralForCausalLM") == 2


def test_an_unknown_family_is_named(capsys):
    assert model_families.main(["--only", "lama"]) == 2 and "llama" in capsys.readouterr().err
    assert model_families.main(["--only", "llama", "--write", "x.md"]) == 2

"""docs/models.md holds what the check of model families finds, and the check finds what is not exact."""

import subprocess
import sys
import textwrap

import pytest

from experiments.checks import model_families
from experiments.checks.family_check import OTHER
from experiments.config import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text()
# Row: (names, class) -> (verdict with its reason, decoding). Errors are left out: their last digit may move
ROWS = {
    (names, class_name.strip("`")): (text, decoding)
    for names, class_name, text, _, _, decoding, _ in (
        map(str.strip, line.strip("|").split("|")) for line in PAGE.splitlines() if line.startswith("| ")
    )
    if names != "family"
}
NOT_TRAINED = PAGE.split("## Not trained", 1)[1]


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


def verdicts(output: str) -> dict:
    """What the command printed, as `ROWS` has it."""
    found = {}
    for line in output.splitlines():
        names, class_name, text, *rest = line.split(" | ")
        found[names, class_name.strip("`")] = (text, rest[2] if len(rest) > 2 else "")
    return found


def test_no_model_on_the_page_is_shared_otherwise_than_exactly():
    texts = {text.split(":")[0] for text, _ in ROWS.values()}
    assert texts == {"shared", "refused", "not tried"}
    assert {decoding for text, decoding in ROWS.values() if text == "shared"} <= {"same", "as without a cache"}
    assert sum(text == "shared" for text, _ in ROWS.values()) >= 80


@pytest.mark.sample
@pytest.mark.torch
def test_rows_of_the_page_come_out_again():
    result = survey("--only", "qwen3,gemma3_text,gpt_oss,deepseek_v3,olmo_hybrid,bloom,llava,bert")
    assert result.returncode == 0, result.stderr
    found = verdicts(result.stdout)
    assert found.pop(("bert", "BertLMHeadModel"))[0] == f"{OTHER}: attention to later tokens"
    assert len(found) == 7 and found == {key: ROWS[key] for key in found}


@pytest.mark.slow
@pytest.mark.torch
def test_the_whole_page_comes_out_again(tmp_path):
    result = survey("--write", str(tmp_path / "models.md"))
    assert result.returncode == 0, result.stderr
    found = {key: value for key, value in verdicts(result.stdout).items() if not value[0].startswith(OTHER)}
    assert found == ROWS
    page = (tmp_path / "models.md").read_text()
    assert page.split("## Not trained", 1)[1] == NOT_TRAINED


# Windows of 10 tokens are longer than the rows on which `enable_prefix_sharing` tries a model: what it cannot see.
# Each family is checked in a process of its own, which starts from what was broken here
BREAK = """
from unittest import mock

model_families.load()
from trl.generation import shared_prefix_cache
from trl.models import prefix_sharing_contexts

append, allowed = shared_prefix_cache._SharedPrefixLayer.append, prefix_sharing_contexts.ReadPrefix.allowed
ignore_windows = lambda self, mask_function: allowed(self, lambda batch, head, q, k: k <= q)
lose_generated_values = lambda self, key, value: append(self, key, 0 * value)
for owner, name, broken in (
    (prefix_sharing_contexts.ReadPrefix, "allowed", ignore_windows),
    (shared_prefix_cache._SharedPrefixLayer, "append", lose_generated_values),
):
    with mock.patch.object(owner, name, broken):
        assert model_families.main(["--only", "MistralForCausalLM"]) == 1
"""


@pytest.mark.slow
@pytest.mark.torch
def test_what_is_not_exact_is_said_and_fails_the_command():
    result = survey("--only", "MistralForCausalLM", before=BREAK)
    assert result.returncode == 0, result.stderr
    windows, values, whole = result.stdout.splitlines()
    assert "| WRONG |" in windows and "| DIFFERS" in values and "| shared |" in whole
    assert result.stderr.count("not exact: MistralForCausalLM") == 2


@pytest.mark.torch
def test_an_unknown_family_is_named(capsys):
    assert model_families.main(["--only", "lama"]) == 2 and "llama" in capsys.readouterr().err
    assert model_families.main(["--only", "llama", "--write", "x.md"]) == 2

"""trl/first: the first pull request. What is tried of every series: test_fork.py, test_patches_own_tests.py."""

from dataclasses import dataclass, replace

import torch
from fork_tool import LINES, fork
from kinds import ATTENTION, kind

from experiments.bench.rivals import first_series
from experiments.checks.family_check import PROMPT, error_of, in_float64, prepared, run
from experiments.checks.tiny_families import build
from rloo_memory.prefix_sharing.passes import PassesOutput

LINE = LINES["first"]


# Those whose checkpoints, as a rule, have no window as tiny ones do: alone, and with images
WITHOUT_WINDOWS = ("qwen3", "qwen3_moe", "mixtral", "phi3", "phi3 longrope", "smollm3", "starcoder2", "ministral3")
WITHOUT_WINDOWS_IN_TEXT = ("qwen2_vl", "qwen2_5_vl", "internvl")
FULL = {
    "sliding_window": None,
    "use_sliding_window": False,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention"] * 3,
}


def as_usual(name):
    usual = kind(name)
    if name in WITHOUT_WINDOWS:
        return replace(usual, more=usual.more | FULL)
    if name in WITHOUT_WINDOWS_IN_TEXT:
        return replace(usual, more={"text_config": FULL})
    return usual


@dataclass(frozen=True)
class Packed:
    """One row of the prompt and all its completions, for the LM head that takes passes."""

    prefix_length: int = PROMPT

    def forward(self, backbone, input_ids, attention_mask, output_router_logits=False):
        sizes = {"prefix_length": self.prefix_length, "use_cache": False}
        output = first_series().shared_forward(backbone, input_ids, attention_mask, **sizes)
        return PassesOutput(output.last_hidden_state)


def test_an_architecture_is_refused_in_one_line_or_exact():
    """In float64, with checkpointing and without: log-probabilities, entropies and gradients."""
    refused, errors = {}, {}
    with in_float64():
        for name in ATTENTION:
            model = prepared(build(as_usual(name)), torch.float64)
            try:
                first_series().check_prefix_sharing(model)
            except ValueError as problem:
                refused[name] = str(problem)
                continue
            truth, errors[name] = run(model), []
            for checkpointing in (False, True):
                if checkpointing:
                    model.gradient_checkpointing_enable()
                errors[name] += error_of(run(model, passes=Packed()), truth)
    assert {name: worst for name, worst in errors.items() if not max(worst) <= 1e-12} == {}
    assert (len(errors), len(refused)) == (22, 12), "as trl/README.md says"
    assert errors.keys() >= {"llama", "gpt_neox"} and refused.keys() >= {"qwen2", "gpt_oss"}
    for name, words in refused.items():
        assert words.startswith("`prefix_sharing=True` does not support ") and "\n" not in words, (name, words)


def test_it_stays_short():
    """Lines that somebody has to read: those added to upstream's files, the module, and what tests it."""
    rows = [row for patch in fork.read_patches(LINE) for row in patch.diff.splitlines()]
    added = sum(row.startswith("+") and not row.startswith("+++") for row in rows)
    new = sum(len(path.read_text().splitlines()) for path in (LINE.folder / "overlay").rglob("*.py"))
    assert added + new <= 550

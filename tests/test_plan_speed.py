"""How many times faster the planner says that sharing is."""

import re

import pandas
import pytest
import torch

from experiments.checks import speed_check
from rloo_memory.models import named_config
from rloo_memory.plan.predict import predict_all
from rloo_memory.plan.setups import Setup
from rloo_memory.plan.simulation.work import attention_flops, cost
from rloo_memory.plan.speed import in_words, times
from rloo_memory.plan.trl_settings import from_settings


@pytest.mark.slow
def test_what_is_predicted_was_measured():
    """Within a tenth, but where a pass has so few tokens that starting its operations takes the time."""
    table = speed_check.table_of("reference-cpu-2-cores")
    committed = pandas.read_csv(speed_check.TABLE)  # by `make evidence`
    pandas.testing.assert_frame_equal(table, committed, check_dtype=False, rtol=0.01)
    assert len(table) == 20
    few = (table.prompt_tokens == 200) & (table.completion_tokens == 100)
    within = table.measured.between(0.9 * table.predicted_low, 1.1 * table.predicted_high)
    assert within[~few].all(), table[~few & ~within]
    assert (table.measured > 0.7 * table.predicted_low).all()


def test_the_operations_of_an_update_are_those_that_a_model_needs():
    """Two for each weight of a matrix and token; four times in training with checkpointing: forward, that again, and
    twice in a backward. Scores of attention: half of all pairs of tokens."""
    config = named_config("tiny-qwen3")
    rows, length, completion = 4, 72, 8
    setup = Setup(
        length - completion, completion, rows, 2, gradient_accumulation_steps=2, steps_per_generation=2, beta=0.05,
        dtype="float32", bf16=False, padded=False, device="cpu",
    )  # fmt: skip
    (prediction,) = predict_all({"stock": setup}, config, lambda line: None)
    layers, hidden, heads, size = (
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim
    )  # fmt: skip
    projections = hidden * size * (2 * heads + 2 * config.num_key_value_heads) + 3 * hidden * config.intermediate_size
    scores = attention_flops((rows, heads, length, size), (rows, heads, length, size), size, is_causal=True)
    matrices = 2 * rows * length * projections
    head = 2 * rows * (length - 1) * hidden * config.vocab_size  # on a CPU, TRL scores prompts as well
    flops = {phase: sum(f * n for (f, _), n in work.items()) for phase, work in prediction.work.items()}
    assert flops["score"] == 2 * (layers * (matrices + scores) + head)  # the policy and the reference
    # What is computed again stops in front of a layer's last matrix, and the LM head computes its logits once more
    last = 2 * rows * length * hidden * config.intermediate_size
    assert flops["train"] == layers * (4 * matrices - last + 2 * scores + scores * 5 // 2) + 4 * head


@pytest.mark.parametrize("changed, scores", [
    ({}, False), ({"steps_per_generation": 2, "num_iterations": 2}, True), ({"algorithm": "rloo"}, True),
])  # fmt: skip
def test_grpos_policy_scores_only_what_is_older_than_itself_when_it_trains(changed, scores):
    config, settings = named_config("tiny-qwen3"), dict(algorithm="grpo", beta=0.0, num_generations=2, bf16=False)
    settings |= dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_completion_length=8) | changed
    setup = from_settings(64, settings, config, device="cpu")
    predictions = predict_all({arm: setup.arm(arm) for arm in ("stock", "shared")}, config, lambda line: None)
    assert {"score" in each.work for each in predictions} == {scores}
    assert ("scoring is" in in_words(predictions)[0]) == scores


@pytest.mark.parametrize("found, words", [
    ([1.04, 1.96], "is 1.0 to 2.0 times faster"), ([0.42, 0.6], "takes 1.7 to 2.4 times as long"),
    ([0.5, 0.5], "takes 2.0 times as long"), ([0.8, 1.3], "takes 0.8 to 1.2 times as long"),
])  # fmt: skip
def test_nothing_slower_is_called_faster(found, words):
    assert times(found) == words


def test_to_name_what_is_there_moves_nothing():
    """As PEFT does with the weights of all experts in each forward."""
    weights = torch.empty(8, 4, 4)
    assert cost(torch.ops.aten.set_.source_Tensor, (), [weights, weights], weights) == (0, 0)


def test_the_plan_says_how_many_times_faster(planned):
    words = "--model Qwen/Qwen3-0.6B --lora 8 --prompt 200 --completion 1000 --k 8"
    whole = planned(*words.split()).stdout
    found = planned(*words.split(), "--completion-mean", "325").stdout
    say = r"^shared, beside TRL's faster way: scoring is ([\d.]+).*, training is ([\d.]+).* on GPUs of 100 to 400 oper"
    ((score, train),) = re.findall(say, whole, re.MULTILINE)
    ((shorter_score, shorter_train),) = re.findall(say, found, re.MULTILINE)
    assert 1 <= float(score) < 1.3 and 1 <= float(train) < 1.3
    assert float(shorter_score) > 2.5 and float(shorter_train) > 2.5  # whole rows are padded to the longest
    assert "published speed-ups (verl 4368, Unsloth 6871) are 1.3 to 1.4 times lower" in whole
    assert "An H100 waits until" in found and found.split("stock, train")[0] == whole.split("stock, train")[0]
    assert planned(*words.split(), "--completion-mean", "1001").returncode == 2
    assert "rows are scored and trained whole" not in whole
    short = planned(*words.replace("200", "50").split(), "--arms", "stock,shared").stdout
    assert "rows are scored and trained whole" in short

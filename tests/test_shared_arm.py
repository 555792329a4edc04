"""The arm `shared`: `share_prompts` on TRL as released, measured and trained like `stock`."""

import pytest

from experiments import config as cfg
from experiments.arms import ARMS
from experiments.record import read_csv


def test_a_run_records_its_patches_its_passes_and_its_phases(train):
    code, record, folder, _ = train("shared", 4)
    assert code == 0 and record["status"] == "ok", record["error"]
    assert record["fork_patches"] == [] and record["trl_file"] == ".build/fork/current-untouched/trl"
    assert record["config"]["completions_per_forward"] == 2
    phases = [(row["phase"], int(row["step"])) for row in read_csv(folder / "phases.csv")]
    updates = ["train", "optimizer"] * 3 + ["train"]
    assert phases == [("load", 0)] + [(phase, step) for step in (1, 2) for phase in ["generate", "score", *updates]]


def test_a_run_in_micro_batches_takes_two_completions_at_a_time(policy, tmp_path):
    from transformers import AutoTokenizer

    from experiments.workload import trainers

    config, tokenizer = cfg.resolve("shared-accumulate", 4, "test", "cpu"), AutoTokenizer.from_pretrained(policy)
    reward = policy.replace("policy", "reward")
    trainer, _ = trainers.build_current(config, tmp_path, policy, reward, tokenizer, ["a b c"])
    assert trainer.prompt_sharing.settings == {"prefix_sharing": True, "tokens_per_forward": None}
    assert trainer.args.per_device_train_batch_size == trainer.args.gradient_accumulation_steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["shared", "shared-accumulate"])
def test_it_trains_as_stock_does(arm, train):
    """Three rollouts of three updates, same seed, in float64. What is sampled is the same, so rewards are equal. The
    log-probabilities are float32 in this TRL, 1e-7 each, and losses and KL are averages of their differences."""
    options = ("--steps", "3", "--learning-rate", "1e-3", "--precision", "float64")
    stock, shared = (train(name, 4, *options)[1]["trace"] for name in ("stock", arm))
    assert len(stock) == 3 and abs(stock[-1]["loss"]) > 1e-4, "nothing was learned: the test would be empty"
    for expected, step in zip(stock, shared, strict=True):
        assert step["reward"] == expected["reward"]
        assert step["loss"] == pytest.approx(expected["loss"], abs=2e-8)
        assert step["kl"] == pytest.approx(expected["kl"], abs=5e-7)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)


def test_run_ids_name_the_completions_a_pass_only_where_they_are_not_the_usual():
    ids = [cfg.resolve("shared", 8, "cpu", "cpu", completions_per_forward=n).run_id for n in (None, 1, 2, 8)]
    assert ids == ["shared_cpu_k8_r0", "shared_cpu_k8_c1_r0", "shared_cpu_k8_r0", "shared_cpu_k8_c8_r0"]
    usual = {arm: cfg.resolve(arm, 8, "cpu", "cpu").completions_per_forward for arm in ARMS}
    assert (usual["classic-lean"], usual["stock-accumulate"], usual["shared-accumulate"]) == (8, 1, 2)

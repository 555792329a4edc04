"""The arm `shared`: `share_prompts` on TRL as released, measured like `stock`."""

from transformers import AutoTokenizer

from experiments import config as cfg
from experiments.arms import ARMS
from experiments.record import read_csv
from experiments.workload import trainers


def test_a_run_records_its_patches_its_passes_and_its_phases(train):
    code, record, folder, _ = train("shared", 4)
    assert code == 0 and record["status"] == "ok", record["error"]
    assert record["fork_patches"] == [] and record["trl_file"] == ".build/fork/current-untouched/trl"
    assert record["config"]["completions_per_forward"] == 2
    phases = [(row["phase"], int(row["step"])) for row in read_csv(folder / "phases.csv")]
    updates = ["train", "optimizer"] * 3 + ["train"]
    assert phases == [("load", 0)] + [(phase, step) for step in (1, 2) for phase in ["generate", "score", *updates]]


def test_a_run_in_micro_batches_takes_two_completions_at_a_time(policy, tmp_path):
    config, tokenizer = cfg.resolve("shared-accumulate", 4, "test", "cpu"), AutoTokenizer.from_pretrained(policy)
    reward = policy.replace("policy", "reward")
    trainer, _ = trainers.build_current(config, tmp_path, policy, reward, tokenizer, ["a b c"])
    assert trainer.prompt_sharing.settings == {"prefix_sharing": True, "tokens_per_forward": None}
    assert trainer.args.per_device_train_batch_size == trainer.args.gradient_accumulation_steps == 2


def test_run_ids_name_the_completions_a_pass_only_where_they_are_not_the_usual():
    ids = [cfg.resolve("shared", 8, "cpu", "cpu", completions_per_forward=n).run_id for n in (None, 1, 2, 8)]
    assert ids == ["shared_cpu_k8_r0", "shared_cpu_k8_c1_r0", "shared_cpu_k8_r0", "shared_cpu_k8_c8_r0"]
    usual = {arm: cfg.resolve(arm, 8, "cpu", "cpu").completions_per_forward for arm in ARMS}
    assert (usual["classic-lean"], usual["stock-accumulate"], usual["shared-accumulate"]) == (8, 1, 2)

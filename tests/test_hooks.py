"""The memory callback with trainers that are not what it was written for: it records what it knows and no more."""

import json
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.record import read_csv
from rloo_memory.hooks.memory_callback import MemoryCallback, trained_settings
from rloo_memory.launch import command_line
from rloo_memory.settings import profiles
from rloo_memory.settings.trl_parser import GRPOConfig
from trl import SFTConfig, SFTTrainer


@pytest.mark.slow
def test_the_memory_callback_works_with_a_trainer_without_rewards(policy, tmp_path):
    arguments = SFTConfig(
        str(tmp_path), max_steps=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = SFTTrainer(policy, args=arguments, train_dataset=Dataset.from_dict({"text": ["a b c d e"] * 16}))
    trainer.add_callback(MemoryCallback(trainer))
    trainer.train()
    record = json.loads((tmp_path / "memory.json").read_text())
    assert set(record["peaks"]) == {"train", "optimizer"} and min(record["peaks"].values()) > 100 * 2**20
    assert record["reward_model"] is None and record["settings"]["gradient_checkpointing"]


@pytest.mark.parametrize("engine", ["vllm", "continuous batching"])
def test_another_engines_generation_is_marked_and_its_prompts_are_counted(engine, tmp_path):
    """Both take lists of token ids. Forwards of the policy inside it are part of it. The trainer is one as far as the
    callback looks at it: generation, scoring, an update."""
    policy, some, prompts = torch.nn.Linear(2, 2), torch.ones(1, 2), [[1, 2, 3], [1]]
    policy.generate = lambda *args, **kwargs: pytest.fail("another engine generates")
    policy.config, policy.dtype = SimpleNamespace(to_dict=dict), torch.float32
    args = SimpleNamespace(output_dir=str(tmp_path), process_index=0, world_size=1, learning_rate=1e-3, use_vllm=True)
    state = SimpleNamespace(deepspeed_plugin=None)
    accelerator = SimpleNamespace(device=SimpleNamespace(type="cpu"), unwrap_model=lambda model: model, state=state)
    metrics = {"train": defaultdict(list)}
    trainer = SimpleNamespace(args=args, accelerator=accelerator, model=policy, _metrics=metrics)
    if engine == "vllm":
        trainer.vllm_generation = SimpleNamespace(generate=lambda prompts, images, num_generations: policy(some))
    else:
        policy.generate_batch = lambda inputs, progress_bar: policy(some)
    other = tmp_path / "other.csv"
    other.write_text("theirs")
    (tmp_path / "memory_phases.csv").symlink_to(other)
    callback = MemoryCallback(trainer, of_launcher={"settings": {"generation_kwargs": {"in no file": object()}}})
    begun, optimizer = SimpleNamespace(global_step=0), torch.optim.SGD(policy.parameters())
    for trainings in (1, 2):
        callback.on_train_begin(args, begun, None, optimizer=optimizer)
        for _ in range(2):
            if engine == "vllm":
                trainer.vllm_generation.generate(prompts=prompts, images=None, num_generations=2)
            else:
                policy.generate_batch(prompts, progress_bar=False)
            with torch.no_grad():
                policy(some)
            policy(some).sum().backward()
            callback.on_pre_optimizer_step(args, begun, None)
            optimizer.step()
            callback.on_step_end(args, begun, None)
        assert {len(x) for x in trainer._metrics["train"].values()} == {2 * trainings}
    record = json.loads((tmp_path / "memory.json").read_text())
    assert record["not_recorded"] == ["generation_kwargs"] and other.read_text() == "theirs"
    phases = [(int(row["step"]), row["phase"]) for row in read_csv(tmp_path / "memory_phases.csv")]
    assert phases[1:6] == [(1, phase) for phase in ("generate", "score", "train", "optimizer", "train")]
    assert record["prompt_tokens"] == 3


def test_the_record_has_the_settings_that_were_trained_with(policy, tmp_path):
    """Adapters as they are in the model; a profile made of the record trains with the same, whatever was set, but for
    what a user's own class adds to TRL's."""

    @dataclass
    class Own(GRPOConfig):
        more: object = object()

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy), dtype=torch.bfloat16)
    adapters = LoraConfig(r=4, lora_alpha=12, lora_dropout=0.0, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    arguments = Own(
        str(tmp_path), num_generations=4, per_device_train_batch_size=4, prefix_sharing=True, tokens_per_forward=64,
        learning_rate=3e-4, beta=0.02, use_cpu=True, bf16=False, adam_beta2=0.95, min_p=0.1, shuffle_dataset=False,
        generation_kwargs={"no_repeat_ngram_size": 3}, lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 2}, chat_template_kwargs={"enable_thinking": False}, sync_ref_model=True,
        ref_model_sync_steps=7, model_init_kwargs={"dtype": torch.bfloat16, "revision": "main"},
    )  # fmt: skip
    settings = trained_settings(arguments, model)
    path = tmp_path / "again.yaml"
    profiles.dump_profile(path, json.loads(json.dumps(settings)), [])
    launched, again, of_model = command_line.parse([str(path)])
    theirs = again.to_dict() | {"output_dir": str(tmp_path)}
    expected = arguments.to_dict() | {"model_init_kwargs": {"revision": "main"}}
    assert theirs == {name: expected[name] for name in theirs} and launched.algorithm == "grpo"
    adapted = (of_model.use_peft, of_model.lora_r, of_model.lora_alpha, of_model.lora_dropout, of_model.dtype)
    assert adapted == (True, 4, 12, 0.0, "bfloat16") and of_model.lora_target_modules == ["down_proj", "q_proj"]
    assert len(settings) < 60, "what is as TRL has it is not named"

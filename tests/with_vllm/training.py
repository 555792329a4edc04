"""Trains a tiny model with vLLM's completions, with prefix sharing or without, and keeps what is compared."""

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import vllm_on_cpu
from datasets import Dataset
from peft import LoraConfig
from tools import lookup
from transformers import AutoProcessor, AutoTokenizer, set_seed

import trl
from experiments.workload import pictures
from rloo_memory import data, share_prompts
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from tests.tiny_gemma3 import SIDE


@dataclass(frozen=True)
class Case:
    """One training: RLOO or GRPO, and what its settings are beside `SETTINGS`."""

    algorithm: str = "grpo"
    settings: dict = field(default_factory=dict)
    shared: dict = field(default_factory=dict)  # only with sharing
    lora: bool = False
    images: bool = False
    tools: bool = False


@dataclass
class Trained:
    """What came out of a training. Tensors are float32, of whole parameters where these were sharded."""

    tokens: list[list]  # of each generation, one list a completion
    apart: list[float]  # of each generation: vLLM's log-probabilities from the trainer's, nats, the largest
    before: dict  # name -> parameter
    after: dict
    shared_passes: int
    evaluations: list[float]  # losses
    kind: str  # accelerate's distributed type


PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
# A model without training also samples the token that stands for images, for which there are no features then
SHORT = {"max_completion_length": 6}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
CASES = {
    "rloo": Case("rloo"),
    "grpo": Case(),
    "rloo, LoRA": Case("rloo", lora=True),
    "grpo, LoRA": Case(lora=True),
    "rloo, parts of groups": Case("rloo", PARTS),
    "grpo, parts of groups": Case(settings=PARTS),
    "rloo, beta": Case("rloo", {"beta": 0.1}),
    "grpo, beta": Case(settings={"beta": 0.1}),
    "grpo, ratios truncated": Case(settings={"vllm_importance_sampling_mode": "token_truncate"}),
    "grpo, ratios not corrected": Case(settings={"vllm_importance_sampling_correction": False}),
    "grpo, two iterations": Case(settings={"num_iterations": 2, "learning_rate": 0.03}),
    "grpo, token budget": Case(shared={"tokens_per_forward": 64}),
    "grpo, evaluation": Case(settings=EVALUATED),
    "rloo, images": Case("rloo", SHORT, images=True),
    "grpo, images, LoRA": Case(settings=SHORT, lora=True, images=True),
    "grpo, tools": Case(settings={"max_completion_length": 96, "max_tool_calling_iterations": 2}, tools=True),
    # on two processes
    "grpo, DDP": Case(settings={"per_device_train_batch_size": 4}),
    "rloo, DDP, parts of groups": Case("rloo", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "grpo, FSDP2": Case(settings={"per_device_train_batch_size": 4, **SHARDED}),
    "grpo, tensor parallel": Case(settings={"per_device_train_batch_size": 4, "vllm_tensor_parallel_size": 2}),
}
SETTINGS = dict(
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.1,
    vllm_max_model_length=512,
    num_generations=4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    max_completion_length=16,
    temperature=1.0,
    learning_rate=0.1,
    lr_scheduler_type="constant",
    optim="sgd",  # Adam would make steps of the rounding of gradients near zero
    beta=0.0,
    max_steps=3,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    seed=3,
    bf16=False,
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
    gradient_checkpointing=False,
    model_init_kwargs={"dtype": "float32"},
)


def reward(completion_ids, **kwargs) -> list[float]:
    """Of the ids alone, and another one for nearly every completion: no rank in a group hangs on rounding."""
    return [sum(7 * token % 13 for token in ids) / (13 * len(ids)) for ids in completion_ids]


def rows(case: Case):
    """Eight prompts of different lengths, or of different images."""
    if case.images:  # of a size that nothing scales, which TRL and vLLM do in ways of their own
        return pictures.dataset_of(((SIDE, SIDE),), sentences=2, rows=8)
    text = data.load_documents()[0]
    prompts = [text[1000 * i : 1000 * i + 150 + 37 * i] for i in range(8)]
    if case.tools:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts})


def trainer_of(case: Case, sharing: bool, model: Path, more: dict):
    set_seed(0)
    settings = copy.deepcopy(SETTINGS | case.settings | more)
    if "fsdp" in settings:
        from fsdp_on_cpu import allow_fsdp_on_cpu

        allow_fsdp_on_cpu()
    Config, Trainer = (getattr(trl, case.algorithm.upper() + kind) for kind in ("Config", "Trainer"))
    processor = (AutoProcessor if case.images else AutoTokenizer).from_pretrained(model, padding_side="left")
    dataset = rows(case)
    if case.tools:
        processor.chat_template = trl.chat_template_utils.qwen3_chat_template
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian", task_type="CAUSAL_LM")
    trainer = Trainer(
        model=str(model),
        reward_funcs=reward,
        args=Config(output_dir=tempfile.mkdtemp(), **settings),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(4)) if "eval_strategy" in settings else None,
        processing_class=processor,
        peft_config=lora if case.lora else None,
        **({"tools": [lookup]} if case.tools else {}),
    )
    if sharing:
        share_prompts(trainer, **case.shared)
    return trainer


def train(
    case: Case, sharing: bool, model: Path, change: Callable[[object], None] = lambda trainer: None, **more
) -> Trained:
    """Trains in this process. `change` may spoil the trainer first; `more` are settings."""
    trainer = trainer_of(case, sharing, model, more)
    tokens, apart = [], []
    watch_rollouts(trainer, tokens, apart)
    change(trainer)
    before = parameters(trainer)
    with counted_passes() as passes:
        trainer.train()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        vllm_on_cpu.forget_processes()
    evaluations = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    kind = trainer.accelerator.distributed_type.value
    return Trained(tokens, apart, before, parameters(trainer), passes.call_count, evaluations, kind)


def parameters(trainer) -> dict:
    def whole(parameter):
        return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()

    return {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}


def watch_rollouts(trainer, tokens: list, apart: list) -> None:
    """Notes the tokens of each rollout, and how far vLLM's log-probabilities of them are from the trainer's."""
    engine, roll_out, sampled = trainer.vllm_generation, trainer._generate_and_score_completions, []
    engine.logprobs, made = 0, engine.generate  # RLOO asks for none

    def generate(*args, **kwargs):
        torch.manual_seed(1000 + len(tokens))  # what shuffles the rows draws another number of times with sharing
        generated = made(*args, **kwargs)
        sampled[:] = [torch.tensor(row)[:, 0] for row in generated[2]]
        return generated

    def watched(inputs):
        output = roll_out(inputs)
        mask = output["completion_mask"].bool()
        tokens.append([ids[keep].tolist() for ids, keep in zip(output["completion_ids"], mask, strict=True)])
        if "old_logps" in output:  # RLOO's, of whole completions
            theirs, ours = torch.stack([row.sum() for row in sampled]), output["old_logps"]
        elif "old_per_token_logps" in output:
            mask = mask * output.get("tool_mask", 1)  # what a tool said, nobody sampled
            theirs, ours = output["sampling_per_token_logps"] * mask, output["old_per_token_logps"] * mask
        else:  # GRPO that does not correct does not score
            return output
        apart.append(float((theirs - ours).abs().max()))
        return output

    engine.generate, trainer._generate_and_score_completions = generate, watched


def counted_passes():
    """A mock that notes each forward in which prompts are shared."""
    return mock.patch.object(SharedPrefixPasses, "forward", autospec=True, side_effect=SharedPrefixPasses.forward)

"""The launcher's RLOO trainer for a setup of the planner: what is measured is what was predicted."""

from contextlib import nullcontext
from pathlib import Path

from rloo_memory import data
from rloo_memory.phases import PhaseRecorder
from rloo_memory.plan.setups import Setup

SAME = (  # in a setup as in TRL's arguments
    "bf16", "optim", "beta", "per_device_train_batch_size", "num_generations", "gradient_accumulation_steps",
    "steps_per_generation", "temperature", "max_completion_length", "gradient_checkpointing", "activation_offloading",
    "prefix_sharing", "tokens_per_forward", "top_k", "top_p", "min_p",
)  # fmt: skip


def text_dataset(prompts: list):
    """A training set of prompts, chats or texts."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": prompts})


def build_trainer(setup: Setup, folder: Path, processor, dataset, model: str | None = None, steps: int = 2):
    """The trainer that makes `steps` updates on the models that `run_models.save_models` left in `folder`, or on
    `model` if that is given. The folder takes the trainer's output; without a reward model, letters are counted.
    `processor` is a tokenizer where prompts are text."""
    import torch
    from peft import LoraConfig

    from experiments.workload.trainers import QUIET
    from rloo_memory.launch.additions import add_to
    from rloo_memory.settings.trl_parser import RLOOConfig
    from trl import ModelConfig, RLOOTrainer, get_quantization_config

    arguments = RLOOConfig(
        output_dir=str(folder / "out"),
        use_cpu=setup.device == "cpu",
        max_steps=steps,
        generation_kwargs={"min_new_tokens": setup.max_completion_length},
        model_init_kwargs={"dtype": getattr(torch, setup.dtype), "attn_implementation": setup.attn_implementation},
        **{name: getattr(setup, name) for name in SAME},
        **QUIET,
    )
    weights = ModelConfig(
        load_in_4bit=setup.weight_bits == 4,
        load_in_8bit=setup.weight_bits == 8,
        use_bnb_nested_quant=True,
        dtype=setup.dtype,
    )
    lora = LoraConfig(r=setup.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = RLOOTrainer(
        model=model or str(folder / "policy"),
        reward_funcs=str(folder / "reward") if setup.reward_model else data.letter_reward,
        args=arguments,
        processing_class=processor,
        train_dataset=dataset,
        peft_config=lora if setup.lora_rank else None,
        quantization_config=get_quantization_config(weights),
    )
    add_to(trainer)
    return trainer


class CountedHighWater:
    """Stands in for `HighWater` where torch has no counter: the peak of `LiveBytes`."""

    def __init__(self, memory):
        self.memory = memory

    def wait(self) -> None:
        """The CPU has done what it was given."""

    def reset(self) -> bool:
        self.memory.reset()
        return True

    def read(self):
        return self.memory.peak, None, None, None


def train(trainer, phases: PhaseRecorder, memory=None) -> None:
    """Train under the marks of `phases`. `memory` (`LiveBytes`), if given, counts their peaks."""
    from torch.nn import Module

    from experiments.workload.trainers import torch_optimizer

    phases.attach(trainer.model, torch_optimizer(trainer))
    if memory is not None:
        phases.high_water = CountedHighWater(memory)
        memory.watch(trainer.model)
        for kind, model in (("reference", trainer.ref_model), ("reward model", trainer.reward_funcs[0])):
            if isinstance(model, Module):
                memory.watch(model, kind)
    with memory or nullcontext():
        trainer.train()
        phases.close()

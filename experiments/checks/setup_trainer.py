"""The launcher's RLOO trainer for a setup of the planner: what is measured is what was predicted."""

from pathlib import Path

from rloo_memory import data
from rloo_memory.plan.setups import Setup

SAME = (  # in a setup as in TRL's arguments
    "bf16", "optim", "beta", "per_device_train_batch_size", "num_generations", "gradient_accumulation_steps",
    "steps_per_generation", "temperature", "max_completion_length", "gradient_checkpointing", "activation_offloading",
    "prefix_sharing", "tokens_per_forward",
)  # fmt: skip


def text_dataset(prompts: list):
    """A training set of prompts, chats or texts."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": prompts})


def build_trainer(setup: Setup, folder: Path, processor, dataset, model: str | None = None, steps: int = 2):
    """The trainer that makes `steps` updates on the model in `folder`, or on `model` if that is given. The folder
    takes the trainer's output and holds the reward model; without one, letters are counted. `processor` is a tokenizer
    where prompts are text."""
    import torch
    from peft import LoraConfig

    from rloo_memory.launch.additions import add_to
    from rloo_memory.settings.trl_parser import RLOOConfig
    from trl import ModelConfig, RLOOTrainer, get_quantization_config

    arguments = RLOOConfig(
        output_dir=str(folder / "out"),
        use_cpu=setup.device == "cpu",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_steps=steps,
        generation_kwargs={"min_new_tokens": setup.max_completion_length},
        model_init_kwargs={"dtype": getattr(torch, setup.dtype)},
        **{name: getattr(setup, name) for name in SAME},
    )
    weights = ModelConfig(
        load_in_4bit=setup.weight_bits == 4,
        load_in_8bit=setup.weight_bits == 8,
        use_bnb_nested_quant=True,
        dtype=setup.dtype,
    )
    lora = LoraConfig(r=setup.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = RLOOTrainer(
        model=model or str(folder),
        reward_funcs=str(folder / "reward") if setup.reward_model else data.letter_reward,
        args=arguments,
        processing_class=processor,
        train_dataset=dataset,
        peft_config=lora if setup.lora_rank else None,
        quantization_config=get_quantization_config(weights),
    )
    add_to(trainer)
    return trainer

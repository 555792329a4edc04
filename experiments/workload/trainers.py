"""The two trainers, set up alike: TRL 0.21's `rloo_k` trainer and TRL 1.x's, each from whatever TRL was imported."""

import math
import os
import statistics
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from experiments.arms import ARMS
from experiments.config import RunConfig
from rloo_memory import share_prompts
from rloo_memory.data import letter_reward, render
from trl import RLOOConfig, RLOOTrainer

QUIET = dict(logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)


def common_arguments(config: RunConfig, folder: Path) -> dict:
    """Arguments that mean the same in both lines. The trainers write nothing: the run's record is what counts."""
    mixed = config.precision == "bf16"
    if mixed:
        # TRL 0.21 makes its own Accelerator and relies on this variable, which transformers 4 set and 5 does not
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    return dict(
        output_dir=str(folder),
        learning_rate=config.learning_rate,
        temperature=config.temperature,
        seed=config.seed,
        bf16=mixed,
        use_cpu=config.device == "cpu",
        **QUIET,
    )


def weights(config: RunConfig) -> str:
    """The weights' dtype. With mixed precision they stay in float32."""
    return "float64" if config.precision == "float64" else "float32"


def build_classic(config: RunConfig, folder: Path, policy_path: str, reward_path: str, tokenizer, prompts):
    """TRL 0.21's `RLOOTrainer`, the published setting: the batch is one mini-batch, `epochs` passes over a rollout."""
    policy = AutoModelForCausalLM.from_pretrained(policy_path, dtype=weights(config))
    reference = AutoModelForCausalLM.from_pretrained(policy_path, dtype=weights(config))
    if config.reward == "letters":
        reward = lambda texts: letter_reward(completions=texts)  # noqa: E731
    else:
        reward = AutoModelForSequenceClassification.from_pretrained(reward_path, num_labels=1, dtype=weights(config))
    dataset = Dataset.from_dict({"input_ids": [render(tokenizer, messages) for messages in prompts]})
    if len(dataset) < config.batch // config.k:  # its data loader drops a last batch that is not full
        dataset = dataset.select([i % len(dataset) for i in range(config.batch // config.k)])
    arguments = RLOOConfig(
        **common_arguments(config, folder),
        per_device_train_batch_size=config.batch,
        gradient_accumulation_steps=1,
        num_ppo_epochs=config.epochs,
        num_mini_batches=1,
        rloo_k=config.k,
        response_length=config.completion_tokens,
        total_episodes=config.steps * config.batch,
        num_sample_generations=0,  # sample tables are not part of training
    )
    trainer = RLOOTrainer(
        config=arguments,
        processing_class=tokenizer,
        policy=policy,
        ref_policy=reference,
        reward_model=reward,
        train_dataset=dataset,
        eval_dataset=dataset,
    )
    return trainer, policy


def build_current(config: RunConfig, folder: Path, policy_path: str, reward_path: str, tokenizer, prompts):
    """TRL 1.x's `RLOOTrainer` with the same numbers: batch, epochs over a rollout, KL coefficient, clipping."""
    rows, sharing = config.completions_per_forward, {}
    if (arm := ARMS[config.arm]).shares_prefix:
        sharing = dict(prefix_sharing=True)
        if arm.in_passes:
            rows, sharing = config.batch, sharing | dict(tokens_per_forward=rows * (config.completion_tokens + 1))
    arguments = RLOOConfig(
        **common_arguments(config, folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=config.batch // rows,
        num_generations=config.k,
        num_iterations=config.epochs,
        max_completion_length=config.completion_tokens,
        max_steps=config.steps * config.epochs,
        beta=0.05,
        epsilon=0.2,
        max_grad_norm=0.0 if config.reward == "letters" else 1.0,
        generation_kwargs={"min_new_tokens": config.completion_tokens},  # as the classic trainer: no early end
        model_init_kwargs={"dtype": getattr(torch, weights(config))},  # as a word TRL does not take float64
    )
    trainer = RLOOTrainer(
        model=policy_path,
        reward_funcs=letter_reward if config.reward == "letters" else reward_path,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    if sharing:
        share_prompts(trainer, **sharing)
    return trainer, trainer.model


def torch_optimizer(trainer):
    """The optimizer whose `step` really runs, without accelerate's wrapper. The current line creates it late."""
    if trainer.optimizer is None:
        trainer.create_optimizer()
    optimizer = trainer.optimizer
    return getattr(optimizer, "optimizer", optimizer)


def build(config: RunConfig, folder: Path, models: tuple[str, str], tokenizer, prompts, phases):
    """The arm's trainer, from now on under the marks of `phases`, and what collects its logs. `models` are the folders
    of the policy and the reward model."""
    of_line = build_classic if ARMS[config.arm].line == "classic" else build_current
    trainer, policy = of_line(config, folder, *models, tokenizer, prompts)
    logs = LogCollector(phases)
    trainer.add_callback(logs)
    phases.attach(policy, torch_optimizer(trainer))
    return trainer, logs


class LogCollector(TrainerCallback):
    """Collects what the trainers log, one entry a rollout: the mean over the rollout's updates."""

    NAMES = {
        "loss": ("loss/policy_avg", "loss"),
        "reward": ("objective/scores", "reward"),
        "kl": ("objective/kl", "kl"),
        "grad_norm": ("grad_norm",),
    }

    def __init__(self, phases):
        self.phases, self.logs = phases, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((self.phases.step, dict(logs or {})))

    def trace(self) -> list[dict]:
        """One dictionary a rollout: step, loss, reward, kl, grad_norm (None where it was not logged, NaN where one of
        the rollout's updates had no finite value: TRL logs None for a mean of NaN)."""

        def mean(values):
            if not values:
                return None
            finite = all(value is not None and math.isfinite(value) for value in values)
            return statistics.fmean(values) if finite else math.nan

        steps = []
        for number in sorted({step for step, _ in self.logs if step}):
            entry = {"step": number}
            for name, keys in self.NAMES.items():
                logged = [logs[key] for step, logs in self.logs if step == number for key in keys if key in logs]
                if name == "grad_norm" and not logged:
                    logged = self.phases.grad_norms.get(number)
                entry[name] = mean(logged)
            steps.append(entry)
        return steps

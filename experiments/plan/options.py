"""The command line's description of a training, for the planner and the doctor."""

import argparse
from dataclasses import replace
from pathlib import Path

from experiments.config import ConfigError
from experiments.plan.setups import OPTIMIZERS, Setup, from_settings
from experiments.settings.profiles import devices_from


def add_setup_options(parser: argparse.ArgumentParser) -> None:
    """Options that `setup_from` reads."""
    parser.add_argument("--model", help="a built-in shape (Qwen/Qwen3-8B), a local folder, or hub:owner/name")
    parser.add_argument(
        "--profile", help="a name in experiments/settings/profiles or a YAML file; options override it"
    )
    parser.add_argument("--prompt", type=int, help="tokens of the longest prompt")
    parser.add_argument("--completion", type=int, help="max_completion_length")
    parser.add_argument("--k", type=int, help="num_generations: completions a prompt")
    parser.add_argument("--prompts", type=int, help="prompts a generation batch; default 1, or as the profile says")
    parser.add_argument("--completions-per-forward", type=int, help="prefix sharing: completions that go together")
    parser.add_argument("--tokens-per-forward", type=int, help="tokens that go together, with or without sharing")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters on every linear layer")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), help="bits of a frozen weight")
    parser.add_argument("--optim", help=", ".join(OPTIMIZERS))
    parser.add_argument("--beta", type=float, help="0 needs no reference model")
    parser.add_argument("--dtype", help="of the weights: bfloat16, float16, float32")
    parser.add_argument("--no-gradient-checkpointing", action="store_true")
    parser.add_argument("--activation-offloading", action="store_true")
    parser.add_argument("--accelerate", type=Path, help="accelerate's config: processes, DDP or FSDP2, offloading")
    parser.add_argument("--offload-reference", action="store_true", help="on the host except while it scores")
    parser.add_argument("--reward-model", help="one that scores, named as --model is; default: a function")
    parser.add_argument("--offload-reward", action="store_true", help="the reward model, likewise")


def setup_from(args: argparse.Namespace, profile: dict) -> Setup:
    """The profile's settings under the command line's. Raises `ConfigError`."""
    if args.prompt is None:
        raise ConfigError("no prompt length: --prompt N, the tokens of the longest prompt")
    given = {
        "max_completion_length": args.completion,
        "num_generations": args.k,
        "lora_rank": args.lora,
        "weight_bits": args.bits,
        "optim": args.optim,
        "beta": args.beta,
        "dtype": args.dtype,
        "completions_per_forward": args.completions_per_forward,
        "tokens_per_forward": args.tokens_per_forward,
        "gradient_checkpointing": False if args.no_gradient_checkpointing else None,
        "activation_offloading": True if args.activation_offloading else None,
        "offload_reference": True if args.offload_reference else None,
        "reward_model": args.reward_model,
        "offload_reward": True if args.offload_reward else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    setup = replace(from_settings(args.prompt, profile), **given)
    if args.accelerate:
        setup = replace(setup, **devices_from(args.accelerate))
        if setup.fully_sharded and setup.bf16 and not setup.lora_rank:
            setup = replace(setup, dtype="float32")  # accelerate's `fsdp2_prepare_model` widens trained weights
    if args.prompts or args.k or "per_device_train_batch_size" not in profile:
        rows = setup.num_generations * (args.prompts or 1)
        setup = replace(setup, per_device_train_batch_size=rows, steps_per_generation=1, gradient_accumulation_steps=1)
    return setup

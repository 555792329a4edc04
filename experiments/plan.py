"""Predict the peak memory of RLOO or GRPO training, phase by phase, without a GPU and without weights.

    python -m experiments.plan --model Qwen/Qwen3-8B --prompt 3000 --completion 512 --k 8 --device-memory 80GiB
    python -m experiments.plan --model ./my-model --profile single_gpu_24gb --prompt 3000 --largest k

Compares today's trainer with one pass (stock), with one completion a pass (accumulate), and prefix sharing. Sizes are
what torch allocates on the device; the CUDA context and the allocator's fragmentation come on top (`--reserve`).
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.config import ARMS, GIB, ConfigError, choose, exit_code, parse_bytes
from experiments.models import named_config
from experiments.profiles import devices_from, load_profile
from experiments.setups import ARM_NAMES, LARGEST, OPTIMIZERS, Setup, check, from_settings


@dataclass(frozen=True)
class Prediction:
    """The peak of each phase of one setup, in bytes."""

    arm: str
    setup: Setup
    phases: list  # of peaks.PhasePeak

    @property
    def peak(self):
        return max(self.phases, key=lambda phase: phase.total)


def predict(arm: str, setup: Setup, hf_config) -> Prediction:
    """The peaks of one setup; `arm` is its label. Raises `ConfigError` before anything runs."""
    check(setup, hf_config)
    from experiments.peaks import phase_peaks

    return Prediction(arm, setup, phase_peaks(setup, hf_config))


def predict_all(setups: dict[str, Setup], hf_config, say) -> list[Prediction]:
    """The same for several, by label, at the same time in processes of their own. What the model does not support is
    said and left out; raises `ConfigError` if nothing is left."""
    for setup in setups.values():
        check(setup, hf_config)
    import trl.trainer.rloo_trainer  # noqa: F401  once, not in each process

    from experiments import peaks

    tasks = {label: peaks.simulations(setup, hf_config) for label, setup in setups.items()}
    processes = min(sum(map(len, tasks.values())), os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        # Those that take longest, of shared prompts, come last: they are begun first
        futures = {
            label: [pool.submit(peaks.simulate, *task) for task in reversed(tasks[label])] for label in reversed(tasks)
        }
        predictions, refused = [], None
        for i, (label, setup) in enumerate(setups.items(), 1):
            line = f"  {i} of {len(setups)}: {label}"
            try:
                results = [future.result() for future in reversed(futures[label])]
                predictions.append(Prediction(label, setup, peaks.combine(setup, hf_config, tasks[label], results)))
            except ConfigError as error:
                refused, line = error, f"{line}: {error}"
            say(line)
    if not predictions:
        raise refused
    return predictions


def largest_that_fits(arm: str, setup: Setup, hf_config, what: str, limit: int, say=print) -> int:
    """The largest k, prompt or completion ("k", "prompt", "completion") whose peak stays within `limit` bytes; 0 if
    the smallest does not fit. Peaks grow along almost straight lines, so each guess is where the last two would meet
    the limit."""
    name, least = LARGEST[what], {"k": 2, "prompt": 16, "completion": 16}[what]
    positions = hf_config.max_position_embeddings
    most = {
        "k": 4096,
        "prompt": positions - setup.max_completion_length,
        "completion": positions - setup.prompt_tokens,
    }[what]
    known: dict[int, int] = {}

    def peak(value: int) -> int:
        if value not in known:
            trial = setup.with_k(value) if what == "k" else replace(setup, **{name: value})
            known[value] = predict(arm, trial.arm(arm), hf_config).peak.total
            say(f"  {what} {value}: {known[value] / GIB:.2f} GiB")
        return known[value]

    low, high = least, most + 1  # `low` fits, `high` does not
    if peak(least) > limit:
        return 0
    guess = min(max(getattr(setup, name), least + 1), most)
    while high - low > max(1, low // 100):  # to one percent
        if peak(guess) <= limit:
            low = guess
        else:
            high = guess
        below, above = sorted(known, key=lambda value: abs(known[value] - limit))[:2]
        slope = (known[above] - known[below]) / (above - below)
        meets = int(below + (limit - known[below]) / slope) if slope > 0 else 2 * low
        guess = min(max(meets, low + 1, low + (high - low) // 50), high - 1, 4 * low)
        if guess in known:
            guess = (low + high) // 2
    return low


def table(predictions: list[Prediction], budget: int | None) -> str:
    """Peaks by phase in GiB, one line an arm, and what the highest is made of."""
    phases = [phase.phase for phase in predictions[0].phases]
    lines = [f"{'peak allocated, GiB':22}" + "".join(f"{name:>11}" for name in phases) + f"{'fits':>8}"]
    for prediction in predictions:
        peak = prediction.peak
        cells = "".join(f"{phase.total / GIB:>10.2f}{'*' if phase is peak else ' '}" for phase in prediction.phases)
        fits = "" if budget is None else "yes" if peak.total <= budget else f"-{(peak.total - budget) / GIB:.1f}"
        lines.append(f"{prediction.arm:22}{cells}{fits:>8}")
    lines.append("")
    for prediction in predictions:
        peak = prediction.peak
        host = f"; on the host {peak.host / GIB:.2f}" if peak.host else ""
        lines.append(f"{prediction.arm}, {peak.phase}: {peak.parts()}{host}")
    return "\n".join(lines)


def add_setup_options(parser: argparse.ArgumentParser) -> None:
    """Options that `setup_from` reads."""
    parser.add_argument("--model", help="a built-in shape (Qwen/Qwen3-8B), a local folder, or hub:owner/name")
    parser.add_argument("--profile", help="a name in experiments/profiles or a YAML file; options override it")
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


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_setup_options(parser)
    parser.add_argument("--device-memory", help="such as 24GiB: says what fits")
    parser.add_argument("--reserve", default="0.8GiB", help="of it for CUDA's context and fragmentation (assumed)")
    parser.add_argument("--arms", help=f"some of {', '.join(ARM_NAMES)}; default: those that the settings have")
    parser.add_argument("--largest", choices=tuple(LARGEST), help="find the largest that fits the device memory")
    parser.add_argument("--json", type=Path, help="write the prediction to this file")
    parser.add_argument("--chart", type=Path, help="draw the breakdown to this PNG")
    return parser.parse_args(argv)


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


def main(argv: list[str] | None = None) -> int:
    return exit_code("plan", run, parse_args(argv))


def run(args: argparse.Namespace) -> int:
    start = time.time()
    profile = load_profile(args.profile) if args.profile else {}
    model = args.model or profile.get("model_name_or_path")
    if not model:
        raise ConfigError("no model: name one with --model, or a profile that has model_name_or_path")
    budget = parse_bytes(args.device_memory) - parse_bytes(args.reserve) if args.device_memory else None
    if args.largest and budget is None:
        raise ConfigError("--largest needs --device-memory")
    setup = setup_from(args, profile)
    hf_config = named_config(model)
    check(setup, hf_config)
    arms = [arm for arm in ARM_NAMES if arm != "tokens" or setup.tokens_per_forward]
    if args.arms:
        arms = [choose("arm", arm, arms) for arm in args.arms.split(",")]
    from experiments.train import use_fork

    use_fork(ARMS["shared"])
    predictions = predict_all(
        {arm: setup.arm(arm) for arm in arms}, hf_config, say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    parameters = predictions[0].phases[0].kinds.get("parameters", 0)
    print(
        f"{model}: prompt {setup.prompt_tokens}, completion {setup.max_completion_length}, k {setup.num_generations}, "
        f"{setup.generation_rows // setup.num_generations} prompts a batch, weights on a device "
        f"{parameters / GIB:.2f} GiB"
    )
    print(table(predictions, budget))
    if budget is not None:
        if parameters > budget:
            print(f"The weights alone exceed {args.device_memory} by {(parameters - budget) / GIB:.2f} GiB.")
        print(f"fits: within {args.device_memory} less {args.reserve} reserved")
    for arm in [prediction.arm for prediction in predictions] if args.largest else ():
        print(f"{arm}: looking for the largest {args.largest}")
        value = largest_that_fits(arm, setup, hf_config, args.largest, budget)
        print(f"{arm}: largest {args.largest} {value or 'none'}")
    import torch
    import transformers

    import trl

    result = {
        "model": model,
        "versions": f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        "device_memory_bytes": budget,
        "predictions": [
            {"arm": p.arm, "setup": asdict(p.setup), "phases": [asdict(phase) for phase in p.phases]}
            for p in predictions
        ],
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.chart:
        from visualization.plan import draw

        draw(result, args.chart)
        print(args.chart)
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

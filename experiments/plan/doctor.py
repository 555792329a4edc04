"""Say what filled the memory, and what would make it fit.

    python -m experiments.plan.doctor RUN_DIR --device-memory 24GiB
    python -m experiments.plan.doctor --model Qwen/Qwen3-8B --prompt 3000 --completion 512 --k 8 --device-memory 24GiB

RUN_DIR holds what `experiments.hooks.memory_callback.MemoryCallback` or `experiments.train` wrote. First each change
alone, in order of effect, then the changes that are needed, those that train the same before those that do not, and a
YAML file that fits: for TRL's own parser and for `launch_single_gpu.sh`.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.config import ARMS, GIB, ConfigError, exit_code, parse_bytes
from experiments.plan.options import add_setup_options, setup_from
from experiments.plan.predict import Prediction, predict, predict_all
from experiments.plan.setups import Setup, check, to_settings
from experiments.settings.profiles import dump_profile, load_profile
from experiments.workload.models import named_config, shape_config


@dataclass(frozen=True)
class Lever:
    """One change. `apply` returns the changed setup, or the same one where the change does not apply."""

    name: str
    cost: str
    exact: bool  # trains the same as before, up to rounding
    apply: Callable[[Setup], Setup]


def share_prompt(setup: Setup) -> Setup:
    return setup if setup.prefix_sharing else setup.arm("shared")


def generate_less_at_once(setup: Setup) -> Setup:
    return replace(setup, steps_per_generation=1)


def one_completion_a_pass(setup: Setup) -> Setup:
    if setup.prefix_sharing:
        return replace(setup, completions_per_forward=1, tokens_per_forward=None)
    return setup.arm("accumulate")


def quantize(bits: int) -> Callable[[Setup], Setup]:
    def apply(setup: Setup) -> Setup:
        if setup.weight_bits <= bits:
            return setup
        return replace(lora(setup), weight_bits=bits, dtype="bfloat16")

    return apply


def lora(setup: Setup) -> Setup:
    return setup if setup.lora_rank else replace(setup, lora_rank=16, offload_reference=False)


def offload_reference(setup: Setup) -> Setup:
    return setup if setup.lora_rank or not setup.beta else replace(setup, offload_reference=True)


def offload_reward(setup: Setup) -> Setup:
    return setup if setup.reward_model is None else replace(setup, offload_reward=True)


def no_reference(setup: Setup) -> Setup:
    return setup if setup.lora_rank else replace(setup, beta=0.0, offload_reference=False)


def eight_bit_optimizer(setup: Setup) -> Setup:
    return setup if "8bit" in setup.optim else replace(setup, optim="adamw_bnb_8bit")


def paged_optimizer(setup: Setup) -> Setup:
    return replace(setup, optim="paged_adamw_8bit")


def half_the_completion(setup: Setup) -> Setup:
    half = setup.max_completion_length // 2
    return setup if half < 16 else replace(setup, max_completion_length=half)


def half_of_k(setup: Setup) -> Setup:
    k = setup.num_generations // 2
    return setup if k < 2 or setup.num_generations % 2 else setup.with_k(k)


# In the order in which they are tried: what trains the same and costs little comes first
LEVERS = (
    Lever("prefix_sharing", "nothing: faster, too", True, share_prompt),
    Lever("gradient_checkpointing", "a second forward", True, lambda s: replace(s, gradient_checkpointing=True)),
    Lever("steps_per_generation: 1", "fewer completions decode together", True, generate_less_at_once),
    Lever("one completion a pass", "slower: smaller passes", True, one_completion_a_pass),
    Lever("offload_reference", "the reference's weights cross the bus once a rollout", True, offload_reference),
    Lever("offload_reward", "the reward model's, likewise", True, offload_reward),
    Lever("activation_offloading", "transfers, host memory", True, lambda s: replace(s, activation_offloading=True)),
    Lever("optim: adamw_bnb_8bit", "moments rounded to 8 bits", False, eight_bit_optimizer),
    Lever("optim: paged_adamw_8bit", "the same, and transfers", False, paged_optimizer),
    Lever("dtype: bfloat16", "updates below a weight's 1/256 are lost", False, lambda s: replace(s, dtype="bfloat16")),
    Lever("beta: 0", "no KL term", False, no_reference),
    Lever("LoRA, rank 16", "adapters are trained, not the weights", False, lora),
    Lever("LoRA on 8-bit weights", "the same, and rounded weights", False, quantize(8)),
    Lever("LoRA on 4-bit weights", "the same, rounded more", False, quantize(4)),
    Lever("half of k", "a noisier baseline", False, half_of_k),
    Lever("half the completion", "longer answers are cut", False, half_the_completion),
)


def applied(lever: Lever, setup: Setup) -> Setup | None:
    """What the lever makes of `setup`, None where it changes nothing. Activations go to the host on CUDA only."""
    trial = lever.apply(setup)
    return None if trial == setup or trial.activation_offloading and trial.device == "cpu" else trial


def make_it_fit(start: Prediction, hf_config, budget: int, say) -> tuple[list[tuple[Lever, Prediction]], Prediction]:
    """The levers that were needed, each with the prediction after it, and the last prediction, fitting or not."""
    current, used = start, []
    for lever in LEVERS:
        # Halving can be done again; the others change nothing the second time
        while current.peak.total > budget and (trial := applied(lever, current.setup)):
            try:
                prediction = predict(lever.name, trial, hf_config)
            except ConfigError as error:
                say(f"  {lever.name}: {error}")
                break
            saved = current.peak.total - prediction.peak.total
            say(f"  {lever.name}: {prediction.peak.total / GIB:.2f} GiB{'' if saved > 0 else ', of no use here'}")
            if saved < 0.01 * current.peak.total:
                break
            current, used = prediction, [*used, (lever, prediction)]
    return used, current


def read_run(folder: Path):
    """(setup, model config, measured peaks by phase in bytes, device bytes or None) of a finished or failed run.

    Raises `ConfigError` where the folder has no record, or one of a trainer that the planner does not know."""
    if (folder / "memory.json").exists():
        from transformers import CONFIG_MAPPING

        record = json.loads((folder / "memory.json").read_text())
        fields = {name: value for name, value in record["model_config"].items() if name != "model_type"}
        hf_config = CONFIG_MAPPING[record["model_config"]["model_type"]](**fields)
        arguments = {k: v for k, v in record["arguments"].items() if k in Setup.__dataclass_fields__}
        setup = Setup(
            prompt_tokens=record["prompt_tokens"],
            dtype=record["dtype"],
            lora_rank=record["lora_rank"],
            weight_bits=record["weight_bits"],
            device=record["device_kind"],
            reward_model=record.get("reward_model"),
            **arguments,
        )
        return setup, hf_config, record["peaks"], record["device_bytes"]
    if not (folder / "run.json").exists():
        raise ConfigError(f"{folder} holds neither memory.json (MemoryCallback) nor run.json (experiments.train)")
    record = json.loads((folder / "run.json").read_text())
    arm, config = ARMS[record["arm"]], record["config"]
    if arm.line != "current":
        raise ConfigError(f"{folder} is a run of {arm.name}: the planner knows today's trainer only; use --arm stock")
    rows = record["batch"] if arm.shares_prefix else record["completions_per_forward"]
    setup = Setup(
        prompt_tokens=record["prompt_tokens_requested"],
        max_completion_length=record["completion_tokens"],
        num_generations=record["k"],
        per_device_train_batch_size=rows,
        steps_per_generation=record["batch"] // rows,
        gradient_accumulation_steps=record["batch"] // rows,
        prefix_sharing=arm.shares_prefix,
        bf16=config["precision"] in ("bf16", "bfloat16"),
        dtype="bfloat16" if config["precision"] == "bfloat16" else "float32",
        lora_rank=config.get("lora_rank", 0),
        completions_per_forward=record["completions_per_forward"] if arm.shares_prefix else None,
        device=record["device_kind"],
        temperature=config["temperature"],
        padded=False,
        optim="adamw_torch_fused",
        reward_model="policy" if config["reward"] == "model" else None,
    )
    hf_config = (
        named_config(config["model"]) if config["model"] else shape_config(config["shape"], config["vocab_size"])
    )
    peaks = {record["peak_phase"]: record["peak_allocated_bytes"]} if record["peak_allocated_bytes"] else {}
    return setup, hf_config, peaks, record["budget_bytes"]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.plan.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="?", type=Path, help="folder of a run, instead of the options that describe one")
    add_setup_options(parser)
    parser.add_argument("--device-memory", help="such as 24GiB; default: the device of the run")
    parser.add_argument("--reserve", default="0.8GiB", help="of it for CUDA's context and fragmentation (assumed)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default cuda, or the run's")
    parser.add_argument("--output", type=Path, default=Path("fits.yaml"), help="where the settings that fit go")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return exit_code("doctor", run, parse_args(argv))


def run(args: argparse.Namespace) -> int:
    measured, device_bytes, profile = {}, None, {}
    if args.run:
        setup, hf_config, measured, device_bytes = read_run(args.run)
        model = args.model
    else:
        profile = load_profile(args.profile) if args.profile else {}
        model = args.model or profile.get("model_name_or_path")
        if not model:
            raise ConfigError("nothing to look at: name a run folder, or --model, --prompt and --device-memory")
        setup, hf_config = setup_from(args, profile), named_config(model)
    if args.device:
        setup = replace(setup, device=args.device)
    if args.device_memory:
        device_bytes = parse_bytes(args.device_memory)
    if device_bytes is None:
        raise ConfigError("no device memory: --device-memory, such as 24GiB")
    budget = device_bytes - parse_bytes(args.reserve)
    check(setup, hf_config)
    from experiments.builds import use_fork

    use_fork(ARMS["shared"])

    trials = [(lever, trial) for lever in LEVERS if (trial := applied(lever, setup))]
    print(f"predicting {1 + len(trials)} setups; each takes a few seconds", flush=True)
    setups = {"as it is": setup} | {lever.name: trial for lever, trial in trials}
    predictions = {p.arm: p for p in predict_all(setups, hf_config, say=lambda line: print(line, flush=True))}
    if (now := predictions.pop("as it is", None)) is None:
        raise ConfigError("the setup as it is cannot be planned, see above")
    explain(now, measured, budget)

    print("\neach change alone, GiB:")
    levers = {lever.name: lever for lever in LEVERS}
    for name, prediction in sorted(predictions.items(), key=lambda pair: pair[1].peak.total):
        saved, lever = now.peak.total - prediction.peak.total, levers[name]
        same = "trains the same" if lever.exact else "trains differently"
        print(f"  {prediction.peak.total / GIB:8.2f}  {-saved / GIB:+8.2f}  {lever.name:24} {same}; {lever.cost}")

    print(f"\nuntil it fits in {budget / GIB:.2f} GiB:")
    used, last = make_it_fit(now, hf_config, budget, say=print)
    if last.peak.total > budget:
        print(
            f"It does not fit: {last.peak.total / GIB:.2f} GiB with every lever, {last.peak.phase} phase. "
            f"{(last.peak.total - budget) / GIB:.2f} GiB are missing: a smaller model, a shorter prompt or more "
            "devices are left."
        )
        return 1
    lines = [f"peak {last.peak.total / GIB:.2f} GiB predicted, {last.peak.phase} phase; limit {budget / GIB:.2f} GiB"]
    lines += [f"{lever.name}: {prediction.peak.total / GIB:.2f} GiB after it" for lever, prediction in used]
    settings = {**profile, **({"model_name_or_path": model} if model else {}), **to_settings(last.setup)}
    dump_profile(args.output, settings, comments=[f"prompts to {last.setup.prompt_tokens} tokens", *lines])
    exact = all(lever.exact for lever, _ in used)
    print(
        f"fits: {last.peak.total / GIB:.2f} GiB. {'Trains the same as before. ' if used and exact else ''}"
        f"Settings: {args.output}"
    )
    if setup.num_devices > 1:
        print(f"  MODEL_PATH=... .venv/bin/accelerate launch --config_file ... -m experiments.launch {args.output}")
    else:
        print(f"  MODEL_PATH=... ./launch_single_gpu.sh {args.output}")
    print("  PYTORCH_ALLOC_CONF=expandable_segments:True keeps fragmentation low on CUDA; the launcher sets it")
    return 0


def explain(now: Prediction, measured: dict[str, int], budget: int) -> None:
    """Which phase and which kind of tensor peaked."""
    phase = now.peak
    if measured:
        name = max(measured, key=measured.get)
        phase = next((p for p in now.phases if p.phase == name), phase)
        what = " (the whole process: Python, torch and what it keeps come on top)" if now.setup.device == "cpu" else ""
        print(
            f"measured: {measured[name] / GIB:.2f} GiB{what}, {name} phase; predicted for it "
            f"{phase.total / GIB:.2f} GiB"
        )
    print(f"predicted peak {now.peak.total / GIB:.2f} GiB, {now.peak.phase} phase; limit {budget / GIB:.2f} GiB")
    print(f"{phase.phase}: {phase.parts()}")
    if phase.kinds.get("parameters", 0) > budget:
        print(f"the weights alone exceed the limit by {(phase.kinds['parameters'] - budget) / GIB:.2f} GiB")


if __name__ == "__main__":
    sys.exit(main())

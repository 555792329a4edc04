"""Predict the peak memory of RLOO or GRPO training, phase by phase, without a GPU and without weights.

    python -m experiments.plan --model Qwen/Qwen3-8B --prompt 3000 --completion 512 --k 8 --device-memory 80GiB
    python -m experiments.plan --model ./my-model --profile single_gpu_24gb --prompt 3000 --largest k

Compares today's trainer with one pass (stock), with one completion a pass (accumulate), and prefix sharing. Sizes are
what torch allocates on the device; the CUDA context and the allocator's fragmentation come on top (`--reserve`).
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from experiments.config import ARMS, GIB, ConfigError, choose, exit_code, parse_bytes
from experiments.plan.options import add_setup_options, setup_from
from experiments.plan.predict import Prediction, largest_that_fits, predict_all
from experiments.plan.setups import ARM_NAMES, LARGEST, check
from experiments.settings.profiles import load_profile
from experiments.workload.models import named_config


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
    from experiments.builds import use_fork

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

"""ONE run of ONE arm at one k and one scale. Leaves a run folder; the exit code tells what happened.

    python -m experiments.train --arm classic-lean --k 4

Exit codes: 0 finished, 2 a setting that cannot work (nothing was started), 3 out of memory, 1 any other failure.
"""

import argparse
import contextlib
import csv
import os
import shutil
import statistics
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

from experiments import config as cfg
from experiments.builds import use_fork
from experiments.config import ARMS, GIB, ROOT, SCALES, RunConfig
from experiments.device import (
    cuda_uuid,
    enforce_budget,
    is_out_of_memory,
    keep_only_live_memory,
    level,
    lift_budget,
    pick_device,
    settle,
)
from experiments.memory_monitor import start_monitor, stop_monitor
from experiments.phases import PhaseRecorder
from experiments.record import RunRecord, main_peak, make_writable, source_commit, write_machine

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_OOM, EXIT_INTERRUPTED = 0, 1, cfg.EXIT_USAGE, 3, 130


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.train", description=__doc__.split("\n")[0])
    parser.add_argument("--arm", required=True, help=", ".join(ARMS))
    parser.add_argument("--k", type=int, required=True, help="completions per prompt")
    parser.add_argument("--scale", help=f"{', '.join(SCALES)}; default: seed on CUDA, cpu elsewhere")
    parser.add_argument("--repeat", type=int, default=0, help="number of the repeat; the seed is 42 + repeat")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--model", help="local folder or hub:owner/name; default: built here, random weights")
    parser.add_argument("--documents", help="builtin, a file, a folder of .txt, or hub:owner/dataset[:split]")
    parser.add_argument("--budget", help="memory that torch may allocate, such as 4GiB")
    parser.add_argument("--batch", type=int, help="completions per batch; default: one prompt's, as published")
    parser.add_argument("--completions-per-forward", type=int, help="arm shared: how many go together; default 2")
    for name in ("prompt-tokens", "completion-tokens", "steps", "epochs", "seed", "vocab-size", "threads"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("learning-rate", "temperature", "interval"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--precision", help="float64, float32, bf16 (mixed) or bfloat16 (weights, too)")
    parser.add_argument("--reward", help="model or letters")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="holds one folder a machine")
    parser.add_argument("--machine", help="folder name below --results; default: from the device's name")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return cfg.exit_code("train", run, parse_args(argv))


def run(args: argparse.Namespace) -> int:
    device_kind, device_name, device_bytes = pick_device(args.device)
    config = cfg.resolve(
        args.arm,
        args.k,
        args.scale or cfg.default_scale(device_kind),
        device_kind,
        repeat=args.repeat,
        budget_bytes=cfg.parse_bytes(args.budget) if args.budget else None,
        **{
            name: getattr(args, name)
            for name in (
                "model",
                "documents",
                "batch",
                "prompt_tokens",
                "completion_tokens",
                "steps",
                "epochs",
                "seed",
                "vocab_size",
                "threads",
                "learning_rate",
                "temperature",
                "interval",
                "precision",
                "reward",
                "completions_per_forward",
            )
        },
    )
    machine = args.results / (args.machine or cfg.machine_name(device_kind, device_name))
    folder = machine / config.run_id
    make_writable(folder)
    if not (config.model or "").startswith("hub:") and not config.documents.startswith("hub:"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded unless it was asked for
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its own allocator sets a GiB aside, unused

    from experiments.workload import data, models

    documents = data.load_documents(config.documents)
    models.check_fits(config, models.model_config(config))
    patches = use_fork(ARMS[config.arm])

    record = RunRecord(
        run_id=config.run_id,
        config=config.as_dict(),
        commit=source_commit(),
        pid=os.getpid(),
        started_at=now(),
        python_version=sys.version.split()[0],
        device_kind=device_kind,
        device_name=device_name,
        device_total_bytes=device_bytes,
        fork_patches=patches,
        model=config.model or f"{config.shape}, vocabulary {config.vocab_size}, random weights",
        prompt_tokens_requested=config.prompt_tokens,
        completions_per_forward=config.completions_per_forward,
        **{
            name: getattr(config, name)
            for name in ("arm", "scale", "k", "repeat", "completion_tokens", "batch", "steps", "seed", "budget_bytes")
        },
    )
    for stale in folder.iterdir():
        stale.unlink() if stale.is_file() else shutil.rmtree(stale)
    record.write(folder)
    write_machine(machine, record)
    say = Progress(config)
    with (folder / "log.txt").open("w", buffering=1) as log, output_to(log):
        phases = PhaseRecorder(folder / "phases.csv", device_kind)
        sampled_device = cuda_uuid() if device_kind == "cuda" else "none"
        monitor = start_monitor(folder / "memory.csv", config.interval, sampled_device)
        try:
            train(config, documents, record, phases, say)
            record.status, record.exit_code = "ok", EXIT_OK
        except Exception as error:  # every failure is recorded and told by the exit code, none is swallowed
            lift_budget()  # writing the record needs memory too
            oom = is_out_of_memory(error)
            record.status, record.exit_code = ("oom", EXIT_OOM) if oom else ("error", EXIT_ERROR)
            record.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            traceback.print_exc(file=log)
        except KeyboardInterrupt:
            record.status, record.exit_code, record.error = "error", EXIT_INTERRUPTED, "interrupted from the keyboard"
        finally:
            phases.close()
            report = stop_monitor(monitor)
            fill_peaks(record, phases, folder, report)
            record.finished_at = now()
            record.write(folder)
    say.end(record, folder)
    return record.exit_code


def train(config: RunConfig, documents: list[str], record: RunRecord, phases: PhaseRecorder, say) -> None:
    """Set up the arm's own trainer, train within the budget, and fill the record."""
    import torch
    import transformers

    import trl
    from experiments.workload import data, models, trainers  # all heavy imports come before the budget is set

    torch.set_num_threads(config.threads)
    if config.device == "cpu":
        keep_only_live_memory()
    record.trl_version, record.trl_file = trl.__version__, os.path.relpath(Path(trl.__file__).parent, ROOT)
    record.torch_version, record.transformers_version = torch.__version__, transformers.__version__
    policy_path, reward_path, tokenizer = models.prepare(config, documents)
    prompts = data.build_prompts(documents, tokenizer, config.prompt_tokens)
    enforce_budget(config)
    build = trainers.build_classic if ARMS[config.arm].line == "classic" else trainers.build_current
    trainer, policy = build(config, policy_path, reward_path, tokenizer, prompts)
    record.model_parameters = sum(p.numel() for p in policy.parameters())
    logs = trainers.LogCollector(phases, say)
    trainer.add_callback(logs)
    phases.attach(policy, trainers.torch_optimizer(trainer))

    settle()
    record.start_bytes = level(config.device)
    if config.device == "cuda":
        phases.outside_pool_bytes = record.start_bytes - torch.cuda.memory_reserved()
    try:
        trainer.train()
    finally:
        end = time.time()
        record.step_seconds = [round(seconds, 4) for seconds in phases.step_seconds(end)]
        record.trace = logs.trace()
        fed = phases.prompt_tokens
        if fed:
            record.prompt_tokens_fed_min, record.prompt_tokens_fed_max = min(fed), max(fed)
            record.prompt_tokens_fed_mean = statistics.fmean(fed)
    record.step_seconds_median = statistics.median(record.step_seconds)
    record.final_loss = record.trace[-1]["loss"] if record.trace else None


def fill_peaks(record: RunRecord, phases: PhaseRecorder, folder: Path, report) -> None:
    """Peaks after loading: the larger of what was sampled and what torch or the kernel counted."""
    steps = [peak for peak in phases.peaks if peak.phase != "load"]
    if not steps:
        return
    with (folder / "memory.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if float(row["timestamp"] or 0) >= steps[0].start]

    def sampled(column: str) -> int | None:
        return max((int(float(row[column])) for row in rows if row.get(column)), default=None)

    def counted(column: str) -> int | None:
        return max((value for peak in steps if (value := getattr(peak, column)) is not None), default=None)

    def larger(*values: int | None) -> int | None:
        return max((value for value in values if value is not None), default=None)

    record.peak_allocated_bytes = counted("peak_allocated_bytes")
    record.peak_reserved_bytes = counted("peak_reserved_bytes")
    record.peak_resident_bytes = larger(counted("peak_resident_bytes"), sampled("resident_bytes"))
    record.peak_process_device_bytes = sampled("process_device_bytes")
    column, seen, main = "peak_resident_bytes", sampled("resident_bytes"), record.peak_resident_bytes
    if record.device_kind == "cuda":
        # NVML has no peak counter: torch's pool at its peak, plus what the device held besides the pool at the start
        with_pool = record.peak_reserved_bytes + phases.outside_pool_bytes
        seen = sampled("device_used_bytes")
        record.peak_device_used_bytes = main = larger(seen, counted("device_used_bytes"), with_pool)
        column = "peak_allocated_bytes"
    known = [peak for peak in steps if getattr(peak, column) is not None]
    if known:
        record.peak_phase = max(known, key=lambda peak: getattr(peak, column)).phase
    if report is not None:
        missed = max(main - seen, 0) if main is not None and seen is not None else None
        record.sampler = {**vars(report), "peak_missed_bytes": missed}


@contextlib.contextmanager
def output_to(log):
    """Everything that libraries print, also from C, goes to the run's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, 1):
            os.dup2(copy, number)
            os.close(copy)


class Progress:
    """One line a step on the terminal, while the libraries' output goes to the log."""

    def __init__(self, config: RunConfig):
        self.config, self.start = config, time.time()
        self.terminal = os.fdopen(os.dup(1), "w", buffering=1)
        self.say(
            f"{config.run_id}: {config.prompt_tokens} + {config.completion_tokens} tokens, batch {config.batch}, "
            f"budget {config.budget_bytes / GIB:.2f} GiB, {config.device}"
        )

    def say(self, text: str) -> None:
        print(text, file=self.terminal)

    def step(self, number: int) -> None:
        self.say(f"  step {number} of {self.config.steps}, {time.time() - self.start:.0f} s")

    def end(self, record: RunRecord, folder: Path) -> None:
        text = {"ok": "finished", "oom": "OUT OF MEMORY", "error": f"FAILED: {record.error}"}[record.status]
        if record.status == "ok":
            peak, above = (size / GIB for size in main_peak(vars(record)))
            text += f", peak {peak:.2f} GiB, {above:.2f} GiB above the start level ({record.peak_phase})"
        self.say(f"  {text}; {folder}{'' if record.status == 'ok' else '/log.txt'}")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())

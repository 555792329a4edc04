"""ONE run of ONE arm at one k and one scale. Leaves a run folder; the exit code tells what happened.

    python -m experiments.train --arm classic-lean --k 4

Exit codes: 0 finished, 2 a setting that cannot work (nothing was started), 3 out of memory, 130 or 143 stopped by
Ctrl-C or SIGTERM, 1 any other failure. The last line says so in words.
"""

import contextlib
import os
import shutil
import statistics
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

from experiments import config as cfg
from experiments import run_device
from experiments.arms import ARMS
from experiments.builds import use_fork
from experiments.commit import source_commit
from experiments.config import ROOT, RunConfig
from experiments.memory_monitor import start_monitor
from experiments.processes import ignore_signals, stoppable
from experiments.record import export, fill_peaks, new_record, outcome, write_record
from experiments.run_options import Parser, add_settings, settings
from experiments.run_record import RunRecord
from rloo_memory import cuda_check
from rloo_memory.device import is_out_of_memory, level, settle
from rloo_memory.errors import ConfigError, Stopped, program
from rloo_memory.phases import PhaseRecorder
from rloo_memory.sizes import GIB
from rloo_memory.storage import owned

EXIT_OK, EXIT_ERROR, EXIT_OOM = 0, 1, 3


@stoppable()
@program("train")
def main(argv: list[str] | None) -> int:
    """The whole run: ask, check, own the folder, measure, record. Raises `ConfigError` before it has begun."""
    started_at = now()
    parser = Parser("train", __doc__)
    add_settings(parser)
    args = parser.parse_args(argv)
    if args.arm is None or args.k is None:
        raise ConfigError("--arm and --k are needed, such as --arm classic-lean --k 4; see --help")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its own allocator sets a GiB aside, unused
    # All arms alike: cuDNN's attention plans each length anew, so each decoded token
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    kind, device_name = run_device.pick_device(args.device)
    given = {name: getattr(args, name) for name in settings()}
    config = cfg.resolve(device=kind, **given | dict(repeat=args.repeat or 0))
    machine = run_device.machine_folder(args, kind, device_name)
    folder = machine / config.run_id
    with owned(folder):
        prepare(config)
        record = new_record(
            config, source_commit(), pid=os.getpid(), started_at=started_at, device_kind=kind, device_name=device_name
        )
        for stale in folder.iterdir():
            if not stale.name.startswith("."):
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        write_record(record, folder)
        print(
            f"{config.run_id}: {config.prompt_tokens} + {config.completion_tokens} tokens, batch {config.batch}, "
            f"budget {config.budget_bytes / GIB:.2f} GiB, {kind}",
            flush=True,
        )
        with (folder / "log.txt").open("w") as log, output_to(log) as terminal:
            measure(folder, config, record, terminal)
        record.finished_at = now()
        write_record(record, folder)
        export(machine)
    print(f"  {outcome(vars(record))}; {folder}{'' if record.status == 'ok' else '/log.txt'}", flush=True)
    return record.exit_code


def prepare(config: RunConfig) -> None:
    """Raises `ConfigError` for what cannot work on this device, or with this model."""
    with open(os.devnull, "w") as nowhere, output_to(nowhere):
        from experiments.workload import run_models

        if config.device == "cuda":
            if ARMS[config.arm].line == "current":
                cuda_check.check(config.precision == "bf16", "--precision float32")
            elif why := cuda_check.no_kernels():
                raise ConfigError(why)
        run_models.check_fits(config)


@contextlib.contextmanager
def output_to(file) -> Iterator:
    """Everything that libraries print, also from C, goes to the open `file`. Gives what stderr was before."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    try:
        with open(saved[1], "w", closefd=False) as terminal:
            yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, 1):
            os.dup2(copy, number)
            os.close(copy)


def measure(folder: Path, config: RunConfig, record: RunRecord, terminal) -> None:
    """Train under the sampler and the phase marks, and fill the record. Every failure is recorded, none is raised."""
    steps = tqdm(total=config.steps, desc=f"  {config.run_id}", unit="step", file=terminal, disable=None, leave=False)

    def progress(phase: str, step: int) -> None:
        steps.update(step - 1 - steps.n)
        steps.set_postfix_str(phase)

    record.status, record.exit_code = "error", EXIT_ERROR
    try:
        phases = PhaseRecorder(folder / "phases.csv", config.device, watch=progress)
        device = run_device.cuda_uuid() if config.device == "cuda" else "none"
        sampler, logs = start_monitor(folder / "memory.csv", config.interval, device), None
        try:
            trainer, logs = set_up(folder, config, record, phases)
            trainer.train()
        finally:
            ended = phases.now()
            ignore_signals()
            run_device.lift_budget()  # writing the record needs memory too
            phases.close()
            lasted = sampler.poll() is None
            sampler.kill()
            sampler.wait()
            if logs:
                record.step_seconds = [round(seconds, 4) for seconds in phases.step_seconds(ended)]
                record.trace = logs.trace()
                if fed := phases.prompt_tokens:
                    record.prompt_tokens_fed_min, record.prompt_tokens_fed_max = min(fed), max(fed)
                    record.prompt_tokens_fed_mean = statistics.fmean(fed)
                # CUDA loads a module when it is first called
                outside = run_device.outside_pool(config.device)
                phases.outside_pool_bytes = max(phases.outside_pool_bytes, outside)
            fill_peaks(record, phases, folder, lasted)
        if not lasted and record.peak_phase is None:
            raise RuntimeError("the sampler was lost, and without it this kernel cannot tell the peak; run again")
        record.status, record.exit_code = "ok", EXIT_OK
    except Stopped as stop:
        number = Stopped.number(stop)
        record.error, record.exit_code = f"interrupted by {number.name}", 128 + number
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        record.error = kind + (str(error).strip() or "-").splitlines()[0]
        if is_out_of_memory(error):
            record.status, record.exit_code = "oom", EXIT_OOM
        traceback.print_exc()
    finally:
        ignore_signals()
        steps.close()


def set_up(folder: Path, config: RunConfig, record: RunRecord, phases: PhaseRecorder):
    """The arm's own trainer, ready to train within the budget, and what collects its logs."""
    record.fork_patches = use_fork(ARMS[config.arm])
    import torch
    import transformers

    import trl
    from experiments.workload import run_models, trainers  # all heavy imports come before the budget is set
    from rloo_memory import data

    torch.set_num_threads(config.threads)
    if config.device == "cpu" and config.freed_memory == "returned":
        run_device.keep_only_live_memory()
    record.trl_version, record.trl_file = trl.__version__, os.path.relpath(Path(trl.__file__).parent, ROOT)
    record.torch_version, record.transformers_version = torch.__version__, transformers.__version__
    documents = data.load_documents()
    policy_path, reward_path, tokenizer = run_models.prepare(config, documents)
    prompts = data.build_prompts(documents, tokenizer, config.prompt_tokens)
    run_device.enforce_budget(config)
    trainer, logs = trainers.build(config, folder, (policy_path, reward_path), tokenizer, prompts, phases)
    if config.device == "cpu":
        run_device.read_weights(trainer)  # so that the start level has them in every arm, as on CUDA
    settle()
    record.start_bytes = level(config.device)
    phases.outside_pool_bytes = run_device.outside_pool(config.device)
    return trainer, logs


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())

"""ONE run of ONE arm at one k and one scale. Leaves a run folder; the exit code tells what happened.

    python -m experiments.train --arm classic-lean --k 4

Exit codes: 0 finished, 2 a setting that cannot work (nothing was started), 3 out of memory, 130 or 143 stopped by
Ctrl-C or SIGTERM, 1 any other failure. The last line says so in words.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path

from experiments import config as cfg
from experiments import run_device
from experiments.arms import ARMS
from experiments.builds import use_fork
from experiments.commit import source_commit
from experiments.config import ROOT, SCALES, RunConfig
from experiments.memory_monitor import start_monitor, stop_monitor
from experiments.processes import Launch, end_with, ignore_signals, new_token, stoppable
from experiments.record import export, fill_peaks, make_writable, no_room, outcome, write_end, write_record
from experiments.run_options import OF_ONE_RUN, OPTIONS, Parser, add_options, add_place, overrides, whole
from experiments.run_record import RUNS, RunRecord
from experiments.terminal import Live, output_to
from rloo_memory import cuda_check
from rloo_memory.device import is_out_of_memory, level, machine_name, settle
from rloo_memory.errors import ConfigError, Stopped, exit_code
from rloo_memory.folder_lock import owned
from rloo_memory.phases import PhaseRecorder
from rloo_memory.sizes import GIB
from rloo_memory.storage import replace_text

EXIT_OK, EXIT_ERROR, EXIT_OOM = 0, 1, 3
RECORDED = (  # as the configuration has it
    "run_id", "arm", "scale", "k", "repeat", "completion_tokens", "batch", "completions_per_forward", "steps", "seed",
    "budget_bytes",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    with stoppable():
        return exit_code("train", run, argv)


def read_launch(argv: list[str] | None) -> Launch:
    """What the command line or the file that it names asks for. Raises `ConfigError`."""
    parser = Parser(prog="python -m experiments.train", description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="a file with everything, as experiments.suite hands it over")
    parser.add_argument("--arm", help=f"needed: {', '.join(ARMS)}")
    parser.add_argument("--k", type=whole, help="needed: completions per prompt")
    parser.add_argument("--scale", help=f"{', '.join(SCALES)}; default: seed on CUDA, cpu elsewhere")
    parser.add_argument("--repeat", type=whole, help="number of the repeat, 0 by default; the seed is 42 + repeat")
    add_place(parser, device=None)  # as all options here: not given beside --config
    add_options(parser, OPTIONS | OF_ONE_RUN)
    args = parser.parse_args(argv)
    if args.config is not None:
        if more := [name for name, value in vars(args).items() if value is not None and name != "config"]:
            raise ConfigError(f"--config names everything, and --{more[0].replace('_', '-')} is given too; use one")
        return Launch.read(args.config)
    if args.arm is None or args.k is None:
        raise ConfigError("--arm and --k are needed, such as --arm classic-lean --k 4; see --help")
    kind, name, _ = run_device.pick_device("auto" if args.device is None else args.device)
    config = cfg.resolve(
        args.arm,
        args.k,
        cfg.default_scale(kind) if args.scale is None else args.scale,
        kind,
        repeat=args.repeat or 0,
        **overrides(args, OPTIONS | OF_ONE_RUN),
    )
    machine = machine_name(kind, name) if args.machine is None else args.machine
    return Launch(config, cfg.machine_folder(args.results, machine), new_token())


def run(argv: list[str] | None) -> int:
    """The whole run: ask, check, own the folder, measure, record. Raises `ConfigError` before it has begun."""
    started_at = now()
    launch = read_launch(argv)
    if launch.parent is not None:
        end_with(launch.parent)
    config = launch.config
    folder = launch.machine / config.run_id
    if not (config.model or "").startswith("hub:") and not config.documents.startswith("hub:"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded unless it was asked for
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its own allocator sets a GiB aside, unused
    # All arms alike: cuDNN's attention plans each length anew, so each decoded token
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    make_writable(launch.machine)
    with owned(folder), tempfile.TemporaryFile() as early:
        with output_to(early):
            device_kind, device_name, device_bytes = run_device.pick_device(config.device)
            documents, patches = prepare(config)
        record = RunRecord(
            config=config.as_dict(),
            launch=launch.token,
            commit=source_commit(),
            pid=os.getpid(),
            started_at=started_at,
            python_version=sys.version.split()[0],
            device_kind=device_kind,
            device_name=device_name,
            device_total_bytes=device_bytes,
            fork_patches=patches,
            model=config.model or f"{config.shape}, vocabulary {config.vocab_size}, random weights",
            prompt_tokens_requested=config.prompt_tokens,
            **{name: getattr(config, name) for name in RECORDED},
        )
        begin(folder, record)
        progress = Progress(config, by_hand=launch.parent is None)
        try:
            with (folder / "log.txt").open("wb", buffering=0) as log, output_to(log):
                early.seek(0)
                with contextlib.suppress(OSError):  # a full disk is told by what must be written
                    shutil.copyfileobj(early, log)
                measure(folder, config, documents, record, progress)
            relative_paths(folder / "log.txt")
        except OSError as error:  # not even a log
            record.status, record.exit_code, record.error = "error", EXIT_ERROR, no_room(error, folder)
        return end(folder, record, progress)


def prepare(config: RunConfig) -> tuple[list[str], list[str]]:
    """(documents, patches of the TRL that is now first on the path). Raises `ConfigError` for what cannot work."""
    from experiments.workload import run_models
    from rloo_memory import data

    if config.device == "cuda":
        if ARMS[config.arm].line == "current":
            cuda_check.check(config.precision in ("bf16", "bfloat16"), "--precision float32")
        elif why := cuda_check.no_kernels():
            raise ConfigError(why)
    documents = data.load_documents(config.documents)
    run_models.check_fits(config, run_models.model_config(config))
    return documents, use_fork(ARMS[config.arm])


def begin(folder: Path, record: RunRecord) -> None:
    """Write the record of a run that has begun, and remove what an older run left. Raises `ConfigError`."""
    try:
        write_record(record, folder)
        for stale in folder.iterdir():
            if stale.name != "run.json":
                shutil.rmtree(stale) if stale.is_dir() and not stale.is_symlink() else stale.unlink()
    except OSError as error:
        record.status, record.exit_code, record.error = "error", EXIT_ERROR, no_room(error, folder)
        with contextlib.suppress(OSError):  # if it came that far
            write_end(record, folder)
        raise ConfigError(f"{record.error}; nothing was started") from None


def measure(folder: Path, config: RunConfig, documents: list[str], record: RunRecord, progress) -> None:
    """Train under the sampler and the phase marks, and fill the record. Every failure is recorded, none is raised."""
    record.exit_code = EXIT_ERROR
    try:
        phases = PhaseRecorder(folder / "phases.csv", config.device, watch=progress.phase)
        sampler = start_sampler(folder / "memory.csv", config)
        try:
            train(config, documents, record, phases)
        finally:
            ignore_signals()
            run_device.lift_budget()  # writing the record needs memory too
            with contextlib.suppress(OSError):  # a full disk: the phases so far are there
                phases.close()
            fill_peaks(record, phases, folder, stop_monitor(sampler))
        record.status, record.exit_code = "ok", EXIT_OK
        if record.sampler.get("peak_from", "") is None:
            record.status, record.exit_code = "error", EXIT_ERROR
            record.error = "the sampler was lost, and without it this kernel cannot tell the peak; run again"
    except Stopped as stop:
        name = Stopped.number(stop).name
        record.status, record.error = "error", f"interrupted by {name}"
        record.exit_code = 128 + Stopped.number(stop)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        record.status, record.error = "error", kind + (str(error).strip() or "-").splitlines()[0]
        if is_out_of_memory(error):
            record.status, record.exit_code = "oom", EXIT_OOM
        elif isinstance(error, OSError):
            record.error = no_room(error, folder)
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        ignore_signals()


def start_sampler(path: Path, config: RunConfig) -> subprocess.Popen:
    """Of the device that CUDA trains on; where NVML does not list it (a container, an unusual UUID), of resident
    memory: another GPU's numbers would mislead. Torch's own counters are recorded all the same."""
    if config.device != "cuda":
        return start_monitor(path, config.interval, "none")
    try:
        return start_monitor(path, config.interval, run_device.cuda_uuid())
    except RuntimeError as error:
        print(f"{error}: sampling resident memory only", file=sys.stderr)
        return start_monitor(path, config.interval, "none")


def relative_paths(log: Path) -> None:
    """Leave out of the log in which folders this machine has the project and the environment."""
    with contextlib.suppress(OSError):  # a full disk: it stays as it is
        before = after = log.read_bytes().decode(errors="replace")
        for folder in (ROOT, Path(sys.prefix)):
            after = after.replace(f"{folder}/", "")
        if after != before:
            replace_text(log, after)


def train(config: RunConfig, documents: list[str], record: RunRecord, phases: PhaseRecorder) -> None:
    """Set up the arm's own trainer, train within the budget, and fill the record."""
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
    policy_path, reward_path, tokenizer = run_models.prepare(config, documents)
    prompts = data.build_prompts(documents, tokenizer, config.prompt_tokens)
    run_device.enforce_budget(config)
    build = trainers.build_classic if ARMS[config.arm].line == "classic" else trainers.build_current
    trainer, policy = build(config, policy_path, reward_path, tokenizer, prompts)
    record.model_parameters = sum(p.numel() for p in policy.parameters())
    logs = trainers.LogCollector(phases)
    trainer.add_callback(logs)
    phases.attach(policy, trainers.torch_optimizer(trainer))

    if config.device == "cpu":
        run_device.read_weights(trainer)  # so that the start level has them in every arm, as on CUDA
    settle()
    record.start_bytes = level(config.device)
    if config.device == "cuda":
        phases.outside_pool_bytes = record.start_bytes - torch.cuda.memory_reserved()
    try:
        trainer.train()
    finally:
        record.step_seconds = [round(seconds, 4) for seconds in phases.step_seconds(phases.now())]
        record.trace = logs.trace()
        fed = phases.prompt_tokens
        if fed:
            record.prompt_tokens_fed_min, record.prompt_tokens_fed_max = min(fed), max(fed)
            record.prompt_tokens_fed_mean = statistics.fmean(fed)
        if config.device == "cuda":  # it loads a module when that is first called
            outside = level(config.device) - torch.cuda.memory_reserved()
            phases.outside_pool_bytes = max(phases.outside_pool_bytes, outside)
    record.step_seconds_median = statistics.median(record.step_seconds)
    record.final_loss = record.trace[-1]["loss"] if record.trace else None


def end(folder: Path, record: RunRecord, progress) -> int:
    """Write the record and the machine's summary; the exit code."""
    progress.live.show("  ending")
    record.finished_at = now()
    try:
        write_end(record, folder)
    except OSError as error:
        record.status, record.exit_code, record.error = "error", EXIT_ERROR, no_room(error, folder)
        print(f"train: {record.error}", file=sys.stderr)
    try:
        export(folder.parent)
    except OSError as error:
        record.exit_code = record.exit_code or EXIT_ERROR
        print(f"train: {no_room(error, folder.parent / RUNS)}", file=sys.stderr)
    progress.end(record, folder)
    return record.exit_code


class Progress:
    """Says where the run is. Started by hand it also says what is run, and how that ended."""

    def __init__(self, config: RunConfig, by_hand: bool):
        self.config, self.by_hand = config, by_hand
        self.live = Live(pause=10 if by_hand else 0)
        if not by_hand:  # the suite picks what it shows, and a suite that stands still does not hold the run up
            os.set_blocking(self.live.output, False)
        else:
            self.live.say(
                f"{config.run_id}: {config.prompt_tokens} + {config.completion_tokens} tokens, batch {config.batch}, "
                f"budget {config.budget_bytes / GIB:.2f} GiB, {config.device}"
            )
        self.live.show("  loading")

    def phase(self, phase: str, step: int) -> None:
        self.live.show(f"  step {step} of {self.config.steps}, {phase}")

    def end(self, record: RunRecord, folder: Path) -> None:
        if self.by_hand:
            self.live.say(f"  {outcome(vars(record))}; {folder}{'' if record.status == 'ok' else '/log.txt'}")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())

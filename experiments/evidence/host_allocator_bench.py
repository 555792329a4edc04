"""The same training with each host allocator, alternating: resident memory and time, on the CPU.

    python -m experiments.evidence.host_allocator_bench [--repeats 3] [--steps 6]

Trains through the launcher, so `host_allocator` is what is measured: Qwen3's shape in 8 layers, prompts of 48 to 1,600
tokens in mixed order, the same in every run, prefix sharing, no checkpointing, one thread. `system-1mib` is the
system's malloc told to give every freed block of 1 MiB or more back at once. Writes one row a run to
results/<machine>/host_allocator.csv: the largest VmHWM of any phase of the training, VmRSS after it, seconds from the
first rollout's start to the last update's end, and the process's CPU time, which other work on the machine disturbs
less.
"""

import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments import config as cfg
from experiments.config import ROOT
from experiments.evidence.common import FACTS, Parser, Table, place, whole
from rloo_memory import host_allocator
from rloo_memory.errors import ConfigError, exit_code

COLUMNS = (
    "allocator", "repeat", "peak_resident_bytes", "end_resident_bytes", "seconds", "cpu_seconds", "steps", "library",
    "libc_version", *FACTS,
)  # fmt: skip
ALLOCATORS = {  # -> setting of the launcher, environment
    "system": ("system", {}),
    "system-1mib": ("system", {"MALLOC_MMAP_THRESHOLD_": str(2**20)}),
    "tcmalloc": ("tcmalloc", {}),
    "jemalloc": ("jemalloc", {}),
}
LENGTHS = (48, 1600, 100, 800, 200, 400)  # tokens of a prompt
TRAIN = """
import json, resource, sys
from experiments import host_allocator
from rloo_memory.launch import __main__ as launch
from experiments.run_device import status_bytes
code = launch.main()
used = resource.getrusage(resource.RUSAGE_SELF)
print("\\n" + json.dumps([status_bytes("VmRSS"), used.ru_utime + used.ru_stime, *host_allocator.mapped().values()]))
sys.exit(code)
"""


def main(argv: list[str] | None = None) -> int:
    return exit_code("host_allocator_bench", run, argv)


def run(argv: list[str] | None) -> int:
    parser = Parser("host_allocator_bench", __doc__, cpu_only=True)
    parser.add_argument("--repeats", type=whole(1, 100), default=3)
    parser.add_argument("--steps", type=whole(1), default=6)
    args = parser.parse_args(argv)
    for setting, _ in ALLOCATORS.values():
        if setting != "system":
            host_allocator.find(setting)  # refused now, not after the first trainings
    here = place(args, "yaml")
    facts = {"steps": args.steps, "libc_version": platform.libc_ver()[1], **here.facts}
    table = Table(here.folder / "host_allocator.csv", COLUMNS, facts, args.fresh)
    with tempfile.TemporaryDirectory() as work:
        model = prepare(Path(work))
        for repeat in range(args.repeats):
            for allocator in ALLOCATORS:
                if not table.has(allocator=allocator, repeat=repeat):
                    out = Path(work, f"{allocator}-{repeat}")
                    row = train(allocator, model, Path(work, "prompts.jsonl"), out, args.steps)
                    table.add({"allocator": allocator, "repeat": repeat, **row})
    table.finish()
    print("| allocator | peak resident, MiB | resident at the end, MiB | training, s | CPU time, s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for allocator in ALLOCATORS:
        peak, end, seconds, cpu = (
            statistics.median(float(row[name]) for row in table.rows if row["allocator"] == allocator)
            for name in ("peak_resident_bytes", "end_resident_bytes", "seconds", "cpu_seconds")
        )
        print(f"| `{allocator}` | {peak / 2**20:,.0f} | {end / 2**20:,.0f} | {seconds:.1f} | {cpu:.1f} |")
    return 0


def prepare(work: Path) -> str:
    """The model's folder; writes the prompts to `work`."""
    from experiments.workload import run_models
    from rloo_memory import data

    documents = data.load_documents("builtin")
    model, _, tokenizer = run_models.prepare(cfg.resolve("shared", 4, "bench", "cpu", vocab_size=16_000), documents)
    pieces = {length: data.build_prompts(documents, tokenizer, length) for length in LENGTHS}
    prompts = [pieces[length][i] for i in range(8) for length in LENGTHS]
    (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return model


def train(allocator: str, model: str, prompts: Path, out: Path, steps: int) -> dict:
    """One training in a process of its own. Raises `ConfigError` where it fails."""
    setting, variables = ALLOCATORS[allocator]
    settings = {
        "host_allocator": setting,
        "dataset_name": prompts,
        "reward_funcs": "letters",
        "output_dir": out,
        "max_steps": steps,
        "max_completion_length": 32,
        "gradient_checkpointing": "false",
        "num_generations": 4,
        "tokens_per_forward": 66,  # two completions
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "bf16": "false",
        "use_cpu": "true",
        "seed": 0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": "true",
        "predict_memory": "false",
    }
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN, "balanced", *words],
        cwd=ROOT,
        env={**os.environ, **variables, "MODEL_PATH": model, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise ConfigError(f"{allocator}: {(result.stderr.strip() or 'no message').splitlines()[-1]}")
    end, cpu_seconds, *library = json.loads(result.stdout.splitlines()[-1])
    with (out / "memory_phases.csv").open(newline="") as file:
        phases = [row for row in csv.DictReader(file) if row["phase"] != "load"]
    return {
        "peak_resident_bytes": max(int(row["peak_resident_bytes"]) for row in phases),
        "end_resident_bytes": end,
        "seconds": round(float(phases[-1]["end"]) - float(phases[0]["start"]), 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "library": Path(library[0]).name if library else "libc.so.6",
    }


if __name__ == "__main__":
    sys.exit(main())

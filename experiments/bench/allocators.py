"""The same training with each host allocator: resident memory and time, on the CPU.

Trains through the launcher, so `host_allocator` is what is measured: Qwen3's shape in 8 layers, prompts of 48 to 1,600
tokens in mixed order, the same in every run, prefix sharing, no checkpointing, one thread.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments import config as cfg
from experiments.bench.samples import Cell
from experiments.config import ROOT
from experiments.measuring import Place
from experiments.record import read_csv
from rloo_memory import host_allocator

ALLOCATORS = {  # -> setting of the launcher, environment
    "system": ("system", {}),
    "system-1mib": ("system", {"MALLOC_MMAP_THRESHOLD_": str(2**20)}),  # gives blocks of 1 MiB or more back at once
    "tcmalloc": ("tcmalloc", {}),
    "jemalloc": ("jemalloc", {}),
}
LENGTHS = (48, 1600, 100, 800, 200, 400)  # tokens of a prompt
STEPS = 6
TRAIN = """
import json, resource, sys
from rloo_memory import host_allocator
from rloo_memory.device import status_bytes
from rloo_memory.launch import __main__ as launch
code = launch.main()
used = resource.getrusage(resource.RUSAGE_SELF)
print("\\n" + json.dumps([status_bytes("VmRSS"), used.ru_utime + used.ru_stime, *host_allocator.mapped().values()]))
sys.exit(code)
"""


class Trained:
    """Trainings of one model and dataset, each in a process of its own."""

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        """Raises `ConfigError` for an allocator that is not there: now, not after the first trainings."""
        from experiments.workload import run_models
        from rloo_memory import data

        for setting in {ALLOCATORS[way][0] for way in ways} - {"system"}:
            host_allocator.find(setting)
        self.folder = Path(tempfile.mkdtemp())
        documents = data.load_documents("builtin")
        config = cfg.resolve("shared", 4, "bench", "cpu", vocab_size=16_000)
        self.model, _, tokenizer = run_models.prepare(config, documents)
        pieces = {length: data.build_prompts(documents, tokenizer, length) for length in LENGTHS}
        prompts = [pieces[length][i] for i in range(8) for length in LENGTHS]
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (self.folder / "prompts.jsonl").write_text(lines)

    def sample(self, way: str) -> dict[str, float]:
        """The largest VmHWM of any phase of the training, VmRSS after it, seconds from the first rollout's start to
        the last update's end, and the process's CPU time. Raises RuntimeError where the training fails."""
        setting, variables = ALLOCATORS[way]
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            settings = {
                "host_allocator": setting,
                "dataset_name": self.folder / "prompts.jsonl",
                "reward_funcs": "letters",
                "output_dir": out,
                "max_steps": STEPS,
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
                env={**os.environ, **variables, "MODEL_PATH": str(self.model), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            if result.returncode:
                raise RuntimeError((result.stderr.strip() or "no message").splitlines()[-1])
            end, cpu_seconds, *library = json.loads(result.stdout.splitlines()[-1])
            if library and setting == "system":
                raise RuntimeError(f"{library[0]} was loaded")
            phases = [row for row in read_csv(Path(out, "memory_phases.csv")) if row["phase"] != "load"]
        return {
            "peak_resident_bytes": max(int(row["peak_resident_bytes"]) for row in phases),
            "end_resident_bytes": end,
            "training_seconds": round(float(phases[-1]["end"]) - float(phases[0]["start"]), 2),
            "cpu_seconds": round(cpu_seconds, 2),
        }

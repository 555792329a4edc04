"""The planner beside torch's real allocator on the emulated device, with and without expandable segments.

    .venv-cuda/bin/python tests/cuda/planner.py [CASE ...]
    .venv-cuda/bin/python tests/cuda/planner.py --smaller CASE True|False GIB    # expandable segments, device

Cases are those of `experiments.checks.planner_check`, at its shape, with completions of 48 tokens in place of 256.
Each is a process of its own; half an hour for all below. Writes results/emulated-cuda/planner.csv, a row a case and
allocator: bytes of the phase that is predicted to be the highest, and what torch reserved by the end of the second
update. Of cases that are named, the rows are replaced. --smaller says whether a case trains on a device of that size,
and adds a row to smaller_devices.csv there.
"""

import csv
import json
import subprocess
import sys
from importlib.metadata import version

import device

TABLE = device.ROOT / "results" / "emulated-cuda" / "planner.csv"
CASES = (
    "stock-k8", "stock-k8-bf16", "stock-k8-lora", "accumulate-k8", "shared-k8", "shared-k8-bf16", "shared-k8-lora",
    "shared-parts", "shared-parts-lora", "stock-k8-offload-activations", "shared-k8-offload-activations",
    "shared-k8-offload-reference",
)  # fmt: skip
SMALLER = TABLE.with_name("smaller_devices.csv")
COMPLETION = 48  # tokens: each is a step of generation, whose operators are run one by one here


def in_a_process(case: str, expandable: bool, gib: float = 140) -> dict:
    """The row of a case on a device of that size. Raises SystemExit where it fails."""
    environment = device.environment(
        "ints",
        gib=gib,
        copy_limit=2**20,
        PYTORCH_ALLOC_CONF=f"expandable_segments:{expandable}",
        TORCH_CUDNN_SDPA_DEPRIORITIZED=1,
    )
    command = [sys.executable, "-W", "ignore", __file__, "--here", case]
    result = subprocess.run(command, cwd=device.ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{case}: {result.stderr[-3000:]}")
    return {"case": case, "expandable_segments": expandable, **json.loads(result.stdout.splitlines()[-1])}


def here(case: str) -> dict:
    """The highest phase of a case; bytes."""
    from experiments.checks import planner_check
    from experiments.commit import source_commit
    from rloo_memory.plan import predict
    from rloo_memory.plan.accuracy import reserve

    shape, vocab_size, prompt, _ = planner_check.WORKLOADS["cuda"]
    planner_check.WORKLOADS["cuda"] = (shape, vocab_size, prompt, COMPLETION)
    of_phases = {}

    def predicted(*args):
        prediction = predict.predict(*args)
        of_phases.update({phase.phase: phase for phase in prediction.phases})
        return prediction

    planner_check.predict = predicted
    row = max(planner_check.check_here(case, "cuda"), key=lambda row: row["predicted_bytes"])
    return {
        "phase": row["phase"],
        "predicted_bytes": row["predicted_bytes"],
        "allocated_bytes": row["measured_bytes"],
        "reserved_bytes": row["reserved_bytes"],
        "comes_and_goes_bytes": reserve.comes_and_goes(of_phases[row["phase"]]),
        "prompt_tokens": row["prompt_tokens"],
        "completion_tokens": COMPLETION,
        "torch_version": version("torch"),
        "transformers_version": version("transformers"),
        "commit": source_commit(),
    }


def smaller(case: str, expandable: str, gib: str) -> None:
    try:
        in_a_process(case, expandable == "True", float(gib))
        outcome = "trained"
    except SystemExit as failure:
        if "OutOfMemoryError" not in str(failure):
            raise
        outcome = "out of memory"
    with SMALLER.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow([case, expandable, gib, outcome])
    print(f"{case}, expandable segments {expandable}, {gib} GiB: {outcome}")


def main(cases: list[str]) -> None:
    rows = []
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            rows = list(csv.DictReader(file))
    for case in cases or CASES:
        found = [in_a_process(case, expandable) for expandable in (False, True)]
        rows = [row for row in rows if row["case"] != case] + found
        rows.sort(key=lambda row: CASES.index(row["case"]))
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, found[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        for row in found:
            sizes = ", ".join(f"{name[:-6]} {int(row[name]) / 2**30:.2f}" for name in row if name.endswith("_bytes"))
            print(f"{case}, expandable segments {row['expandable_segments']}, {row['phase']}: {sizes} GiB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(here(sys.argv[2])))
    elif sys.argv[1:2] == ["--smaller"]:
        smaller(*sys.argv[2:])
    else:
        main(sys.argv[1:])

"""A table of ways to compute one group's log-probabilities: results/<machine>/rivals/*.csv."""

from pathlib import Path

from visualization.files import LoadError, read_rows
from visualization.pages.lines import markdown
from visualization.runs import MIB

NUMBERS = ("prompt_tokens", "completion_tokens", "k", "score_seconds", "train_seconds", "train_peak_bytes")
NAMES = {
    "whole": "whole rows (stock)",
    "shared": "prefix sharing, all together",
    "shared-2": "prefix sharing, two a pass",
}


def rivals_table(folder: Path) -> str:
    """For each workload: median seconds and how many times faster than whole rows, peak, and difference of gradients.

    Raises LoadError where there is nothing to show.
    """
    paths = sorted((folder / "rivals").glob("*.csv"))
    if not paths:
        raise LoadError(f"{folder}/rivals: no results; run python -m experiments.evidence.rivals")
    parts = []
    for path in paths:
        rows = read_rows(path, (*NUMBERS, "gradient_difference"), "experiments.evidence.rivals")
        first = rows.iloc[0]
        prompt, completion, k = first.prompt_tokens, first.completion_tokens, first.k
        whole = rows[rows.way == "whole"]
        ratio = k * (prompt + completion) / (prompt + k * completion)
        lines = [
            f"*CPU: {first.device_name} · torch {first.torch_version} · transformers {first.transformers_version} · "
            f"commit {first.commit[:10]} · {first['shape']}*",
            "",
            f"Prompt {prompt:,}, completions {completion:,}, k = {k}: token ratio {ratio:.2f}. Median of "
            f"{len(whole)} alternating repeats:",
            "",
        ]
        table = []
        for way in rows.way.unique():
            mine = rows[rows.way == way]
            name = NAMES.get(way, way)
            if way == "prefix-grouper":
                name = f"`prefix-grouper` {first.prefix_grouper_version}"
            cells = [name]
            for column in ("score_seconds", "train_seconds"):
                seconds = mine[column].median()
                faster = f" ({whole[column].median() / seconds:.2f} x)" if way != "whole" else ""
                cells.append(f"{seconds:.2f}{faster}")
            differs = "" if way == "whole" else f"{mine.gradient_difference.max():.0e}"
            cells += [f"{mine.train_peak_bytes.median() / MIB:.0f}", differs]
            table.append(cells)
        header = ["", "score, s", "train, s", "train peak above start, MiB", "gradient differs by"]
        parts.append("\n".join([*lines, *markdown(header, table)]))
    return "\n\n".join(parts) + "\n"

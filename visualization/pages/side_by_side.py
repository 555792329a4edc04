"""Tables of what `python -m experiments.bench` measured side by side: results/<machine>/bench.csv."""

import math
from pathlib import Path

import pandas as pd

from visualization.files import LoadError, read_csv
from visualization.pages.lines import commits_in_short, markdown, signed
from visualization.runs import DEVICE_WORDS, GIB, MIB, span
from visualization.seconds import MARK, Seconds

PROGRAM = "run python -m experiments.bench"
CELL = ["model", "prompt_tokens", "completion_tokens", "k"]
NUMBERS = (*CELL[1:], "median", "low", "high", "repeats")
PHASES = ("generate", "score", "train")
STEP = (*PHASES, "optimizer")
NAMES = {
    "whole": "whole rows (stock)",
    "one-row": "all in one row (`trl/first`)",
    "shared": "prefix sharing, all together",
    "shared-2": "prefix sharing, two a pass",
    "shared-micro-2": "prefix sharing, two a micro-batch",
}
IN_SHORT = {"shared": "together", "shared-2": "two a pass", "shared-micro-2": "two a micro-batch"}
FAMILIES = {
    "gated-deltanet": "Gated DeltaNet (Qwen3.5)",
    "mamba-2": "Mamba-2 (Bamba)",
    "images": "One image of 1,024 tokens (Qwen2.5-VL)",
}
COMPLETIONS = {"sampled": "sampled", "given": "given", "ragged": "given, of different lengths"}


class Way:
    """What one way of a cell gave: a row a metric, or why there is none."""

    def __init__(self, rows: pd.DataFrame):
        self.failure = next((text for text in rows.failure if text), "")
        self.metrics = {row.metric: row for row in rows.itertuples() if row.metric}

    def seconds(self, metric: str) -> Seconds:
        """Of the repeats; whether they are too far apart is in the lowest and the highest."""
        row = self.metrics.get(metric)
        return Seconds.of((row.low, row.median, row.high) if row else ())

    def median(self, metric: str) -> float | None:
        row = self.metrics.get(metric)
        return row.median if row else None


def read_bench(folder: Path, measurement: str) -> pd.DataFrame:
    """The rows of a measurement, or of all whose names begin so. Raises LoadError where there are none."""
    remedy = f"{PROGRAM} {measurement}"
    rows = read_csv(folder / "bench.csv", NUMBERS, remedy)
    rows = rows[rows.measurement.str.startswith(measurement)]
    if rows.empty:
        raise LoadError(f"{folder / 'bench.csv'}: has nothing of {measurement}; {remedy}")
    return rows


def measured(folder: Path) -> set[str]:
    """The names of the tables that bench.csv has something for."""
    if not (folder / "bench.csv").exists():
        return set()
    names = read_csv(folder / "bench.csv", NUMBERS, PROGRAM).measurement
    return {"cells" if name.startswith("cells-") else name for name in names}


def ways_of(rows: pd.DataFrame) -> dict[str, Way]:
    """Of one cell, in the order of the file."""
    return {way: Way(mine) for way, mine in rows.groupby("way", sort=False)}


def measured_on(rows: pd.DataFrame) -> str:
    """What rows of one machine were measured on, in words, with every commit."""
    row = rows.iloc[0]
    versions = f"torch {row.torch_version} · transformers {row.transformers_version}"
    return f"{DEVICE_WORDS[row.device_kind]}: {row.device_name} · {versions} · commit {commits_in_short(rows.commit)}"


def how_often(rows: pd.DataFrame) -> str:
    """How often each cell was measured, in words."""
    counts = rows.repeats[rows.metric != ""].astype(int)
    return f"median of {span(counts)} alternating repeats" if counts.max() > 1 else "measured once"


def beside(ours: Seconds, theirs: Seconds | None, digits: int, unit: str = "") -> str:
    """The median in seconds, and how many times faster it is than `theirs`."""
    ratio = ours.times_faster(theirs)
    return f"{ours.shown(digits)}{unit}" + (f" ({ratio:.{digits}f} x)" if ratio else "")


def times(ratio: float) -> str:
    """A ratio of medians in words; NaN where repeats are too far apart."""
    return MARK if math.isnan(ratio) else f"{ratio:.2f} x"


def failed(name: str, way: Way, columns: int) -> list[str]:
    """The row of a way that gave no figure."""
    return [name, way.failure.replace("|", "/")[:100], *[""] * (columns - 2)]


def rivals_table(folder: Path) -> str:
    """For each workload: median seconds and how many times faster than whole rows, peak, and difference of gradients.

    Raises LoadError where there is nothing to show.
    """
    header = ["", "score, s", "train, s", "train peak above start, MiB", "gradient differs by"]
    parts = []
    for (_, prompt, completion, k), rows in read_bench(folder, "rivals").groupby(CELL, sort=False):
        ratio = k * (prompt + completion) / (prompt + k * completion)
        ways, table = ways_of(rows), []
        for name, way in ways.items():
            shown, theirs = NAMES.get(name, f"`{name}`"), None if name == "whole" else ways["whole"]
            if not way.metrics:
                table.append(failed(shown, way, len(header)))
                continue
            row = [shown]
            for metric in ("score_seconds", "train_seconds"):
                row.append(beside(way.seconds(metric), theirs and theirs.seconds(metric), 2))
            differs = f"{way.metrics['gradient_difference'].high:.0e}" if theirs else ""
            table.append([*row, f"{way.median('train_peak_bytes') / MIB:.0f}", differs])
        about = (
            f"Prompt {prompt:,.0f}, completions {completion:,.0f}, k = {k:.0f}: token ratio {ratio:.2f}, "
            f"{how_often(rows)}:"
        )
        parts.append("\n".join([f"*{measured_on(rows)} · qwen3-8-layers*", "", about, "", *markdown(header, table)]))
    return "\n\n".join(parts) + "\n"


def families_table(folder: Path) -> str:
    """For each family: median seconds and peak of each phase, images encoded, and difference of gradients.

    Raises LoadError where there is nothing to show.
    """
    rows = read_bench(folder, "families")
    table = []
    for (family, prompt, completion, k), mine in rows.groupby(CELL, sort=False):
        ways = ways_of(mine)
        title = f"{FAMILIES.get(family, family)}, prompt {prompt:,.0f}, completions {completion:,.0f}, k = {k:.0f}"
        for name, way in ways.items():
            theirs = None if name == "whole" else ways["whole"]
            row = ["" if theirs else title, NAMES.get(name, name)]
            for phase in PHASES:
                metric = f"{phase}_seconds"
                took = beside(way.seconds(metric), theirs and theirs.seconds(metric), 1, " s")
                row.append(f"{took}, {way.median(f'{phase}_peak_bytes') / MIB:,.0f} MiB")
            images = way.median("images_encoded")
            row += ["" if images is None else f"{images:.0f}"]
            table.append([*row, f"{way.metrics['gradient_difference'].high:.0e}" if theirs else ""])
    header = ["", "", *PHASES, "images encoded", "gradient differs by"]
    about = (
        f"*{measured_on(rows)} · float32, 8 layers of width 256 · {how_often(rows)} · "
        "peak resident above the start of the phase*"
    )
    return "\n".join([about, "", *markdown(header, table)]) + "\n"


def faster(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    """How many times faster each way is than whole rows in a phase or in a `step`, by model, prompt and completion
    tokens. NaN where repeats are too far apart. Raises KeyError for a way that is missing."""
    took = sum(seconds_of(rows, each) for each in PHASES) if phase == "step" else seconds_of(rows, phase)
    return took["whole"].to_numpy()[:, None] / took[list(IN_SHORT)]


def seconds_of(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Medians by model, prompt and completion tokens, a column a way. All that share the prompt generate alike."""
    mine = rows[rows.metric == f"{phase}_seconds"]
    answers = [Seconds.of((row.low, row.median, row.high)).answer for row in mine.itertuples()]
    answers = mine.assign(answer=[math.nan if answer is None else answer for answer in answers])
    took = answers.set_index([*CELL[:3], "way"]).answer.unstack("way")
    return took.assign(**dict.fromkeys(IN_SHORT, took["shared"])) if phase == "generate" else took


def limits_of(rows: pd.DataFrame) -> pd.Series:
    """The limit of training, by model, prompt and completion tokens."""
    return rows[rows.metric == "train_limit"].set_index(CELL[:3])["median"]


def worth_table(folder: Path) -> str:
    """For each model and length: the limit of training, and how many times faster training and whole step are.

    Raises LoadError where there is nothing to show.
    """
    rows = read_bench(folder, "worth")
    train, step, limits = faster(rows, "train"), faster(rows, "step"), limits_of(rows)
    table = [
        [model, f"{prompt:,.0f}", f"{completion:,.0f}", f"{limits[model, prompt, completion]:.2f} x"]
        + [times(ratios.loc[model, prompt, completion][way]) for ratios in (train, step) for way in IN_SHORT]
        for model, prompt, completion in train.index
    ]
    header = ["model", "prompt", "completion", "limit of training"]
    header += [f"{what}, {way}" for what in ("training", "step") for way in IN_SHORT.values()]
    about = f"*{measured_on(rows)} · float32 · k = {rows.k.iloc[0]:.0f} · {how_often(rows)}*"
    return "\n".join([about, "", *markdown(header, table)]) + "\n"


def decoding_table(folder: Path) -> str:
    """For each model, length and k: seconds of generation with a cache a row and with one that shares the prompt.

    Raises LoadError where there is nothing to show.
    """
    rows = read_bench(folder, "decoding")
    table = []
    for (model, prompt, completion, k), mine in rows.groupby(CELL):
        whole, shared = (ways_of(mine)[way].seconds("generate_seconds") for way in ("whole", "shared"))
        sizes = [model, *(f"{size:,.0f}" for size in (prompt, completion, k))]
        table.append([*sizes, whole.shown(2), shared.shown(2), times(shared.times_faster(whole) or math.nan)])
    header = ["model", "prompt", "completion", "k", "a cache a row, s", "prompt shared, s", "times faster"]
    about = f"*{measured_on(rows)} · float32 · {how_often(rows)}*"
    return "\n".join([about, "", *markdown(header, table)]) + "\n"


def allocators_table(folder: Path) -> str:
    """Resident memory and CPU seconds of one training with each host allocator. Raises LoadError where there is
    nothing to show."""
    rows = read_bench(folder, "allocators")
    ways, table = ways_of(rows), []
    for name, way in ways.items():
        row = [f"`{name}`"]
        for metric in ("peak_resident_bytes", "end_resident_bytes"):
            found, usual = way.metrics[metric], ways["system"].median(metric)
            change = "" if name == "system" else f", {signed(found.median / usual - 1, digits=0)}"
            row.append(f"{found.median / MIB:,.0f} ({found.low / MIB:,.0f} to {found.high / MIB:,.0f}){change}")
        cpu = way.metrics["cpu_seconds"]
        table.append([*row, f"{cpu.median:.1f} ({cpu.low:.1f} to {cpu.high:.1f})"])
    header = ["allocator", "peak resident, MiB", "resident at the end, MiB", "CPU time of the process, s"]
    about = f"*{measured_on(rows)} · {how_often(rows)} (lowest to highest)*"
    return "\n".join([about, "", *markdown(header, table)]) + "\n"


def sampler_table(folder: Path) -> str:
    """What samples alone would have missed of a peak. Raises LoadError where there is nothing to show."""
    rows = read_bench(folder, "sampler")
    table = []
    for asked, way in ways_of(rows).items():
        sizes = [("achieved_interval_ms", 1), ("longest_gap_ms", 1), ("missed_bytes", MIB)]
        table.append([asked, *(in_range(way.metrics[metric], unit) for metric, unit in sizes)])
        table[-1].append(f"{way.median('peak_bytes') / MIB:.0f}")
    header = ["asked for", "achieved, ms", "longest gap, ms", "missed of the peak, MiB", "peak, MiB"]
    intro = f"`shared`, scale {rows.model.iloc[0]}, k = {rows.k.iloc[0]:.0f}; lowest to highest of all repeats:"
    return "\n".join([f"*{measured_on(rows)}*", "", intro, "", *markdown(header, table)]) + "\n"


def in_range(row, unit: float) -> str:
    low, high = f"{row.low / unit:.1f}", f"{row.high / unit:.1f}"
    return low if low == high else f"{low} to {high}"


def cells_table(folder: Path) -> str:
    """Ways to train, shape by shape, of the measurements `cells-...`. Raises LoadError where there is nothing to
    show."""
    rows = read_bench(folder, "cells-")
    on_gpu = rows.device_kind.iloc[0] == "cuda"
    shown = ("allocated", "reserved", "device") if on_gpu else ("resident",)
    header = ["", *(f"{phase}, s" for phase in STEP), "step, s", *(f"{size}, GiB" for size in shown), "predicted, GiB"]
    parts = []
    for (model, prompt, completion, k), mine in rows.groupby(CELL, sort=False):
        shape, _, completions = model.partition("/")
        ways = ways_of(mine)
        stock = [way for name, way in ways.items() if name.startswith("stock")]
        fastest = Seconds.of([min(filter(None, (way.seconds("step_seconds").answer for way in stock)), default=None)])
        smallest = min(filter(None, (peak_of(way, shown[0]) for way in stock)), default=None)
        table = []
        for name, way in ways.items():
            if not way.metrics:
                table.append(failed(f"`{name}`", way, len(header)))
                continue
            ours = not name.startswith("stock")
            row = [f"`{name}`", *(way.seconds(f"{phase}_seconds").shown(3) or "given" for phase in STEP)]
            row.append(beside(way.seconds("step_seconds"), fastest if ours else None, 3))
            peaks = {size: peak_of(way, size) for size in (*shown, "predicted")}
            row += [in_gib(peaks[size]) for size in shown]
            if ours and smallest and peaks[shown[0]]:
                row[6] += f" ({smallest / peaks[shown[0]]:.1f} x)"
            error = f" ({signed(peaks['predicted'] / peaks[shown[0]] - 1)})" if on_gpu and peaks["predicted"] else ""
            table.append([*row, in_gib(peaks["predicted"]) + error])
        title = (
            f"{shape}, P = {prompt:,.0f}, C = {completion:,.0f}, k = {k:.0f}, completions {COMPLETIONS[completions]}"
        )
        parts.append("\n".join([f"{title}:", "", *markdown(header, table)]))
    intro = (
        "The fork's trainer on random weights; `stock` has all of the fork switched off. Medians; in brackets how "
        "many times less than the least of the ways of `stock`, and the error of the prediction:"
    )
    return "\n\n".join([f"*{measured_on(rows)}*", intro, *parts]) + "\n"


def peak_of(way: Way, size: str) -> float | None:
    """The highest of the phases' peaks, bytes."""
    return max(filter(None, (way.median(f"{phase}_{size}_bytes") for phase in STEP)), default=None)


def in_gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"

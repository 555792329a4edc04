"""Tables of what `python -m experiments.bench` measured side by side: results/<machine>/bench.csv."""

from pathlib import Path

import pandas as pd

from visualization.results import MARK, MIB, apart, seconds, times
from visualization.tables.text import how_often, markdown, measured_on, token_ratio

CELL = ["model", "prompt_tokens", "completion_tokens", "k"]
PHASES = ("generate", "score", "train")
NAMES = {
    "whole": "whole rows (stock)",
    "one-row": "all in one row (`trl/first`)",
    "shared": "prefix sharing, all together",
    "shared-2": "prefix sharing, two a pass",
    "shared-micro-2": "prefix sharing, two a micro-batch",
}
# Ways of groups whose completions differ in length: what each is compared with, and is called
BESIDE = {
    "shared": ("whole", "together"),
    "shared-micro-2": ("whole-micro-2", "two a micro-batch"),
    "whole-2": ("whole", "whole rows by length"),
}
ALIKE = {"stock": "whole rows", "shared-all-each": "each prompt once", "shared-all": "what they begin with once, too"}
IN_SHORT = {"shared": "together", "shared-micro-2": "two a micro-batch"}
FAMILIES = {
    "bench": "plain attention (Qwen3)",
    "windows": "windows of 512 tokens (Gemma 3)",
    "sinks": "sinks, windows of 128 (gpt-oss, 2 layers)",
    "experts": "32 experts with LoRA (Qwen3-MoE, 4 layers)",
    "gated-deltanet": "Gated DeltaNet (Qwen3.5)",
    "images": "one image of 1,024 tokens (Qwen2.5-VL)",
}


def read_bench(folder: Path, measurement: str) -> pd.DataFrame:
    """The rows of a measurement."""
    rows = pd.read_csv(folder / "bench.csv", dtype={"metric": object, "failure": object})
    rows = rows[rows.measurement == measurement].fillna({"metric": "", "failure": ""})
    if rows.empty:
        remedy = f"run python -m experiments.bench {measurement}"
        raise SystemExit(f"error: {folder / 'bench.csv'}: has nothing of {measurement}; {remedy}")
    return rows.astype(dict.fromkeys(CELL[1:], int))


def measured(folder: Path) -> set[str]:
    path = folder / "bench.csv"
    return set(pd.read_csv(path).measurement) if path.exists() else set()


def ways_of(rows: pd.DataFrame) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Of one cell: way -> metric -> median, lowest and highest. A way that failed has no metric."""
    found: dict[str, dict] = {way: {} for way in rows.way.unique()}
    for row in rows[rows.metric != ""].itertuples():
        found[row.way][row.metric] = row.median, row.low, row.high
    return found


def beside(ours: tuple, theirs: tuple | None, digits: int, unit: str = "") -> str:
    """The median in seconds, and how many times faster it is than `theirs`."""
    ratio = times(ours, theirs) if theirs else float("nan")
    return seconds(*ours, digits) + unit + ("" if pd.isna(ratio) else f" ({ratio:.{digits}f} x)")


def in_words(ratio: float, rows: pd.DataFrame, *ways: str) -> str:
    """A ratio of medians of these ways of one cell, whose rows these are. Where there is none: why a way failed,
    nothing where one was not measured, a mark where repeats are too far apart."""
    done = set(rows.way[rows.metric != ""])
    if lost := [way for way in ways if way not in done]:
        return failure_of(rows, lost[0])
    return MARK if pd.isna(ratio) else f"{ratio:.2f} x"


def failure_of(rows: pd.DataFrame, way: str) -> str:
    """Of a cell's way without samples; "" of one that was not measured."""
    said = rows[rows.way == way].failure
    return "" if said.empty else said.iloc[0].replace("|", "/")[:100]


def rivals(folder: Path) -> str:
    """For each workload: seconds and how many times faster than whole rows, peak, and difference of gradients."""
    header = ["", "score, s", "train, s", "train peak above start, MiB", "gradient differs by"]
    rows = read_bench(folder, "rivals")
    parts = [f"{measured_on(rows, 'qwen3-8-layers')}\n"]
    for (_, prompt, completion, k), mine in rows.groupby(CELL, sort=False):
        ratio = token_ratio(prompt, completion, k)
        ways, table = ways_of(mine), []
        for name, way in ways.items():
            shown = NAMES.get(name, f"`{name}`")
            if not way:
                table.append([shown, failure_of(mine, name)])
                continue
            theirs = ways.get("whole", {}) if name != "whole" else {}
            row = [beside(way[metric], theirs.get(metric), 2) for metric in ("score_seconds", "train_seconds")]
            differs = f"{way['gradient_difference'][2]:.0e}" if theirs else ""
            table.append([shown, *row, f"{way['train_peak_bytes'][0] / MIB:.0f}", differs])
        about = f"Prompt {prompt:,}, completions {completion:,}, k = {k}: token ratio {ratio:.2f}, {how_often(mine)}:"
        parts.append(f"{about}\n\n{markdown(header, table)}\n")
    return "\n".join(parts)


def lengths(folder: Path) -> str:
    """For each group: its lengths, their token ratio, and how many times faster sharing is than whole rows that go
    through the model in as many rows at a time."""
    rows = read_bench(folder, "lengths")
    table = []
    for (model, prompt, mean, k), mine in rows.groupby(CELL, sort=False):
        ways, name = ways_of(mine), model.partition("/")[0]
        whole = ways.get("whole")
        if not whole:  # which has the lengths, too
            table.append([name, f"{prompt:,}", f"mean {mean:,}", str(k), failure_of(mine, "whole")])
            continue
        shortest, longest = (f"{whole[f'{which}_tokens'][0]:,.0f}" for which in ("shortest", "longest"))
        completions = f"{mean:,}" if shortest == longest else f"{shortest} to {longest}, mean {mean:,}"
        row = [name, f"{prompt:,}", completions, str(k), f"{whole['token_ratio'][0]:.2f}"]
        for way, (other, _) in BESIDE.items():
            for metric in ("score_seconds", "train_seconds"):
                ours, theirs = (ways.get(each, {}).get(metric) for each in (way, other))
                ratio = times(ours, theirs) if ours and theirs else float("nan")
                row.append(in_words(ratio, mine, way, other))
        table.append(row)
    header = ["model", "prompt", "completions", "k", "token ratio"]
    header += [f"{phase}, {words}" for _, words in BESIDE.values() for phase in ("score", "train")]
    return f"{measured_on(rows, 'float32', how_often(rows))}\n\n{markdown(header, table)}\n"


def alike(folder: Path) -> str:
    """For each training: tokens, seconds and peak of each phase."""
    rows = read_bench(folder, "alike")
    table = []
    for (model, prompt, completion, _), mine in rows.groupby(CELL, sort=False):
        ways, common = ways_of(mine), int(model.partition("/")[2])
        for place, (name, way) in enumerate(ways.items()):
            title = "" if place else f"{common:,} + {prompt - common:,}, completions {completion:,}"
            row = [title, ALIKE[name]]
            if not way:
                table.append([*row, failure_of(mine, name)])
                continue
            row.append(f"{way['forward_tokens'][0]:,.0f}")
            theirs = ways.get("shared-all-each", {}) if name == "shared-all" else {}
            metrics = [f"{phase}_seconds" for phase in ("step", *PHASES)]
            row += [beside(way[metric], theirs.get(metric), 2) for metric in metrics]
            table.append([*row, " / ".join(f"{way[f'{phase}_allocated_bytes'][0] / MIB:,.0f}" for phase in PHASES)])
    header = ["prompts begin with + own", "", "tokens of a forward", "step, s", *(f"{phase}, s" for phase in PHASES)]
    header += [f"peak of all tensors ({', '.join(PHASES)}), MiB"]
    precision = "float32" if rows.device_kind.iloc[0] == "cpu" else "bfloat16"
    about = f"four prompts, k = {rows.k.iloc[0]}, a prompt a micro-batch"
    return f"{measured_on(rows, precision, about, how_often(rows))}\n\n{markdown(header, table)}\n"


def families(folder: Path) -> str:
    """For each family: median seconds and peak of each phase, images encoded, and difference of gradients."""
    rows = read_bench(folder, "families")
    table = []
    for (family, *_), mine in rows.groupby(CELL, sort=False):
        ways = ways_of(mine)
        for name, way in ways.items():
            theirs = ways.get("whole", {}) if name != "whole" else {}
            row = ["" if name != "whole" else FAMILIES.get(family, family), NAMES.get(name, name)]
            if not way:
                table.append([*row, failure_of(mine, name)])
                continue
            for phase in PHASES:
                took = beside(way[f"{phase}_seconds"], theirs.get(f"{phase}_seconds"), 1, " s")
                row.append(f"{took}, {way[f'{phase}_peak_bytes'][0] / MIB:,.0f} MiB")
            images = f"{way['images_encoded'][0]:.0f}" if "images_encoded" in way else ""
            table.append([*row, images, f"{way['gradient_difference'][2]:.0e}" if theirs else ""])
    header = ["", "", *PHASES, "images encoded", "gradient differs by"]
    about = (lengths_of(rows), how_often(rows), "float32, width 256", "peak resident above the start of the phase")
    return f"{measured_on(rows, *about)}\n\n{markdown(header, table)}\n"


def kinds(folder: Path) -> str:
    """For each family but the plain one: how many times faster its three phases together are with shared prompts, and
    the highest peak of one."""
    rows = read_bench(folder, "families").query("model != 'bench'")
    table = []
    for (family, *_), mine in rows.groupby(CELL, sort=False):
        found, title = ways_of(mine), FAMILIES.get(family, family)
        ways = [found.get(name) for name in ("whole", "shared-micro-2")]
        if not all(ways):
            table.append([title, failure_of(mine, "shared-micro-2" if ways[0] else "whole")])
            continue
        theirs, ours = ([sum(way[f"{phase}_seconds"][end] for phase in PHASES) for end in range(3)] for way in ways)
        ratio = times(ours, theirs)
        most = [max(way[f"{phase}_peak_bytes"][0] for phase in PHASES) / MIB for way in ways]
        row = [seconds(*theirs, 1), seconds(*ours, 1), "" if pd.isna(ratio) else f"{ratio:.1f}"]
        table.append([title, *row, *map("{:,.0f}".format, most)])
    header = ["", "TRL, s", "shared, s", "times faster", "TRL, MiB", "shared, MiB"]
    return f"{measured_on(rows, lengths_of(rows), how_often(rows))}\n\n{markdown(header, table)}\n"


def lengths_of(rows: pd.DataFrame) -> str:
    """Of cells that all have the same."""
    prompt, completion, k = rows[CELL[1:]].drop_duplicates().iloc[0]
    return f"prompt {prompt:,}, completions {completion:,}, k = {k}"


def faster(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    """How many times faster each way is than whole rows in a phase or in a `step`, by cell."""
    took = sum(seconds_of(rows, each) for each in PHASES) if phase == "step" else seconds_of(rows, phase)
    took = took.reindex(columns=["whole", *IN_SHORT])
    return took[list(IN_SHORT)].rdiv(took["whole"], axis="index")


def seconds_of(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Medians by cell, a column a way. All that share the prompt generate alike. NaN where a way failed or was not
    measured, and where repeats are too far apart."""
    mine = (rows.metric == f"{phase}_seconds") & ~apart(rows.low, rows.high)
    took = rows["median"].where(mine).groupby([rows[name] for name in (*CELL, "way")]).max().unstack("way")
    return took.assign(**dict.fromkeys(IN_SHORT, took.get("shared", float("nan")))) if phase == "generate" else took


def worth(folder: Path) -> str:
    """For each model, length and k: the token ratio, and how many times faster training and whole step are."""
    rows, table = read_bench(folder, "worth"), []
    train, step = (faster(rows, phase) for phase in ("train", "step"))
    for cell, mine in rows.groupby(CELL):
        row = [cell[0], *(f"{size:,}" for size in cell[1:]), f"{token_ratio(*cell[1:]):.2f}"]
        row += [in_words(train.loc[cell, way], mine, "whole", way) for way in IN_SHORT]
        row += [in_words(step.loc[cell, way], mine, "whole", way, "shared") for way in IN_SHORT]
        table.append(row)
    header = ["model", "prompt", "completion", "k", "token ratio"]
    header += [f"{what}, {way}" for what in ("training", "step") for way in IN_SHORT.values()]
    return f"{measured_on(rows, 'float32', how_often(rows))}\n\n{markdown(header, table)}\n"


def decoding(folder: Path) -> str:
    """For each model, length and k: seconds of generation with a cache a row and with one that shares the prompt."""
    rows = read_bench(folder, "decoding")
    table = []
    for (model, *sizes), mine in rows.groupby(CELL):
        ways = {name: ways_of(mine).get(name, {}).get("generate_seconds") for name in ("whole", "shared")}
        took = [seconds(*found, 2) if found else failure_of(mine, name) for name, found in ways.items()]
        took.append(in_words(times(ways["shared"], ways["whole"]), mine) if all(ways.values()) else "")
        table.append([model, *(f"{size:,}" for size in sizes), *took])
    header = ["model", "prompt", "completion", "k", "a cache a row, s", "prompt shared, s", "times faster"]
    return f"{measured_on(rows, 'float32', how_often(rows))}\n\n{markdown(header, table)}\n"

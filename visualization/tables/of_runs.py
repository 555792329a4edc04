"""Tables of the runs of one scale, and what samples missed of all of them."""

from pathlib import Path

import pandas as pd

from visualization.published_2025 import PUBLISHED, PUBLISHED_BUDGET, PUBLISHED_PROMPT
from visualization.results import BASELINE, BENCH, GIB, IN_SHORT, LEAST, MIB, PHASES, Results, load, seconds, times
from visualization.tables.text import markdown, measured_on, range_of, signed, token_ratio, whole

REFERENCES = ("stock", "stock-compact")  # what a user of TRL has today: as released, with the LM head of a GPU


def summary(results: Results) -> str:
    """Seconds of a step, of the first one beside later ones, times faster than the first way, and peak above start, of
    the scale `bench`."""
    if BENCH not in set(results.own.scale):
        return ""
    cells, first, rows = results.cells.droplevel("k"), next(iter(IN_SHORT)), []
    for arm, name in IN_SHORT.items():
        if arm not in cells.index or not cells.ok[arm]:
            rows.append([name, cells.failure[arm] if arm in cells.index else "not run"])
            continue
        cell = cells.loc[arm]
        ratio = times(clocked(cell), clocked(cells.loc[first])) if first in cells.index else float("nan")
        steps, faster = (clocked(cell), clocked(cell, "first")), f"{ratio:.1f}"
        took = [seconds(*step, 1) + range_of(*step, 1, 0.1) for step in steps]
        rows.append([or_failure(cell, name), *took, "" if pd.isna(ratio) else faster, f"{cell.above_bytes / GIB:.2f}"])
    header = ["", "step, seconds", "the first one", "times faster", "peak above start, GiB"]
    if cells["first"].isna().all():
        header, rows = header[:2] + header[3:], [row[:2] + row[3:] for row in rows]
    return markdown(header, rows)


def peak_texts(results: Results) -> pd.DataFrame:
    """Rows arm, columns k: median peak above start, its range where noisy, its change against the baseline."""
    cells = results.cells

    def show(cell: pd.Series) -> str:
        above, low, high = (cell[f"above_bytes{end}"] / GIB for end in ("", "_low", "_high"))
        text = f"{above:.2f}" + range_of(above, low, high, 2, 0.02)  # where it is noisy
        base = cells.above_bytes.get((BASELINE, cell.k), float("nan"))
        change = f", {signed(cell.above_bytes / base - 1)}" if cell.arm != BASELINE and base >= LEAST else ""
        return or_failure(cell, text + change)

    table = cells.apply(show, axis=1).unstack(fill_value="not run").reindex(results.arms)
    return table.rename(columns=lambda k: f"k = {k}")


def peak(results: Results) -> str:
    """`peak_texts`, under what it is."""
    table = peak_texts(results)
    rows = [[f"`{arm}`", *row] for arm, row in zip(table.index, table.to_numpy(), strict=True)]
    intro = f"Peak memory above the start level, GiB (change against `{BASELINE}` at the same k):\n\n"
    return intro + markdown(["arm", *table.columns], rows)


def phase_peaks(results: Results) -> str:
    """Where the peak is: a row an arm and k, the median over finished runs of each phase's highest level, the highest
    phase in bold. On CUDA torch's allocated peak: what the device has in use does not fall between phases."""
    done = results.own[results.own.status == "ok"]
    resident = results.measure == "peak_resident_bytes"
    rows = results.phases[results.phases.step > 0].merge(done[["run_id", "arm", "k", "start_bytes"]], on="run_id")
    rows["level"] = rows.bytes - rows.start_bytes if resident else rows.peak_allocated_bytes.astype(float)
    highest = rows.groupby(["arm", "k", "run_id", "phase"])["level"].max() / GIB
    table = highest.groupby(["arm", "k", "phase"]).median().unstack().reindex(columns=PHASES)
    rows = []
    for (arm, k), row in table.reindex(results.cells.index).dropna(how="all").iterrows():
        levels = row.map("{:.2f}".format, na_action="ignore").fillna("")
        rows.append([f"`{arm}`", str(k), *levels.mask(row == row.max(), "**" + levels + "**")])
    what = "process resident memory above the start level" if resident else "torch's allocated peak"
    return f"Peak of each phase, GiB ({what}):\n\n" + markdown(["arm", "k", *PHASES], rows) if rows else ""


def audit(results: Results) -> str:
    """A row an arm: prompt tokens asked for and really fed, and GiB per 1,000 tokens at each k."""
    rows = []
    for arm, cells in results.cells.groupby(level="arm", sort=False):
        rates = [or_failure(cell, f"{cell.above_bytes / GIB / cell.tokens * 1000:.3f}") for cell in cells.itertuples()]
        tokens = whole(cells.asked.max()), whole(cells.fed.mean())
        rows.append([f"`{arm}`", ", ".join(map(str, cells.k)), *tokens, ", ".join(rates)])
    header = ["arm", "k", "prompt tokens requested", "prompt tokens fed (mean)"]
    header += ["GiB above start per 1,000 tokens in the batch"]
    return "Tokens asked for, tokens really fed, and the memory they took:\n\n" + markdown(header, rows)


def phases(results: Results) -> str:
    """Rows arm: seconds of each phase and of the step, how many times faster than the first of `REFERENCES`, and the
    peak; at the largest k that most arms were run at."""
    k = results.cells.k.mode().max()
    cells = results.cells.xs(k, level="k")
    known = [arm for arm in REFERENCES if arm in cells.index and cells.ok[arm]]
    reference = cells.loc[known[0]] if known else None
    rows = []
    for _, cell in cells.iterrows():
        beside = reference is not None and cell.arm != reference.arm
        row = [f"`{cell.arm}`"]
        for phase in ("generate", "score", "train", "step"):
            faster = times(clocked(cell, phase), clocked(reference, phase)) if beside else float("nan")
            text = seconds(*clocked(cell, phase), 1) or cell.failure or "not marked"
            row.append(text + ("" if pd.isna(faster) else f" ({faster:.1f} x)"))
        less = beside and reference.above_bytes >= LEAST and cell.ok
        part = f" (1/{reference.above_bytes / cell.above_bytes:.1f})" if less else ""
        rows.append([*row, f"{cell.above_bytes / GIB:.2f}{part}" if cell.ok else cell.failure])
    ratio = token_ratio(cells.fed.median(), cells.completion_tokens.median(), k)
    header = ["arm", "generate", "score (old and reference)", "train", "whole step", "peak above start, GiB"]
    brackets = f"; in brackets, how many times faster than `{known[0]}`, and which part of its peak" if known else ""
    which = " of the second step" if cells["first"].notna().any() else ""
    return f"At k = {k}{brackets}. The token ratio is {ratio:.2f}. Seconds{which}:\n\n" + markdown(header, rows)


def published(results: Results) -> str:
    """Peak above start in GiB, ours times the factor by which the scale was made smaller, theirs from their own file.

    The factor is the published card's 32 GiB over the run's budget, as vocabulary and budget shrink together. Empty
    for a scale with other prompts than the published 3,000 tokens.
    """
    both = PUBLISHED.merge(results.cells.reset_index(drop=True), on=["arm", "k"])
    both = both[(both.asked == PUBLISHED_PROMPT) & both.budget_bytes.notna()]
    if both.empty:
        return ""
    rows = []
    for cell in both.itertuples():
        factor = PUBLISHED_BUDGET / cell.budget_bytes
        ours = or_failure(cell, f"{cell.above_bytes * factor / GIB:.2f}")
        ended = [f"{cell.peak:.2f}", f"{cell.start:.2f}", f"{cell.above:.2f}"]
        out = ["out of memory", f"{cell.start:.2f}"]
        rows.append([f"`{cell.arm}`", str(cell.k), ours, *(out if pd.isna(cell.peak) else ended)])
    header = ["arm", "k", f"ours above start x {factor:g}, GiB"]
    header += [f"published {figure}, GiB" for figure in ("peak", "start level", "above start")]
    differ = "what differs besides is the card, the versions, and the pool's fragmentation"
    if results.measure == "peak_resident_bytes":
        differ = (
            "what differs besides: theirs is device-wide, with the pool's fragmentation and all that the CUDA context "
            "grows by, ours the pages of one process; theirs ran in bf16 autocast, ours in float32; and activations "
            "are not divided by the factor, so ours, multiplied by it, has too many of them"
        )
    return (
        "Ours, scaled up, beside what was published in 2025 (RTX 5090), above the start level on both sides:\n\n"
        f"{markdown(header, rows)}\n\nPublished figures were called GB and are GiB. Their start level is the last "
        f"sample before the first step, in the experiment's own file; {differ}."
    )


def sampler(folder: Path) -> str:
    """What samples alone would have missed of the peaks of a machine's runs."""
    runs = load(folder).runs
    most = runs.groupby("arm").peak_missed_bytes.max().dropna().sort_values(ascending=False) / MIB
    words = ", ".join(f"`{arm}` {missed:.0f}" for arm, missed in most.items() if missed >= 1)
    intro = "The most that samples every 50 ms missed in runs of this machine, MiB"
    return f"{measured_on(runs)}\n\n{intro}: {words}; of the others less than 1.\n"


def clocked(cell: pd.Series, phase: str = "step") -> tuple[float, float, float]:
    return cell[phase], cell[f"{phase}_low"], cell[f"{phase}_high"]


def or_failure(cell, text: str) -> str:
    """What a cell's runs that finished say, and beside it how many failed; alone where none finished."""
    return f"{text} ({cell.failure})" if cell.ok and cell.failure else text if cell.ok else cell.failure

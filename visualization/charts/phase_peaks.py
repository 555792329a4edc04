"""Bars of each arm's peak in each phase of a step."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from visualization import style
from visualization.runs import GIB, RESIDENT, Cell, Run, cells, in_order

PHASES = ("generate", "score", "train", "optimizer")


def phase_peaks(runs: Sequence[Run]) -> Figure | None:
    """Per arm the peak in each phase (median over repeats, GiB) at the largest k that every arm finishes.

    CPU: resident memory above the start level. CUDA: torch's allocated peak, because the device's used level does not
    fall between phases. Arms that never finish are left out and named. None where no run has phases.
    """
    done = [run for run in runs if run.peak_bytes is not None and len(run.phases)]
    if not done:
        return None
    arms = in_order(run.arm for run in done)
    ks = {run.k for run in done}
    common = [k for k in ks if {run.arm for run in done if run.k == k} == set(arms)]
    k = max(common or ks, key=lambda k: (len({run.arm for run in done if run.k == k}), k))
    shown = [cell for cell in cells(done) if cell.k == k]
    absent = [arm for arm in in_order(run.arm for run in runs) if arm not in {cell.arm for cell in shown}]
    resident = done[0].measure is RESIDENT
    what = "resident memory above the start level" if resident else "torch's allocated peak"
    note = "median over repeats; ◆ marks the phase that peaks" + (
        f"; without a finished run at k={k}: {', '.join(absent)}" if absent else ""
    )
    title = f"Which phase peaks, at k = {k}: {what}"
    figure = style.new_figure(11, 0.9 + 0.42 * len(shown), title, style.footer(runs, note))
    panels = figure.subplots(1, len(PHASES), sharex=True, sharey=True)
    levels = np.array([[_phase_level(cell, phase, resident) for phase in PHASES] for cell in shown])
    for column, (axes, phase) in enumerate(zip(panels, PHASES, strict=True)):
        axes.set_title(phase)
        axes.set_xlabel("GiB")
        axes.grid(axis="y", visible=False)
        for row, cell in enumerate(shown):
            level = levels[row, column]
            if np.isnan(level):
                axes.text(0, row, " not marked", va="center", fontsize=8, color="#707070")
                continue
            peaks_here = level == np.nanmax(levels[row])
            axes.barh(row, level, 0.66, **style.bar(cell.arm))
            look = {"va": "center", "fontsize": 8.5, "fontweight": "bold" if peaks_here else "normal"}
            style.write_at(axes, f"{level:.2f}" + (" ◆" if peaks_here else ""), (max(level, 0), row), 3, 0, **look)
    panels[0].set_yticks(range(len(shown)), [cell.arm + cell.mark for cell in shown])
    panels[0].invert_yaxis()
    panels[0].set_xlim(min(0, np.nanmin(levels) * 1.1), np.nanmax(levels) * 1.32)
    return figure


def _phase_level(cell: Cell, phase: str, resident: bool) -> float:
    """Median over the runs of the phase's highest level in GiB, NaN where the phase was not marked."""
    highest = []
    for run in cell.runs:
        rows = run.phases[(run.phases["phase"] == phase) & (run.phases["step"] > 0)]
        levels = rows["mark_bytes"] - (run.start_bytes or 0) if resident else rows["peak_allocated_bytes"]
        if levels.notna().any():
            highest.append(levels.max() / GIB)
    return float(np.median(highest)) if highest else np.nan

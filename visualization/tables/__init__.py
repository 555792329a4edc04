"""Markdown tables of results, by name.

`render` gives the table of a folder; `fill` brings those of a page up to date: between `<!-- table:NAME FOLDER -->`
(`<!-- table:NAME FOLDER SCALE -->` for one scale) and `<!-- /table -->`. The folder is relative to the page.
"""

import re
from functools import cache
from pathlib import Path

from visualization.results import IN_SHORT, LEARN, MARK, MEASURES, NOTE, Results, load
from visualization.tables import of_bench, of_checks, of_plans, of_runs

PLACE = re.compile(r"(<!-- table:(\S+) (\S+)(?: (\S+))? -->\n)(.*?)<!-- /table -->", re.DOTALL)
RUN_TABLES = {
    "summary": of_runs.summary, "peak": of_runs.peak, "phase-peaks": of_runs.phase_peaks, "audit": of_runs.audit,
    "published": of_runs.published, "phases": of_runs.phases,
}  # fmt: skip
BENCH_TABLES = {
    "rivals": of_bench.rivals, "lengths": of_bench.lengths, "alike": of_bench.alike, "families": of_bench.families,
    "worth": of_bench.worth, "decoding": of_bench.decoding,
}  # fmt: skip
FOLDER_TABLES = BENCH_TABLES | {
    "kinds": of_bench.kinds, "sampler": of_runs.sampler,
    "plan": of_plans.check, "levers": of_plans.levers, "profiles": of_plans.profiles, "gpu-peaks": of_plans.gpu_peaks,
    "exactness": of_checks.exactness, "upstream": of_checks.upstream, "emulated": of_checks.emulated,
    "launches": of_checks.launches,
}  # fmt: skip
# Of tables on the page of a folder
FILES = {"plan": "plan_check.csv", "upstream": "upstream_tests.csv", "exactness": "exactness.csv"}
load_once = cache(load)


def render(name: str, folder: Path, scale: str | None = None) -> str:
    """The table of that name, for runs that of each scale or of one."""
    if name in FOLDER_TABLES:
        text = FOLDER_TABLES[name](folder)
        return text + (f"\n{NOTE}.\n" if MARK in text else "")
    if name not in RUN_TABLES:
        raise SystemExit(f"error: no table is named {name}; there are {', '.join([*RUN_TABLES, *FOLDER_TABLES])}")
    return of_results(name, load_once(folder), scale)


def of_results(name: str, results: Results, scale: str | None = None) -> str:
    """The scale `learn` is another workload and only shown when asked for."""
    found = results.scales()
    if scale and scale not in found:
        raise SystemExit(f"error: {results.folder}: has no runs at scale {scale}; it has {', '.join(found)}")
    parts = []
    for each in [scale] if scale else [name for name in sorted(found) if name != LEARN] or found:
        mine = results.of(each)
        mine = mine.only(IN_SHORT, 8) if name == "summary" else mine
        if len(mine.runs) and (text := RUN_TABLES[name](mine)):
            notes = [*mine.footnotes(), *([NOTE] if MARK in text else [])]
            parts.append(
                f"*{mine.describe()} · {MEASURES[mine.measure]}*\n\n{text}\n"
                + "".join(f"\n{note}.\n" for note in notes)
            )
    return "\n".join(parts)


def page(results: Results) -> str:
    """All tables of results/<machine>, those first that everybody has."""
    folder = results.folder
    measured = of_bench.measured(folder)
    names = [*RUN_TABLES, *(name for name in BENCH_TABLES if name in measured)]
    names += [name for name, file in FILES.items() if (folder / file).exists()]
    texts = {name: of_results(name, results) if name in RUN_TABLES else render(name, folder) for name in names}
    return "\n".join(f"## {name}\n\n{text}" for name, text in texts.items() if text)


def fill(path: Path) -> tuple[str, list[str]]:
    """The page's text with every marked table rendered anew, and the names of those that differ."""
    stale: list[str] = []

    def replace(found: re.Match) -> str:
        start, name, folder, scale, old = found.groups()
        new = "\n" + render(name, path.parent / folder, scale) + "\n"
        if new != old:
            stale.append(" ".join(filter(None, (name, folder, scale))))
        return start + new + "<!-- /table -->"

    text = path.read_text()
    filled, count = PLACE.subn(replace, text)
    if count == 0 or count != text.count("<!-- table:"):
        raise SystemExit(
            f"error: {path}: {count} complete table places for {text.count('<!-- table:')} opening markers; write "
            "<!-- table:peak results/<machine> --> and <!-- /table --> on lines of their own"
        )
    return filled, stale

"""All samples of all runs as one CSV, and the statistics of every cell as another."""

import pandas as pd

from visualization.results import Results

ABOUT = ["run_id", "arm", "scale", "k", "repeat", "status"]


def combined(results: Results) -> pd.DataFrame:
    """One row per sample: what run it is of, then the columns of memory.csv (bytes, seconds)."""
    frames = [results.samples(run).assign(**run[ABOUT]) for _, run in results.runs.iterrows()]
    samples = pd.concat([frame for frame in frames if len(frame)] or [pd.DataFrame(columns=ABOUT)], ignore_index=True)
    return samples[[*ABOUT, *(name for name in samples if name not in (*ABOUT, "t", "bytes"))]]


def statistics(results: Results) -> pd.DataFrame:
    """One row per (scale, arm, k): counts, medians with ranges over the finished runs, how good samples are."""
    sampling = results.own.groupby(["scale", "arm", "k"])[["achieved_interval_s", "peak_missed_bytes"]].max()
    return results.cells.reset_index(drop=True).merge(sampling.reset_index(), on=["scale", "arm", "k"])


def write(results: Results) -> None:
    """Write combined_memory.csv and combined_statistics.csv."""
    combined(results).to_csv(results.folder / "combined_memory.csv", index=False)
    statistics(results).to_csv(results.folder / "combined_statistics.csv", index=False)

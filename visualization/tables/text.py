"""How a table says its figures."""

from collections.abc import Iterable, Sequence

import pandas as pd

from visualization.results import DEVICE_WORDS, joined, span


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first `texts` columns are text, the others numbers. A row shorter than the header, as of what
    failed, ends in empty cells. Not padded, as `to_markdown` would: the lines of a page change only where their
    figures do."""
    lines = [header, ["---"] * texts + ["---:"] * (len(header) - texts), *rows]
    whole_lines = ([*line, *[""] * (len(header) - len(line))] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in whole_lines)


def range_of(median: float, low: float, high: float, digits: int, noisy: float) -> str:
    """What follows the median: its range in brackets, where that is more than a part `noisy` of it."""
    return f" ({low:.{digits}f} to {high:.{digits}f})" if median and (high - low) / median > noisy else ""


def signed(fraction: float, digits: int = 1) -> str:
    """A fraction as a percentage with its sign."""
    return f"{fraction * 100:+.{digits}f} %".replace("-", "\N{MINUS SIGN}")


def whole(value: float) -> str:
    """A count with its thousands apart."""
    return "" if pd.isna(value) else f"{value:,.0f}"


def measured_on(rows: pd.DataFrame, *about: str) -> str:
    """The line above a table: what rows of one machine were measured on, with every commit, and what else there is."""
    device = f"{DEVICE_WORDS.get(joined(rows.device_kind), 'device')}: {joined(rows.device_name)}"
    versions = [f"{name} {joined(rows[f'{name}_version'])}" for name in ("torch", "transformers")]
    return f"*{' · '.join([device, *versions, f'commit {joined(rows.commit.str[:10])}', *about])}*"


def how_often(rows: pd.DataFrame) -> str:
    counts = rows.repeats[rows.metric != ""].astype(int)
    return f"median of {span(counts)} alternating repeats" if counts.max() > 1 else "measured once"


def token_ratio(prompt: float, completion: float, k: int) -> float:
    """Of a group whose completions are equally long: tokens of whole rows for each with a shared prompt."""
    return k * (prompt + completion) / (prompt + k * completion)

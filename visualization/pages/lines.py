"""How a table says its figures."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from visualization.runs import Cell, Run, cells, in_order

NOISY = 0.02  # a spread above this fraction of the median is shown


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Lines of a table whose first `texts` columns are text, the others numbers."""
    lines = [header, ["---"] * texts + ["---:"] * (len(header) - texts), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def commits_in_short(commits: Iterable[str]) -> str:
    """Each once, in their order."""
    return ", ".join(dict.fromkeys(commit[:10] for commit in commits))


def by_k(runs: Sequence[Run], show: Callable[[Cell, dict], str]) -> list[str]:
    """A table with a row an arm and a column a k; `show` gets a cell with a finished run and all cells by (arm, k)."""
    table = {(cell.arm, cell.k): cell for cell in cells(runs)}
    ks = sorted({k for _, k in table})

    arms = in_order(arm for arm, _ in table)
    rows = [[f"`{arm}`", *(entry(table.get((arm, k)), lambda cell: show(cell, table)) for k in ks)] for arm in arms]
    return markdown(["arm", *(f"k = {k}" for k in ks)], rows)


def entry(cell: Cell | None, show: Callable[[Cell], str]) -> str:
    """The cell's figure; what failed of it is named."""
    if cell is None:
        return "not run"
    return show(cell) + failure(cell, " ({})") if cell.finished else failure(cell)


def with_range(values: Sequence[float], unit: float, mark: str) -> str:
    """The median in that unit, with the range where it is noisy, and the mark."""
    middle = median(values)
    spread = (max(values) - min(values)) / middle if middle else 0
    told = f" ({min(values) / unit:.2f} to {max(values) / unit:.2f})" if spread > NOISY else ""
    return f"{middle / unit:.2f}{told}{mark}"


def failure(cell: Cell, form: str = "{}") -> str:
    """How many of the cell's runs did not finish, and why, put into `form`; nothing when all did."""
    told = cell.failure("out of memory")
    return form.format(told) if told else ""


def signed(fraction: float, digits: int = 1) -> str:
    """A fraction as a percentage with its sign."""
    return f"{fraction * 100:+.{digits}f} %".replace("-", "\N{MINUS SIGN}")


def whole(value: float | None) -> str:
    """A count with its thousands apart, nothing for None."""
    return "" if value is None else f"{value:,.0f}"

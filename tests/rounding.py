"""What rounding may do to prefix sharing in half precision."""

import math
import statistics


def is_no_larger(ratios: dict[str, float], experts: tuple[str, ...] = ()) -> bool:
    """Ratios of an error to stock's, by model. Some batches of a model are a small sample of rounding errors, and CPUs
    round differently: each may be half as large again, and the mean over the models 5 % larger, give or take two
    standard errors of that mean. Where rounding sends a token to another of the `experts`, here or in stock, the error
    is a step: up to 2.5 times."""
    logs = [math.log(ratio) for name, ratio in ratios.items() if name not in experts]
    largest = 1.05 * math.exp(2 * statistics.stdev(logs) / math.sqrt(len(logs)))
    return math.exp(statistics.fmean(logs)) <= largest and max(logs) <= math.log(1.5) and max(ratios.values()) <= 2.5

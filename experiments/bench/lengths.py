"""Scoring and training of one group whose completions differ in length, as those of people's rollouts do.

The lengths of a "spread" group are quantiles of a log-normal distribution, whose logarithm has a standard deviation of
1: a hundredth of the completions is ten times as long as the median. That is said of a typical run on reasoning
(jiahuanglin.xyz, lesson 22b: median 500 tokens, 99th percentile 5,000). A cell's completion tokens are their mean.
"""

from dataclasses import replace
from functools import partial
from math import exp
from statistics import NormalDist, fmean

from experiments.bench import random_models
from experiments.bench.group import Timed
from experiments.bench.samples import Cell
from experiments.measuring import Place

SPREADS = {"even": 0.0, "spread": 1.0}  # standard deviation of the logarithm


def lengths_of(mean: int, k: int, spread: float) -> tuple[int, ...]:
    """k quantiles, every second one first: neither short nor long ones share the micro-batches."""
    quantiles = [exp(spread * NormalDist().inv_cdf((row + 0.5) / k)) for row in range(k)]
    lengths = [round(mean * quantile / fmean(quantiles)) for quantile in quantiles]
    return tuple(lengths[1::2] + lengths[::2])


class Lengths(Timed):
    """Seconds of a group. Whole rows are padded to the longest of the group."""

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        name, _, spread = cell.model.partition("/")
        lengths = lengths_of(cell.completion_tokens, cell.k, SPREADS[spread])
        make = partial(random_models.group, replace(cell, model=name), lengths=lengths)
        super().__init__(make, ways, ("score", "train"))
        # Tokens of whole rows, padded to the longest, for each one where the prompt is computed once
        whole, shared = cell.k * (cell.prompt_tokens + max(lengths)), cell.prompt_tokens + sum(lengths)
        self.facts = {"token_ratio": round(whole / shared, 3)}
        self.facts |= {"shortest_tokens": min(lengths), "longest_tokens": max(lengths)}

    def sample(self, way: str) -> dict[str, float]:
        return super().sample(way) | (self.facts if way == "whole" else {})

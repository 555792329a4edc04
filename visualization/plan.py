"""The name under which `experiments.plan --chart` asks for the plan's chart."""

from visualization.charts.plan import draw

__all__ = ["draw"]

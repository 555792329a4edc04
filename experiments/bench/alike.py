"""An update of several prompts that begin alike, as behind a system prompt or descriptions of tools: whole rows, with
each prompt computed once, and with what all begin with computed once, too.

A cell's model says how many tokens they begin with: narrow/2000. A micro-batch is a prompt with its k completions.
"""

from dataclasses import replace
from unittest import mock

from experiments.bench import random_models
from experiments.bench.group import PHASES, Group, Timed, Way
from experiments.bench.samples import Cell
from experiments.measuring import Place

PROMPTS = 4
ALIKE_WAYS = {"whole": Way(shared=False), "prompts": Way(), "tree": Way()}


class Update(Group):
    """`PROMPTS` prompts with k completions each, which begin with `common` tokens alike."""

    ways = ALIKE_WAYS

    def __init__(self, model, vocab_size: int, cell: Cell, common: int):
        super().__init__(model, vocab_size, replace(cell, k=PROMPTS * cell.k))
        self.per_prompt, self.common = cell.k, common
        own = self.torch.randint(10, vocab_size, (PROMPTS, self.prompt - common))
        self.ids[:, common : self.prompt] = own.repeat_interleave(cell.k, dim=0)

    def micro_batches(self) -> list[slice]:
        return [slice(start, start + self.per_prompt) for start in range(0, self.k, self.per_prompt)]

    def start_of(self, way: str):
        from trl.prefix_sharing.common_start import CommonStart

        return CommonStart(self.common) if way == "tree" else None

    def generate(self, way: str, tokens: int | None = None) -> None:
        sharing = self.model.base_model._prefix_sharing
        with mock.patch.object(sharing, "shares_starts", way == "tree"):
            super().generate(way, tokens)

    def score(self, way: str) -> None:
        start = self.start_of(way)
        if start is not None:
            start.open()
        with self.torch.no_grad():
            for rows in self.micro_batches():
                self.log_probs(way, rows, common_start=start)

    def update(self, way: str) -> None:
        start = self.start_of(way)
        for rows in self.micro_batches():
            if start is not None:
                start.open(is_last=rows.stop == self.k)
            (self.log_probs(way, rows, common_start=start) * self.weights[rows]).sum().backward()
        if start is not None:
            start.backward()


class Alike(Timed):
    """Seconds, peaks and gradients of an update in each way, and the tokens that go through the model once."""

    def __init__(self, cell: Cell, ways: tuple[str, ...], here: Place):
        name, _, number = cell.model.partition("/")
        model, vocab_size, _ = random_models.build(replace(cell, model=name))
        common, rows = int(number), PROMPTS * cell.k
        super().__init__(Update(model, vocab_size, cell, common), ways, PHASES, peaks=True)
        own, completions = cell.prompt_tokens - common, rows * cell.completion_tokens
        self.tokens = {
            "whole": rows * cell.prompt_tokens + completions,
            "prompts": PROMPTS * cell.prompt_tokens + completions,
            "tree": common + PROMPTS * own + completions,
        }

    def sample(self, way: str) -> dict[str, float]:
        return super().sample(way) | {"forward_tokens": self.tokens[way]}

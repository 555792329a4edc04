"""One prompt with k completions, and the phases of a training step on them: whole rows, or with the prompt shared."""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from experiments.arms import ARMS
from experiments.bench.samples import Cell
from experiments.builds import use_fork
from experiments.processes import in_its_own_process
from experiments.run_device import keep_freed_memory, keep_only_live_memory
from rloo_memory.device import settle, status_bytes
from rloo_memory.phases import HighWater

PHASES = ("generate", "score", "train")
Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Way:
    """How a group goes through the model: its prompt shared or not, and how many of its rows together. Rows of a pass
    have their backward with all others, those of a micro-batch have one of their own."""

    shared: bool = True
    pass_rows: int | None = None
    micro_batch_rows: int | None = None


WAYS = {
    "whole": Way(shared=False),
    "shared": Way(),
    "shared-2": Way(pass_rows=2),
    "shared-micro-2": Way(pass_rows=2, micro_batch_rows=2),
    # Where lengths differ: whole rows put together by length in passes, and as TRL has them in micro-batches
    "whole-2": Way(shared=False, pass_rows=2),
    "whole-micro-2": Way(shared=False, micro_batch_rows=2),
}


def peaks_of(make: Callable[[], "Group"], way: str, phases: tuple[str, ...]) -> dict[str, int]:
    """Peak resident bytes of each phase above the level before it, when there are gradients and what libraries keep:
    one prompt and two tokens make these. Beside all of the phase, they made 1.6 % of a peak more or less (of recurrent
    layers 6 %), and two fifths less of the time. In a process of its own: blocks that another way freed within the
    heap would be filled again, and count for nothing, or stay, and count for much. Not for times: what makes resident
    memory mean "alive" takes time, and more of it the more often tensors come and go."""
    use_fork(ARMS["stock-compact"])  # as in the process that times
    keep_only_live_memory()
    group, high_water, found = make(), HighWater("cpu"), {}
    group.model(**group.inputs(slice(1), columns=group.prompt)).logits.sum().backward()
    if "generate" in phases:
        group.generate(way, tokens=2)
    for phase in phases:
        settle()
        before = status_bytes("VmRSS")
        high_water.reset()
        getattr(group, phase)(way)
        found[f"{phase}_peak_bytes"] = high_water.read()[2] - before
    return found


@dataclass(frozen=True)
class Image:
    """The one image of a prompt: patches along a side, four of which make a token, and that token's id."""

    side: int
    token: int


class Group:
    """The model, in float32 with the compact LM head, and random tokens from 10 to its vocabulary. Completions have
    `lengths`, or all that of the cell."""

    def __init__(self, model, vocab_size: int, sizes: Cell, image: Image | None = None, lengths: tuple[int, ...] = ()):
        import torch

        from experiments.fused_head import add_fused_lm_head
        from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing

        torch.manual_seed(0)
        self.torch, self.model, self.image = torch, model.train(), image
        self.prompt, self.completion, self.k = sizes.prompt_tokens, sizes.completion_tokens, sizes.k
        if lengths:
            self.completion = max(lengths)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        enable_prefix_sharing(model)
        self.ids = torch.randint(10, vocab_size, (self.k, self.prompt + self.completion))
        self.ids[:, : self.prompt] = self.ids[0, : self.prompt]
        self.mask = torch.ones_like(self.ids)
        for row, length in enumerate(lengths):
            self.mask[row, self.prompt + length :] = 0
        weights = torch.linspace(-1, 1, self.k * self.completion).view(self.k, self.completion)
        self.weights = weights * self.mask[:, self.prompt :]
        self.pixels, self.num_images, self.encoded = {}, None, 0
        if image is not None:
            patches = image.side**2
            self.ids[:, 20 : 20 + patches // 4] = image.token
            self.pixels = {
                "pixel_values": torch.randn(patches, 3 * 2 * 14 * 14).repeat(self.k, 1),
                "image_grid_thw": torch.tensor([[1, image.side, image.side]] * self.k),
            }
            self.num_images = [1] * self.k

            def count(tower, args) -> None:
                self.encoded += len(args[0]) // patches

            model.base_model.visual.register_forward_pre_hook(count)

    def inputs(self, rows: slice = slice(None), columns: int | None = None) -> dict:
        ids = self.ids[rows, :columns]
        inputs = {"input_ids": ids, "attention_mask": self.mask[rows, :columns]}
        if self.image is not None:
            inputs["mm_token_type_ids"] = (ids == self.image.token).long()
        images = {name: x[: len(x) // self.k * len(ids)] for name, x in self.pixels.items()}  # all are alike
        return inputs | images

    def generate(self, way: str, tokens: int | None = None) -> None:
        """Completions of full length, or of `tokens`, sampled."""
        from transformers import GenerationConfig

        from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix

        tokens = tokens or self.completion
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        config = GenerationConfig(**length, do_sample=True, pad_token_id=0, eos_token_id=1, disable_compile=True)
        inputs = self.inputs(columns=self.prompt)
        self.model.eval()
        with self.torch.no_grad():
            if way == "whole":
                self.model.generate(**inputs, generation_config=config)
            else:
                sharing = {"group_size": self.k, "num_images": self.num_images}
                generate_with_shared_prefix(self.model, generation_config=config, **sharing, **inputs)
        self.model.train()

    def log_probs(self, way: str, rows: slice = slice(None), tree=None):
        """Of shape (rows, completion)."""
        from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
        from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses

        inputs, passes = self.inputs(rows), None
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        labels[:, : self.prompt] = -100
        pass_rows = WAYS[way].pass_rows
        if WAYS[way].shared and not self.saves_time(way):
            passes = TokenBudgetPasses(self.prompt)
        elif WAYS[way].shared:
            passes = SharedPrefixPasses(
                self.prompt,
                tokens_per_forward=pass_rows and pass_rows * (self.completion + 1),
                num_images=self.num_images and self.num_images[rows],
                tree=tree,
                rows=range(rows.start or 0, (rows.start or 0) + len(labels)),
            )
        elif pass_rows:
            passes = TokenBudgetPasses(self.prompt, tokens_per_forward=pass_rows * labels.shape[1])
        output = self.model(**inputs, labels=labels, fused_lm_head=True, passes=passes)
        return output.log_probs[:, -self.completion :]

    def saves_time(self, way: str) -> bool:
        """Whether trainers share prompts of these lengths."""
        from rloo_memory.prefix_sharing.token_budget import saves_time

        at_a_time = WAYS[way].micro_batch_rows or self.k
        return self.image is not None or saves_time(self.tree(at_a_time), self.mask.sum(1), at_a_time)

    def tree(self, rows_per_backward: int):
        """Of the prompt of all rows."""
        from rloo_memory.prefix_sharing.images import MultimodalInputs
        from rloo_memory.prefix_sharing.shared_passes import prompts_of
        from rloo_memory.prefix_sharing.tree import Tree

        inputs = self.inputs(columns=self.prompt)
        ids, mask = (inputs.pop(name).cpu() for name in ("input_ids", "attention_mask"))
        multimodal = MultimodalInputs.of(inputs, self.k, self.num_images)
        return Tree.of(prompts_of(self.model.base_model, ids, mask, multimodal), rows_per_backward=rows_per_backward)

    def score(self, way: str) -> None:
        """All rows; whole ones of micro-batches as many at a time."""
        at_a_time = WAYS.get(way, Way())
        size = self.k if at_a_time.shared else at_a_time.micro_batch_rows or self.k
        with self.torch.no_grad():
            for start in range(0, self.k, size):
                self.log_probs(way, slice(start, start + size))

    def train(self, way: str) -> None:
        """Forward and backward with gradient checkpointing, which the trainer switches off for generation."""
        self.model.zero_grad(set_to_none=False)
        self.model.gradient_checkpointing_enable()  # in transformers 5.17 as in 5.23, which has another name, too
        self.update(way)
        self.model.gradient_checkpointing_disable()

    def update(self, way: str) -> None:
        """Each micro-batch has a backward, and the prompt has one."""
        size = WAYS.get(way, Way()).micro_batch_rows  # rivals have ways of their own
        if size is None:
            (self.log_probs(way) * self.weights).sum().backward()
        else:
            tree = self.tree(size)
            for first in range(0, self.k, size):
                rows = slice(first, first + size)
                (self.log_probs(way, rows, tree) * self.weights[rows]).sum().backward()
                tree.leave(first + size)

    def gradient(self):
        return self.torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


class Timed:
    """The phases of a group, timed way by way; of generation only the ways that are `generating`, if any is named.
    With `peaks` also the resident bytes of each phase above the level before it, measured once, and the relative
    difference of all parameters' gradients from those of whole rows. A way that fails before its first sample fails in
    each. `make` gives the group, and can be sent to another process."""

    def __init__(self, make: Callable[[], Group], ways: Names, phases: Names, peaks=False, generating: Names = ()):
        self.phases, self.generating, self.peaks, self.failed = phases, generating or ways, {}, {}
        if peaks:
            self.try_each(partial(self.find_peaks, make), ways)
        keep_freed_memory()
        self.group = make()
        warm_up = self.group.train if "train" in phases else partial(self.group.generate, tokens=2)
        self.try_each(warm_up, reversed(ways))  # `whole` is the first, and the last that leaves its gradient
        self.truth = self.group.gradient() if peaks and ways[0] not in self.failed else None

    def try_each(self, work: Callable[[str], None], ways: Iterable[str]) -> None:
        for way in ways:
            try:
                work(way)
            except Exception as error:
                self.failed[way] = error

    def find_peaks(self, make: Callable[[], Group], way: str) -> None:
        print(f"  {way}: peaks", flush=True)
        self.peaks[way] = in_its_own_process(peaks_of, make, way, self.phases)

    def sample(self, way: str) -> dict[str, float]:
        """One repeat, by metric."""
        if way in self.failed:
            raise self.failed[way]
        self.group.encoded, values = 0, {}
        for phase in self.phases:
            if phase == "generate" and way not in self.generating:
                continue
            gc.collect()
            start = time.perf_counter()
            getattr(self.group, phase)(way)
            values[f"{phase}_seconds"] = round(time.perf_counter() - start, 4)
        if self.group.image is not None:
            values["images_encoded"] = self.group.encoded
        values |= self.peaks.get(way, {})
        if self.truth is not None:
            values["gradient_difference"] = ((self.group.gradient() - self.truth).norm() / self.truth.norm()).item()
        return values

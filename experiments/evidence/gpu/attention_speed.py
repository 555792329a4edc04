"""Milliseconds of one layer's attention, as stock and as prefix sharing call it, and the kernels that ran.

    python -m experiments.evidence.gpu.attention_speed [--device cuda]

Rows of a prompt and a completion without a mask (equal lengths) and with the mask of padded rows, by the order of
backends that all measurements here have and with cuDNN first; the prompt alone; and packed completions that attend to
it, by kernels and with a mask. The sum of the last two is what a shared layer takes. Writes one row a call to
results/<machine>/attention.csv. A call that fails is a row that says so.
"""

import sys
import traceback
from contextlib import nullcontext
from dataclasses import dataclass

from experiments.builds import use_fork
from experiments.evidence.common import FACTS, Parser, Table, place
from experiments.evidence.exactness import attention_kernels, profile_of
from experiments.evidence.gpu.device_facts import timed
from experiments.evidence.gpu.kernels import Setting, cudnn_first, mask_of, whole
from rloo_memory.arms import ARMS
from rloo_memory.errors import exit_code
from rloo_memory.models import typed_line

COLUMNS = (
    "call", "cudnn_first", "heads", "key_heads", "head_size", "prompt_tokens", "completion_tokens", "k", "forward_ms",
    "backward_ms", "kernels", "error", *FACTS,
)  # fmt: skip
HEADS = {"cuda": ((16, 8, 128), (32, 8, 128)), "cpu": ((4, 2, 16),)}
LENGTHS = {"cuda": ((3000, 100, 8), (1000, 2000, 8)), "cpu": ((40, 8, 2),)}  # prompt, completion, k
REPEATS = {"cuda": 20, "cpu": 2}


@dataclass(frozen=True)
class Layer:
    """Heads, heads of keys, their size; tokens of the prompt and of each of k completions; and where."""

    heads: int
    key_heads: int
    head_size: int
    prompt: int
    completion: int
    k: int
    device: str

    def random(self, rows: int, tokens: int, *key_tokens: int):
        """Query of `tokens`, key and value of as many, and keys and values of each of `key_tokens`; bfloat16."""
        import torch

        sizes = [(self.heads, tokens), *[(self.key_heads, n) for n in (tokens, *key_tokens) for _ in range(2)]]
        return [
            torch.randn(rows, heads, n, self.head_size, device=self.device, dtype=torch.bfloat16, requires_grad=True)
            for heads, n in sizes
        ]

    def calls(self) -> dict:
        """Name of a call -> (what attends, its inputs)."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        from trl.models.prefix_sharing_attention import Runs, shared_prefix_attention

        length, packed = self.prompt + self.completion, self.k * self.completion
        groups = self.heads // self.key_heads
        padding = torch.arange(length, device=self.device) < length - torch.arange(self.k, device=self.device)[:, None]
        padded = torch.ones(length, length, dtype=torch.bool, device=self.device).tril() & padding[:, None, None]

        def masked(query, key, value):
            """As transformers does with a mask: keys are repeated."""
            return sdpa(query, *(x.repeat_interleave(groups, dim=1) for x in (key, value)), padded)

        plain = lambda *x: sdpa(*x, is_causal=True, enable_gqa=True)  # noqa: E731
        lengths = [self.completion] * self.k
        runs = Runs.of(lengths, torch.device(self.device))
        setting = Setting(self.heads, self.key_heads, self.head_size, self.prompt, tuple(lengths))
        mask = mask_of(setting, self.device)
        rows, both = (self.k, length), (1, packed, self.prompt)
        return {
            "rows, equal lengths": (plain, rows),
            "rows, padded": (masked, rows),
            "shared, prompt": (plain, (1, self.prompt)),
            "shared, completions": (lambda *x: shared_prefix_attention(*x, runs, None), both),
            "shared, completions with a mask": (lambda *x: whole(*x, mask, plain=False), both),
        }

    def measure(self, attend, sizes: tuple[int, ...]) -> dict:
        """Milliseconds of forward and of backward, and the kernels of one of each."""
        import torch

        inputs = self.random(*sizes)
        output = attend(*inputs)
        weights = torch.randn_like(output)
        with profile_of(self.device) as profiler:
            torch.autograd.grad(attend(*inputs), inputs, weights)
        repeats = REPEATS[self.device]
        forward = timed(lambda: attend(*inputs), self.device, repeats)
        back = timed(lambda: torch.autograd.grad(output, inputs, weights, retain_graph=True), self.device, repeats)
        found = {"forward_ms": round(1000 * forward, 4), "backward_ms": round(1000 * back, 4)}
        return found | {"kernels": attention_kernels(profiler)}


def run(argv: list[str] | None) -> int:
    import torch

    here = place(Parser("gpu.attention_speed", __doc__).parse_args(argv))
    use_fork(ARMS["shared"])
    table = Table(here.folder / "attention.csv", COLUMNS, here.facts, fresh=True)
    for heads in HEADS[here.device]:
        for lengths in LENGTHS[here.device]:
            layer = Layer(*heads, *lengths, here.device)
            for name, (attend, sizes) in layer.calls().items():
                for with_cudnn in (
                    (False, True) if here.device == "cuda" and name != "shared, completions" else (False,)
                ):
                    try:
                        with cudnn_first() if with_cudnn else nullcontext():
                            found = layer.measure(attend, sizes)
                    except Exception as error:  # whatever a kernel raises
                        traceback.print_exc()
                        found = {"error": typed_line(error)}
                    facts = dict(zip(COLUMNS[2:8], (*heads, *lengths), strict=True))
                    table.add({"call": name, "cudnn_first": with_cudnn, **facts, **found})
                    print(f"{name}, cuDNN first {with_cudnn}, {heads}, {lengths}: {found}", flush=True)
                    if here.device == "cuda":
                        torch.cuda.empty_cache()
    table.finish()
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code("attention_speed", run, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Attention to a shared prompt through this device's own kernels, forward and backward, against float64.

    python -m experiments.checks.kernels [--device cuda]

What patch 0012 calls in every shared pass (`shared_prefix_attention`) and in decoding (`attention_with_lse`), by
itself: packed completions that attend to a prompt and to themselves, merged by log-sum-exp. The truth is a plain
softmax in float64 with a mask. Beside it stands the error of `scaled_dot_product_attention` with that mask in the same
dtype, which is stock's rounding. Writes one row a setting, dtype and tensor to results/<machine>/kernels.csv. Exit
code 4 if an error is above its bound (`MARGIN` times that of masked attention, at least `LEAST`; `ALONE` times `LEAST`
where masked attention failed) or one of our kernels failed.
"""

import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.arms import ARMS
from experiments.builds import use_fork
from experiments.measuring import EXIT_VERDICT, FACTS, Parser, is_committed, place
from experiments.record import read_csv, write_csv
from rloo_memory.errors import exit_code
from rloo_memory.models import typed_line

MARGIN = 2.0
LEAST = {"bfloat16": 2e-3, "float16": 3e-4, "float32": 1e-6}
ALONE = 10  # gradients round several times as much as the output; a wrong kernel errs by far more
OF_CELLS = {"cuda": ("bfloat16", "128"), "cpu": ("float32", "128")}  # dtype and head size of all planned cells
COLUMNS = (
    "setting", "dtype", "tensor", "error", "masked_error", "verdict", "masked_verdict", "heads", "key_heads",
    "head_size", "prompt_tokens", "completion_tokens", *FACTS,
)  # fmt: skip
TENSORS = ("output", "of query", "of key", "of value", "of prompt key", "of prompt value")


@dataclass(frozen=True)
class Setting:
    """Heads, heads of keys and values, their size, and lengths in tokens."""

    heads: int
    key_heads: int
    head_size: int
    prompt: int
    lengths: tuple[int, ...]


SETTINGS = {
    "qwen3-0.6b": Setting(16, 8, 128, 700, (100, 37, 64, 1, 129)),
    "qwen3-8b": Setting(32, 8, 128, 513, (128, 200)),
    "heads of 64": Setting(4, 2, 64, 300, (33, 80)),
    "heads of 256": Setting(4, 1, 256, 300, (33, 80)),
    "single tokens": Setting(16, 8, 128, 129, (1, 1, 1)),
    "one token": Setting(16, 8, 128, 129, (1,)),
    "no prompt": Setting(16, 8, 128, 0, (70, 130)),
    "published workload": Setting(4, 2, 128, 3000, (100,) * 8),
}
ON_CPU = {"ragged": Setting(4, 2, 128, 70, (10, 7, 1)), "no prompt": Setting(4, 2, 128, 0, (9, 5))}


def are_right(folder: Path, facts: dict[str, str]) -> bool:
    """False if one failed on this device at the dtype and head size of cells: then a mask is taken in their place."""
    if not is_committed(facts["commit"]):
        return True
    rows = [row for row in read_csv(folder / "kernels.csv") if row.items() >= facts.items()]
    used = OF_CELLS[facts["device_kind"]]
    return all(row["verdict"] == "ok" for row in rows if (row["dtype"], row["head_size"]) == used)


def cudnn_first():
    """A context in which `scaled_dot_product_attention` asks for cuDNN's kernels before the others."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def inputs(setting: Setting, device: str):
    """Query, key, value, key and value of the prompt, float32 and random, and the weights of the output."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    tokens = sum(setting.lengths)
    shapes = [(setting.heads, tokens), *[(setting.key_heads, tokens)] * 2, *[(setting.key_heads, setting.prompt)] * 2]
    draw = lambda heads, n: torch.randn(1, n, heads, setting.head_size, device=device, generator=generator)  # noqa: E731
    return [draw(*shape).transpose(1, 2) for shape in shapes], draw(setting.heads, tokens)


def mask_of(setting: Setting, device: str):
    """(T, S + T), bool: the prompt, and each completion causally."""
    import torch

    lengths = torch.tensor(setting.lengths)
    run = torch.arange(len(lengths)).repeat_interleave(lengths)
    own = (run[:, None] == run) & torch.ones(len(run), len(run), dtype=torch.bool).tril()
    return torch.cat([torch.ones(len(run), setting.prompt, dtype=torch.bool), own], dim=1).to(device)


def whole(query, key, value, prompt_key, prompt_value, mask, plain: bool):
    """(1, T, H, D): over all keys with a mask, by a softmax that is written out if `plain`, else by sdpa."""
    import torch

    groups = query.shape[1] // key.shape[1]
    key, value = (
        torch.cat(pair, dim=2).repeat_interleave(groups, dim=1) for pair in ((prompt_key, key), (prompt_value, value))
    )
    if not plain:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)
    scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def results(attend, tensors, weights) -> list:
    """Output and gradients of `tensors`, float64."""
    import torch

    tensors = [x.detach().requires_grad_() for x in tensors]
    output = attend(*tensors)
    grads = torch.autograd.grad(output, tensors, weights.to(output.dtype), materialize_grads=True)
    return [x.detach().double() for x in (output, *grads)]


def error(got, truth) -> float:
    size = truth.norm().item()
    return (got - truth).norm().item() / size if size else got.norm().item()


@dataclass(frozen=True)
class Compared:
    """Errors of the kernels and of masked attention at one tensor; of the latter None where it failed."""

    tensor: str
    mine: float
    masked: float | None
    masked_verdict: str = "ok"

    def judged(self, dtype: str) -> dict:
        """As the columns of the table have it. What is not a number is above any bound."""
        bound = LEAST[dtype] * ALONE if self.masked is None else max(MARGIN * self.masked, LEAST[dtype])
        verdict = "ok" if self.mine <= bound else f"too large, bound {bound:.1e}"
        masked = "" if self.masked is None else f"{self.masked:.3e}"
        said = {"verdict": verdict, "masked_verdict": self.masked_verdict}
        return {"tensor": self.tensor, "error": f"{self.mine:.3e}", "masked_error": masked, **said}


def compared(names, mine: list, rival: Callable[[], list], truth: list) -> list[Compared]:
    """Our results beside those of `rival`. That it runs out of memory, or is not there, is no failure of ours."""
    try:
        masked, said = [error(got, right) for got, right in zip(rival(), truth, strict=True)], "ok"
    except Exception as failure:
        traceback.print_exc()
        masked, said = [None] * len(truth), typed_line(failure)
    return [
        Compared(name, error(got, right), its, said)
        for name, got, its, right in zip(names, mine, masked, truth, strict=True)
        if right.numel()
    ]


def errors_of(setting: Setting, dtype: str, device: str) -> list[Compared]:
    """Of what training and decoding call. Raises what our kernels raise."""
    import torch
    from trl.models.prefix_sharing_attention import Runs, attention_with_lse, shared_prefix_attention

    tensors, weights = inputs(setting, device)
    tensors = [x.to(getattr(torch, dtype)) for x in tensors]
    exact, mask = [x.double() for x in tensors], mask_of(setting, device)
    runs = Runs.of(list(setting.lengths), torch.device(device))
    mine = results(lambda *x: shared_prefix_attention(*x, runs, None), tensors, weights)
    truth = results(lambda *x: whole(*x, mask, plain=True), exact, weights)
    found = compared(TENSORS, mine, lambda: results(lambda *x: whole(*x, mask, plain=False), tensors, weights), truth)
    if setting.prompt:
        query, key, value = (tensors[i].repeat(3, 1, 1, 1) for i in (0, 3, 4))
        output, lse = attention_with_lse(query, key, value, is_causal=False, scale=None)
        groups = setting.heads // setting.key_heads
        keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
        scores = (query.double() @ keys.transpose(2, 3)) * setting.head_size**-0.5
        whole_rows = [x.to(query.dtype) for x in (keys, values)]
        rival = lambda: [torch.nn.functional.scaled_dot_product_attention(query, *whole_rows).double()]  # noqa: E731
        found += compared(["decoding"], [output.double()], rival, [scores.softmax(-1) @ values])
        found.append(Compared("log-sum-exp", error(lse.double(), scores.logsumexp(-1)), 0.0))
    return found


def run(argv: list[str] | None) -> int:
    here = place(Parser("checks.kernels", __doc__).parse_args(argv))
    use_fork(ARMS["shared"])
    settings = SETTINGS if here.device == "cuda" else ON_CPU
    dtypes = ("bfloat16", "float16") if here.device == "cuda" else ("bfloat16", "float32")
    table = []
    for name, setting in settings.items():
        sizes = asdict(setting)
        facts = {"heads": sizes["heads"], "key_heads": sizes["key_heads"], "head_size": sizes["head_size"]}
        facts |= {"prompt_tokens": setting.prompt, "completion_tokens": " ".join(map(str, setting.lengths))}
        for dtype in dtypes:
            said = {"setting": name, "dtype": dtype, **facts, **here.facts}
            try:
                rows = [said | found.judged(dtype) for found in errors_of(setting, dtype, here.device)]
            except Exception as failure:  # a kernel that is not there, or takes other arguments, is a finding
                traceback.print_exc()
                rows = [said | {"tensor": "all", "verdict": typed_line(failure)}]
            table += rows
            write_csv(here.folder / "kernels.csv", COLUMNS, table)
            wrong = [f"{row['tensor']} {row['verdict']}" for row in rows if row["verdict"] != "ok"]
            print(f"{name:20} {dtype:9} {'; '.join(wrong) or 'ok'}", flush=True)
    return 0 if all(row["verdict"] == "ok" for row in table) else EXIT_VERDICT


def main(argv: list[str] | None = None) -> int:
    return exit_code("kernels", run, argv)


if __name__ == "__main__":
    sys.exit(main())

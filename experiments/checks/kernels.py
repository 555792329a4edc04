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
from dataclasses import dataclass

from experiments.arms import ARMS
from experiments.builds import use_fork
from experiments.measuring import EXIT_VERDICT, FACTS, Parser, place
from experiments.record import write_csv
from rloo_memory.errors import exit_code
from rloo_memory.models import typed_line

MARGIN = 2.0
LEAST = {"bfloat16": 2e-3, "float16": 3e-4, "float32": 1e-6}
ALONE = 10  # gradients round several times as much as the output; a wrong kernel errs by far more
DTYPES = {"cuda": ("bfloat16", "float16"), "cpu": ("bfloat16", "float32")}
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
    "cuda": {
        "qwen3-0.6b": Setting(16, 8, 128, 700, (100, 37, 64, 1, 129)),
        "qwen3-8b": Setting(32, 8, 128, 513, (128, 200)),
        "heads of 64": Setting(4, 2, 64, 300, (33, 80)),
        "heads of 256": Setting(4, 1, 256, 300, (33, 80)),
        "single tokens": Setting(16, 8, 128, 129, (1, 1, 1)),
        "one token": Setting(16, 8, 128, 129, (1,)),
        "no prompt": Setting(16, 8, 128, 0, (70, 130)),
        "published workload": Setting(4, 2, 128, 3000, (100,) * 8),
    },
    "cpu": {"ragged": Setting(4, 2, 128, 70, (10, 7, 1)), "no prompt": Setting(4, 2, 128, 0, (9, 5))},
}


def inputs(setting: Setting, device: str):
    """Query, key, value, key and value of the prompt, float32 and random, and the weights of the output."""
    import torch

    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, tokens: int):
        return torch.randn(1, tokens, heads, setting.head_size, device=device, generator=generator)

    tokens = sum(setting.lengths)
    shapes = [(setting.heads, tokens), *[(setting.key_heads, tokens)] * 2, *[(setting.key_heads, setting.prompt)] * 2]
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


def judged(tensor: str, mine: float, masked: float | None, dtype: str, masked_verdict: str = "ok") -> dict:
    """Errors of the kernels and of masked attention (None where it failed) at one tensor, as the columns of the table
    have them. What is not a number is above any bound."""
    bound = LEAST[dtype] * ALONE if masked is None else max(MARGIN * masked, LEAST[dtype])
    verdict = "ok" if mine <= bound else f"too large, bound {bound:.1e}"
    said = {"error": f"{mine:.3e}", "masked_error": "" if masked is None else f"{masked:.3e}"}
    return {"tensor": tensor, **said, "verdict": verdict, "masked_verdict": masked_verdict}


def compared(names, mine: list, rival: Callable[[], list], truth: list, dtype: str) -> list[dict]:
    """Our results beside those of `rival`. That it runs out of memory, or is not there, is no failure of ours."""
    try:
        masked, said = [error(got, right) for got, right in zip(rival(), truth, strict=True)], "ok"
    except Exception as failure:
        traceback.print_exc()
        masked, said = [None] * len(truth), typed_line(failure)
    return [
        judged(name, error(got, right), its, dtype, said)
        for name, got, its, right in zip(names, mine, masked, truth, strict=True)
        if right.numel()
    ]


def errors_of(setting: Setting, dtype: str, device: str) -> list[dict]:
    """Of what training and decoding call. Raises what our kernels raise."""
    import torch
    from trl.prefix_sharing.attention import Runs, attention_with_lse, shared_prefix_attention

    tensors, weights = inputs(setting, device)
    tensors = [x.to(getattr(torch, dtype)) for x in tensors]
    exact, mask = [x.double() for x in tensors], mask_of(setting, device)
    runs = Runs.of(list(setting.lengths), torch.device(device))
    mine = results(lambda *x: shared_prefix_attention(*x[:3], [x[3:]], runs, None), tensors, weights)
    truth = results(lambda *x: whole(*x, mask, plain=True), exact, weights)
    rival = lambda: results(lambda *x: whole(*x, mask, plain=False), tensors, weights)  # noqa: E731
    found = compared(TENSORS, mine, rival, truth, dtype)
    if setting.prompt:
        query, key, value = (tensors[i].repeat(3, 1, 1, 1) for i in (0, 3, 4))
        output, lse = attention_with_lse(query, key, value, is_causal=False, scale=None)
        groups = setting.heads // setting.key_heads
        keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
        scores = (query.double() @ keys.transpose(2, 3)) * setting.head_size**-0.5
        whole_rows = [x.to(query.dtype) for x in (keys, values)]
        rival = lambda: [torch.nn.functional.scaled_dot_product_attention(query, *whole_rows).double()]  # noqa: E731
        found += compared(["decoding"], [output.double()], rival, [scores.softmax(-1) @ values], dtype)
        found.append(judged("log-sum-exp", error(lse.double(), scores.logsumexp(-1)), 0.0, dtype))
    return found


def run(argv: list[str] | None) -> int:
    here = place(Parser("checks.kernels", __doc__).parse_args(argv))
    use_fork(ARMS["shared"])
    table = []
    for name, setting in SETTINGS[here.device].items():
        sizes = vars(setting) | {"prompt_tokens": setting.prompt}
        sizes["completion_tokens"] = " ".join(map(str, setting.lengths))
        for dtype in DTYPES[here.device]:
            try:
                rows = errors_of(setting, dtype, here.device)
            except Exception as failure:  # a kernel that is not there, or takes other arguments, is a finding
                traceback.print_exc()
                rows = [{"tensor": "all", "verdict": typed_line(failure)}]
            table += [{"setting": name, "dtype": dtype, **sizes, **here.facts, **row} for row in rows]
            write_csv(here.folder / "kernels.csv", COLUMNS, table)
            wrong = [f"{row['tensor']} {row['verdict']}" for row in rows if row["verdict"] != "ok"]
            print(f"{name:20} {dtype:9} {'; '.join(wrong) or 'ok'}", flush=True)
    return 0 if all(row["verdict"] == "ok" for row in table) else EXIT_VERDICT


def main(argv: list[str] | None = None) -> int:
    return exit_code("kernels", run, argv)


if __name__ == "__main__":
    sys.exit(main())

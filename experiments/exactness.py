"""Per-token log-probabilities and gradients of shared prompts beside untouched rows, on this device.

    python -m experiments.exactness [--device cuda]

The truth is the same weights in float64, row by row, without the fused LM head. Stock's own error stands beside that
of prefix sharing, in float32 and with bfloat16 weights under autocast, and the attention kernels that ran are named.
Exit code 1 if prefix sharing's error is larger than it may be: 1e-5 in float32 (norms, softmax and the head round
there), and in bfloat16 that of stock and a tenth, because sums are in another order.
"""

import argparse
import csv
import sys
from contextlib import nullcontext
from pathlib import Path

from experiments import config as cfg
from experiments.config import ARMS, ROOT
from experiments.models import shape_config
from experiments.peaks import with_layers
from experiments.record import source_commit
from experiments.train import pick_device, use_fork

COLUMNS = (
    "precision", "way", "log_prob_error", "gradient_error", "attention", "shape", "prompt_tokens",
    "completion_tokens", "k", "device_kind", "device_name", "torch_version", "transformers_version", "commit",
)  # fmt: skip
# (shape, layers or None for all, vocabulary, prompt, completion, k)
WORKLOADS = {"cpu": ("qwen3-8-layers", 2, 2000, 64, 16, 4), "cuda": ("qwen3-0.6b", None, 151_936, 3000, 256, 8)}
BATCHES = 4  # rounding is random: one small batch can err a fifth more or less
FLOAT32_BOUND, BFLOAT16_MARGIN = 1e-5, 1.1


class Batch:
    """One prompt with k completions of different lengths, and the loss that all ways compute."""

    def __init__(self, seed: int, device: str, vocab_size: int, prompt: int, completion: int, k: int):
        import torch

        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, vocab_size, (k, prompt + completion), generator=generator)
        ids[:, :prompt] = ids[0, :prompt]
        lengths = torch.linspace(completion // 2, completion, k).long()
        mask = (torch.arange(prompt + completion) < prompt + lengths[:, None]).long()
        self.ids, self.mask, self.prompt = ids.to(device), mask.to(device), prompt
        self.labels = self.ids.masked_fill(self.mask == 0, -100)
        self.labels[:, :prompt] = -100
        self.weights = torch.linspace(-1, 1, k * completion, device=device).view(k, completion)
        self.weights = self.weights * self.mask[:, prompt:]

    def truth(self, model):
        """(log-probabilities, gradient), float64, row by row."""
        import torch

        rows = []
        for ids, weights in zip(self.ids, self.weights, strict=True):
            hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, self.prompt - 1 : -1]
            log_probs = model.get_output_embeddings()(hidden).log_softmax(-1)
            log_probs = log_probs.gather(-1, ids[self.prompt :, None])[:, 0] * (weights != 0)
            (log_probs * weights).sum().backward()
            rows.append(log_probs.detach())
        return torch.stack(rows), gradient(model)

    def run(self, model, autocast, **settings):
        """The same with the fork's fused LM head."""
        with autocast:
            output = model(
                input_ids=self.ids, attention_mask=self.mask, labels=self.labels, fused_lm_head=True, **settings
            )
        log_probs = output.log_probs[:, -self.weights.shape[1] :] * (self.weights != 0)
        (log_probs * self.weights).sum().backward()
        return log_probs.detach(), gradient(model)


def gradient(model):
    import torch

    flat = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def attention_kernels(profiler) -> str:
    """Names of the attention operations that torch's profiler saw."""
    names = {
        event.key.removeprefix("aten::_scaled_dot_product_")
        for event in profiler.key_averages()
        if event.key.startswith("aten::_scaled_dot_product_")
    }
    return " ".join(sorted(name for name in names if not name.endswith("backward"))) or "none"


def compare(device: str, precision: str):
    """Yields (way, error of log-probabilities, error of the gradient, attention kernels). Errors are norms relative to
    the truth's, root mean squares over the batches."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoModelForCausalLM
    from trl.models.prefix_sharing import SharedPrefixPasses, enable_prefix_sharing
    from trl.trainer.utils import add_fused_lm_head

    shape, layers, vocab_size, *sizes = WORKLOADS[device]
    dtype, hf_config = getattr(torch, precision), shape_config(shape, vocab_size)
    hf_config = with_layers(hf_config, layers or hf_config.num_hidden_layers)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).to(device).train()
    exact = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float64).to(device).train()
    exact.load_state_dict(model.state_dict())
    exact.gradient_checkpointing_enable()
    model.gradient_checkpointing_enable()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    enable_prefix_sharing(model)
    autocast = torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16)
    together = SharedPrefixPasses(prefix_length=sizes[0], group_size=sizes[2])
    two = SharedPrefixPasses(prefix_length=sizes[0], completions_per_forward=2, group_size=sizes[2])
    ways = {"stock": {}, "shared": {"passes": together}, "shared, two a pass": {"passes": two}}
    squares = {way: [0.0, 0.0] for way in ways}
    kernels: dict[str, str] = {}
    for seed in range(BATCHES):
        batch = Batch(seed, device, vocab_size, *sizes)
        truth = batch.truth(exact)
        for way, settings in ways.items():
            # Names of operations, also of those on a GPU; on the first batch alone, it is slow
            names = profile(activities=[ProfilerActivity.CPU]) if seed == 0 else nullcontext()
            with names as profiler:
                got = batch.run(model, autocast, **settings)
            if profiler is not None:
                kernels[way] = attention_kernels(profiler)
            for i in range(2):
                squares[way][i] += ((got[i].double() - truth[i]).norm() / truth[i].norm()).item() ** 2
    for way, sums in squares.items():
        yield way, *((total / BATCHES) ** 0.5 for total in sums), kernels[way]


def run(args: argparse.Namespace) -> int:
    device, device_name, _ = pick_device(args.device)
    use_fork(ARMS["shared"])
    import torch
    import transformers

    folder = args.results / (args.machine or cfg.machine_name(device, device_name))
    folder.mkdir(parents=True, exist_ok=True)
    shape, layers, _, prompt, completion, k = WORKLOADS[device]
    facts = {
        "shape": f"{shape}, {layers} layers" if layers else shape,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "k": k,
        "device_kind": device,
        "device_name": device_name,
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "commit": source_commit(),
    }
    failed = []
    with (folder / "exactness.csv").open("w", newline="", buffering=1) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for precision in ("float32", "bfloat16"):
            stock = None
            for way, *errors, kernels in compare(device, precision):
                stock = stock or errors
                allowed = [FLOAT32_BOUND] * 2 if precision == "float32" else [x * BFLOAT16_MARGIN for x in stock]
                if any(got > limit for got, limit in zip(errors, allowed, strict=True)):
                    failed.append(f"{way} in {precision}")
                names = dict(zip(("log_prob_error", "gradient_error"), (f"{x:.3e}" for x in errors), strict=True))
                writer.writerow({"precision": precision, "way": way, **names, "attention": kernels, **facts})
                told = f"log-probs {errors[0]:.1e}  gradient {errors[1]:.1e}  {kernels}"
                print(f"{precision:9} {way:19} {told}", flush=True)
    if failed:
        print(f"larger than it may be: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.exactness", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="holds one folder a machine")
    parser.add_argument("--machine", help="folder name below --results; default: from the device's name")
    return cfg.exit_code("exactness", run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())

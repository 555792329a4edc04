"""Prefix sharing beside whole rows on the emulated device, families one after another.

    families.py NAME,... bf16|autocast|float32

Prints a line of JSON a family: {"family", "whole": [tokens, gradient], "ways": {way: [tokens, gradient]},
"generation", "unsupported"}. Errors are relative and beside float64 on the host; that of generation is beside whole
rows.
"""

import json
import sys
from contextlib import nullcontext

import emulate
import torch

from experiments.checks import family_check
from experiments.checks.float64 import pure_float64
from experiments.checks.tiny_families import build, families


def made(family, dtype):
    from experiments.fused_head import add_fused_lm_head

    model = build(family).train()
    model.set_experts_implementation("eager")
    add_fused_lm_head(model.to(dtype), temperature=0.9, outputs=("log_probs", "entropy"))
    return model


def truth_of(family, model):
    """What whole rows give in float64 on the host, with the same weights."""
    torch.set_default_dtype(torch.float64)
    try:
        with pure_float64():
            exact = made(family, torch.float64)
            exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()}, strict=False)
            return family_check.run(exact)
    finally:
        torch.set_default_dtype(torch.float32)


def errors_of(family, setting: str) -> dict:
    from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing

    model = made(family, torch.bfloat16 if setting == "bf16" else torch.float32)
    truth = truth_of(family, model)
    precision = torch.autocast("cuda", torch.bfloat16) if setting == "autocast" else nullcontext()
    model.cuda()
    with precision:
        whole = family_check.run(model)
        decoded = family_check.generate(model)
    enable_prefix_sharing(model)
    with precision:
        ways = {**family_check.ways(model, {}), "micro-batches": family_check.run_micro_batches(model)}
        shared = family_check.generate(model, shared=True)
    for found in (decoded, shared):
        if isinstance(found, str):
            raise RuntimeError(found)
    return {
        "whole": family_check.error_of(whole, truth),
        "ways": {name: family_check.error_of(found, truth) for name, found in ways.items()},
        "generation": family_check.error_of([shared], [decoded])[0],
        "unsupported": emulate.current.unsupported,
    }


def main(names: str, setting: str) -> None:
    by_name = {name: family for family in families() for name in family.names}
    for name in names.split(","):
        print(json.dumps({"family": name, **errors_of(by_name[name], setting)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Prompts with images, shared beside whole rows on the emulated device, families one after another.

    images.py NAME,...

bfloat16 weights. Prints a line of JSON a family: {"family", "whole": [tokens, gradient, gradient of the tower],
"ways": {way: the same}, "unsupported"}: errors relative, beside float64 on the host.
"""

import json
import sys
from pathlib import Path

import emulate
import torch

from experiments.checks.family_check import error
from experiments.checks.float64 import pure_float64
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

sys.path.insert(0, str(Path(__file__).parents[2]))
from image_rows import batch, build_with_images, run  # noqa: E402

WAYS = {
    "together": {},
    "two a pass": dict(completions_per_forward=2),
    "some tokens a pass": dict(tokens_per_forward=9),
}


def errors_of(family: str) -> dict:
    model, exact = build_with_images(family, torch.bfloat16), build_with_images(family, torch.bfloat16).double()
    inputs, prompt, counts = batch(family, model.config.image_token_id)
    with pure_float64():
        truth = run(exact, inputs, prompt)
    model.cuda()
    inputs = {name: x.cuda() for name, x in inputs.items()}

    def errors(**shared):
        return [
            error(mine.cpu(), theirs) for mine, theirs in zip(run(model, inputs, prompt, **shared), truth, strict=True)
        ]

    whole = errors()
    enable_prefix_sharing(model)
    ways = {way: errors(passes=SharedPrefixPasses(prompt, **settings, **counts)) for way, settings in WAYS.items()}
    return {"whole": whole, "ways": ways, "unsupported": emulate.current.unsupported}


if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        print(json.dumps({"family": name, **errors_of(name)}), flush=True)

"""Prefix sharing beside whole rows on the emulated device, families one after another.

    families.py NAME,... bf16|autocast|float32|spread|images

Prints a line of JSON a family: {"family", "whole": [tokens, gradient], "ways": {way: [tokens, gradient]},
"generation", "unsupported"}. Errors are relative and beside float64 on the host; that of generation is beside whole
rows. Spread is a model over two devices, in float32. With images in the prompts, weights are bfloat16, the gradient of
the tower is a third error, and nothing is generated.
"""

import json
import sys
from pathlib import Path

import emulate
import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import compute_module_sizes

from experiments.checks.family_check import errors_beside_float64
from experiments.checks.tiny_families import family

sys.path.insert(0, str(Path(__file__).parents[2]))
import image_rows  # noqa: E402

PRECISIONS = {
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
    "float32": (torch.float32, None),
    "spread": (torch.float32, None),
}
WAYS_WITH_IMAGES = {
    "together": {},
    "two a pass": {"completions_per_forward": 2},
    "some tokens a pass": {"tokens_per_forward": 9},
}


def spread(model):
    """Over two devices, as `device_map="auto"` does it."""
    size = compute_module_sizes(model)[""]
    device_map = infer_auto_device_map(model, {0: int(0.6 * size), 1: size}, model._no_split_modules)
    model = dispatch_model(model, device_map)
    assert {param.device.index for param in model.parameters()} == {0, 1}
    return model


names, setting = sys.argv[1:]
for name in names.split(","):
    if setting == "images":
        found = {"errors": image_rows.errors_beside_float64(name, WAYS_WITH_IMAGES, device="cuda")}
    else:
        place = spread if setting == "spread" else None
        found = errors_beside_float64(family(name), *PRECISIONS[setting], device="cuda", place=place)
    errors = {way: of_batch for way, (of_batch,) in found["errors"].items()}
    line = {
        "family": name,
        "whole": errors.pop("whole rows"),
        "ways": errors,
        "generation": found.get("decoded beside whole rows"),
        "unsupported": emulate.current.unsupported,
    }
    print(json.dumps(line), flush=True)

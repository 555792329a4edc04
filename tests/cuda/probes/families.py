"""Prefix sharing beside whole rows on the emulated device, families one after another.

    families.py NAME,... bf16|autocast|float32

Prints a line of JSON a family: {"family", "whole": [tokens, gradient], "ways": {way: [tokens, gradient]},
"generation", "unsupported"}. Errors are relative and beside float64 on the host; that of generation is beside whole
rows.
"""

import json
import sys

import emulate
import torch

from experiments.checks.family_check import errors_beside_float64
from experiments.checks.tiny_families import family

PRECISIONS = {
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
    "float32": (torch.float32, None),
}


def errors_of(name: str, setting: str) -> dict:
    found = errors_beside_float64(family(name), *PRECISIONS[setting], device="cuda")
    errors = {way: of_batch for way, (of_batch,) in found["errors"].items()}
    return {
        "whole": errors.pop("whole rows"),
        "ways": errors,
        "generation": found["decoded beside whole rows"],
        "unsupported": emulate.current.unsupported,
    }


def main(names: str, setting: str) -> None:
    for name in names.split(","):
        print(json.dumps({"family": name, **errors_of(name, setting)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What torch counts as allocated for cuBLAS: MiB after a product, after one with a bias, and after their backward,
which another thread computes with a handle of its own. Prints JSON."""

import json
import time

import torch


def main() -> None:
    found = []
    weight = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.empty(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    start = torch.cuda.memory_allocated()

    def note():
        found.append(round((torch.cuda.memory_allocated() - start) / 2**20, 1))

    product = weight @ weight
    note()
    total = torch.nn.functional.linear(product, weight, bias).sum()
    note()
    total.backward()
    note()
    print(json.dumps({"capability": torch.cuda.get_device_capability(), "mib": found}))
    time.sleep(0.5)  # the backward's thread still lets go of it; a Python that has ended would abort


if __name__ == "__main__":
    main()

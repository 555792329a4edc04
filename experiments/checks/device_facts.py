"""What device this is, and what of it can be used: the first thing that a measurement on it needs.

    python -m experiments.checks.device_facts [--device cuda]

Writes results/<machine>/device.json: the driver, versions, settings, what attention PyTorch has there, whether NVML
lists this process. A part that fails is a text in the place of its value.
"""

import os
import platform
import subprocess
import sys
from importlib.metadata import distributions

from experiments.measuring import Parser, place
from rloo_memory.errors import program
from rloo_memory.models import typed_line
from rloo_memory.storage import write_json


@program("device_facts")
def main(argv: list[str] | None) -> int:
    here = place(Parser("checks.device_facts", __doc__).parse_args(argv))
    facts = {**here.facts, "platform": platform.platform(), "python": sys.version.split()[0], "cores": os.cpu_count()}
    facts["packages"] = {package.name: package.version for package in distributions()}
    facts["settings"] = {name: value for name, value in os.environ.items() if name.startswith(("PYTORCH_", "TORCH_"))}
    for name, part in {"device": properties, "nvml": nvml, "driver": driver}.items():
        try:
            facts[name] = part(here.device)
        except Exception as error:  # whatever this machine does not have
            facts[name] = typed_line(error)
        print(f"{name}: {facts[name]}", flush=True)
    write_json(here.folder / "device.json", facts)
    return 0


def properties(device: str) -> dict:
    import torch

    if device == "cpu":
        return {"threads": torch.get_num_threads()}
    of_device = torch.cuda.get_device_properties(0)
    backends = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
    return {
        "name": of_device.name,
        "capability": f"{of_device.major}.{of_device.minor}",
        "total_bytes": of_device.total_memory,
        "multiprocessors": of_device.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flash_is_built": torch.backends.cuda.is_flash_attention_available(),
        **{name: getattr(torch.backends.cuda, name)() for name in backends},
        "level_bytes": of_device.total_memory - torch.cuda.mem_get_info()[0],
    }


def nvml(device: str) -> dict:
    """How many devices and processes NVML lists: a container may hide processes, or give them other numbers."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    held = torch.ones(2**20, device=device)  # so that there is a process to list
    listed = [entry.pid for handle in handles for entry in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)]
    del held
    return {"devices": len(handles), "processes": len(listed), "lists_this_process": os.getpid() in listed}


def driver(device: str) -> str:
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    return said.stdout.splitlines()[0].partition(" (UUID")[0]


if __name__ == "__main__":
    sys.exit(main())

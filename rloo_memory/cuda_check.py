"""What keeps a training from this machine's GPU, in a line each, before a model loads.

    rloo-memory check

Exit code 1 if there is something. Torch is imported where it is asked.
"""

import argparse
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from rloo_memory.errors import ConfigError

BF16 = (8, 0)  # compute capability of Ampere


def unused_gpu() -> str:
    """Why torch cannot use a GPU that the driver lists; nothing where it can, where none is listed, or all are hidden
    by `CUDA_VISIBLE_DEVICES`."""
    import torch

    from rloo_memory import nvml

    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or torch.cuda.is_available():
        return ""
    try:
        if not nvml.nvml_devices():
            return ""
    except nvml.pynvml.NVMLError:
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; rm -r .venv && ./setup_env.sh --cuda"
    try:
        torch.cuda.init()
        why = "it finds none"
    except RuntimeError as error:
        why = str(error).split(". ")[0].splitlines()[0]
    needed = "the 580 series" if torch.version.cuda.startswith("13.") else f"one for CUDA {torch.version.cuda}"
    return f"torch {torch.__version__} cannot use the GPU ({why}); install a driver of {needed} or newer"


def no_kernels() -> str:
    """Why the current GPU runs nothing of torch's; nothing where it does."""
    import torch

    try:
        torch.ones(1, device="cuda").add_(1)
    except torch.OutOfMemoryError:  # said where it matters
        return ""
    except RuntimeError as error:
        why, name = str(error).splitlines()[0], torch.cuda.get_device_name()
        version, builds = torch.cuda.get_device_capability(), ", ".join(torch.cuda.get_arch_list())
        return (
            f"{name} (compute capability {version[0]}.{version[1]}) runs no kernel of torch {torch.__version__}, "
            f"which is built for {builds} ({why}); --device cpu or --use_cpu true, or a build of torch for it"
        )
    torch.cuda.empty_cache()
    return ""


def no_compiler() -> str:
    """What Triton needs to start kernels and does not find: it compiles a small C program at the first one."""
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    packages = {} if has_compiler else {"gcc": "gcc"}  # by what is missing
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        packages["Python.h"] = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    if not packages:
        return ""
    return (
        f"Triton compiles the start of TRL's LM head on a GPU, and {' and '.join(packages)} are not here: "
        f"apt-get install {' '.join(packages.values())}"
    )


def no_bf16(remedy: str) -> str:
    """Why bfloat16 does not train on the current GPU; nothing where it does."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    if (major, minor) >= BF16:
        return ""
    return (
        f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; bfloat16, in which TRL's LM head "
        f"trains from 8.0 (Ampere) on, was never tried below that; {remedy}"
    )


def problems_here(bf16: bool, remedy: str) -> list[str]:
    """Why TRL 1.16 cannot train on the current GPU, in `bf16` or at all. `remedy` says what to set in place of
    bfloat16."""
    return list(filter(None, (no_kernels(), no_compiler(), no_bf16(remedy) if bf16 else "")))


def check(bf16: bool, remedy: str) -> None:
    """Raise `ConfigError` where there are `problems_here`."""
    if problems := problems_here(bf16, remedy):
        raise ConfigError("; ".join(problems))


def main(argv: list[str] | None = None) -> int:
    description, _, more = __doc__.partition("\n\n    rloo-memory check\n\n")
    argparse.ArgumentParser("rloo-memory check", description=f"{description} {more}").parse_args(argv)
    import torch

    if torch.cuda.is_available():
        problems = problems_here(bf16=True, remedy="train with --bf16 false --fp16 true")
        nothing = f"gpu: {torch.cuda.get_device_name()}: nothing keeps trainings from it"
    else:
        problems = list(filter(None, [unused_gpu()]))
        nothing = "gpu: none here, or all hidden by CUDA_VISIBLE_DEVICES; trainings take the CPU"
    for problem in problems:
        print(f"gpu: {problem}", file=sys.stderr)
    if not problems:
        print(nothing)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

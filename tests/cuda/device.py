"""The emulated device: its libraries, compiled from the C sources here, and the environment of programs that see it.

    .venv-cuda/bin/python tests/cuda/device.py COMMAND ...    runs any program on it

EMULATE=all has the values of kernels computed on the host (small models), ints those of integers alone (real sizes:
device memory is reserved and not touched), none no values. What the process counted goes to EMULATE_REPORT, a line of
JSON a process. Others: see runtime.cpp.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILT = ROOT / ".build" / "cuda"


def compile_libraries() -> Path:
    """The folder of the three libraries, compiled where a source is newer. Raises SystemExit without a compiler."""
    headers = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "include")
    plain = ["-shared", "-fPIC", "-w"]
    sources = {
        "libcudart.emulated.so": ("g++", HERE / "runtime.cpp", "-O1", f"-I{HERE}", f"-I{headers}", *plain),
        "libcuda.so.1": ("gcc", HERE / "driver.c", *plain, "-Wl,-soname,libcuda.so.1"),
        "libnvidia-ml.so.1": ("gcc", HERE.parent / "stub_nvml.c", *plain),
    }
    BUILT.mkdir(parents=True, exist_ok=True)
    for name, (compiler, source, *options) in sources.items():
        library = BUILT / name
        if library.exists() and library.stat().st_mtime > source.stat().st_mtime:
            continue
        if not shutil.which(compiler):
            raise SystemExit(f"the emulated device is compiled by {compiler}, which is not here: apt-get install g++")
        new = library.with_suffix(f".{os.getpid()}")  # whole, or not there
        subprocess.run([compiler, *options, str(source), "-o", str(new)], check=True)
        new.replace(library)
    return BUILT


def environment(emulate: str = "all", **settings) -> dict[str, str]:
    """The environment of a program on the device. `settings` are variables; those of runtime.cpp and `report` in
    short, such as gib=8 for EMULATED_CUDA_GIB."""
    built = compile_libraries()
    known = {name: f"EMULATED_CUDA_{name.upper()}" for name in ("gib", "capability", "devices", "fault", "copy_limit")}
    known["report"] = "EMULATE_REPORT"
    found = {
        **os.environ,
        "LD_LIBRARY_PATH": str(built),
        "LD_PRELOAD": str(built / "libcudart.emulated.so"),
        "EMULATE": emulate,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
    }
    return found | {known.get(name, name): str(value) for name, value in settings.items()}


if __name__ == "__main__":
    chosen = os.environ.get("EMULATE", "all")
    os.execvpe(sys.argv[1], sys.argv[1:], environment(chosen))

"""What keeps a training from a GPU, as far as it can be seen without one. On an emulated device: tests/cuda."""

import pytest

from rloo_memory import cuda_check, nvml


@pytest.mark.parametrize(
    "compilers, header, parts",
    [
        (["gcc"], True, []),
        (["clang"], True, []),
        ([], True, ["gcc are", "apt-get install gcc"]),
        (["gcc"], False, ["Python.h are", "-dev"]),
        (["CC"], True, []),
        ([], False, ["gcc and Python.h", "apt-get install gcc python3."]),
    ],
)
def test_what_triton_compiles_with_is_named_where_it_is_missing(monkeypatch, tmp_path, compilers, header, parts):
    monkeypatch.setenv("CC", "tcc") if "CC" in compilers else monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(cuda_check.shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(cuda_check.sysconfig, "get_path", lambda name: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    said = cuda_check.no_compiler()
    assert bool(said) == bool(parts) and all(part in said for part in parts), said


@pytest.mark.torch
def test_a_gpu_beside_a_build_for_cpus_is_named(monkeypatch):
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(nvml, "nvml_devices", lambda: ["a GPU"])
    assert "build without CUDA" in cuda_check.unused_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not cuda_check.unused_gpu(), "hidden on purpose"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(nvml, "nvml_devices", lambda: [])
    assert not cuda_check.unused_gpu()

"""What keeps a training from a GPU, as far as it can be seen without one. On an emulated device: tests/cuda."""

import torch

from rloo_memory import cuda_check, nvml


def test_what_triton_compiles_with_is_named_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(cuda_check.shutil, "which", lambda name: None)
    monkeypatch.setattr(cuda_check.sysconfig, "get_path", lambda name: str(tmp_path))
    said = cuda_check.no_compiler()
    assert "gcc and Python.h" in said and "apt-get install gcc python3." in said
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(cuda_check.shutil, "which", lambda name: name if name == "clang" else None)
    assert not cuda_check.no_compiler()


def test_a_gpu_beside_a_build_for_cpus_is_named(monkeypatch):
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

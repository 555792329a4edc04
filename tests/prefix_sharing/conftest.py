import pytest
import tiny_hub


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp("hub")
    datasets.config.HF_DATASETS_CACHE = str(tmp_path_factory.mktemp("datasets"))
    tiny_hub.make(folder)
    return folder


@pytest.fixture(autouse=True)
def here(request, monkeypatch, tmp_path, hub):
    """Models and data are found by their names. A test of a class has `self.tmp_dir`."""
    monkeypatch.chdir(hub)
    # Configs ask for bfloat16 unless told otherwise, and transformers refuses it without a GPU unless `use_cpu` is set
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    if request.instance is not None:
        request.instance.tmp_dir = str(tmp_path)

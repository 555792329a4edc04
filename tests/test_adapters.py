"""A LoRA adapter's folder in place of a model's: the training goes on, and its model is planned with its rank."""

import json
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from small_profile import small_profile
from transformers import AutoConfig

from rloo_memory.adapters import adapter_of
from rloo_memory.errors import ConfigError
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import policy as launch_policy
from rloo_memory.plan.options import model_config, settings_of_adapter
from trl import ModelConfig

PROFILE = small_profile(
    2, 4, prefix_sharing=True, max_steps=1, predict_memory=False, save_strategy="steps", use_peft=True, lora_r=3,
    lora_alpha=7, lora_dropout=0.0, learning_rate=0.1,
)  # fmt: skip


@pytest.fixture(scope="module")
def adapter(policy, tmp_path_factory):
    """The output folder of a training with LoRA of rank 3."""
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "profile.yaml").write_text(PROFILE)
    words = [str(folder / "profile.yaml"), "--model_name_or_path", policy, "--output_dir", str(folder / "out")]
    assert launch.main(words) == 0
    return str(folder / "out")


@pytest.mark.slow
def test_a_training_goes_on_from_an_adapter_with_its_own_rank(adapter, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = load_file(f"{adapter}/adapter_model.safetensors")
    for rate in ("0.0", "0.1"):
        words = ["--model_name_or_path", adapter, "--lora_r", "8", "--learning_rate", rate, "--output_dir", rate]
        assert launch.main([f"{adapter}/../profile.yaml", *words]) == 0, capsys.readouterr().err
        after = load_file(f"{rate}/adapter_model.safetensors")
        assert after.keys() == before.keys()
        assert all(after[name].equal(before[name]) for name in before) == (rate == "0.0")
    assert "LoRA of rank 3 trains" in capsys.readouterr().out
    assert adapter_of(rate).settings == adapter_of(adapter).settings


def test_the_planner_takes_an_adapters_model_and_rank(adapter, tmp_path, planned):
    own = {"use_peft": True, "lora_r": 3, "lora_alpha": 7, "lora_dropout": 0.0,
           "lora_target_modules": ["q_proj", "v_proj"]}  # fmt: skip
    assert settings_of_adapter(adapter, {}) == own
    options = ["--prompt", 16, "--completion", 4, "--k", 2, "--arms", "stock", "--json", tmp_path / "plan.json"]
    assert planned("--model", adapter, *options).returncode == 0
    setup = json.loads((tmp_path / "plan.json").read_text())["predictions"][0]["setup"]
    assert (setup["lora_rank"], setup["lora_target_modules"]) == (3, ["q_proj", "v_proj"])
    refused = planned("--model", adapter, *options, "--lora", 8)
    assert refused.returncode == 2 and "is an adapter of rank 3" in refused.stderr


def test_an_adapter_whose_model_is_not_here_is_named_with_it(tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": "/gone/base", "target_modules": "all-linear", "r": 4,
              "lora_alpha": 8, "lora_dropout": 0.0}  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    for function in (launch_policy.check, model_config):
        with pytest.raises(ConfigError, match=f"'{tmp_path}' is an adapter of the model '/gone/base', which is not"):
            function(str(tmp_path))


def test_dropout_is_that_of_the_settings(adapter, policy):
    config = SimpleNamespace(trust_remote_code=False, model_init_kwargs={})
    model = launch_policy.with_adapter(adapter, policy, config, None, 0.5)
    assert 0.5 in [getattr(module, "p", None) for module in model.modules()]


def test_weights_of_mxfp4_are_unpacked_to_be_trained():
    packed = AutoConfig.for_model("qwen3", quantization_config={"quant_method": "mxfp4"})
    assert launch_policy.quantization_of(packed, ModelConfig()).dequantize
    with pytest.raises(ConfigError, match="load_in_4bit is on, .*MXFP4"):
        launch_policy.quantization_of(packed, ModelConfig(load_in_4bit=True))

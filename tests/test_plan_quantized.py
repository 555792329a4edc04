"""Checkpoints whose weights are already quantized."""

import json
from types import SimpleNamespace

import pytest
from transformers import Qwen3Config
from transformers.integrations.finegrained_fp8 import FP8Linear

from rloo_memory.errors import ConfigError
from rloo_memory.models import meta_model, shape_config
from rloo_memory.plan.checkpoint import Quantized, expert_weights, quantized

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip
LAYER, REST = 4 * 128 * 128 + 3 * 128 * 256, 2 * 128 * 512  # weights of linear layers, of embedding and head
NORMS = 2 * (2 * 128 + 2 * 32) + 128


def asked(**settings):
    config = SimpleNamespace(get_text_config=lambda: config, quantization_config=settings)
    return quantized(config)


def test_the_bytes_of_a_weight_are_those_of_its_tensors():
    layer = FP8Linear(700, 1000, block_size=(128, 128), activation_scheme="dynamic", has_bias=False)
    size = sum(x.numel() * x.element_size() for x in layer.parameters())
    assert asked(quant_method="fp8", weight_block_size=[128, 128]).weight_bytes(1000, 700) == size
    # The shapes of down_proj in Qwen2.5-7B-Instruct-GPTQ-Int4 and -AWQ: 18,944 inputs, 3,584 outputs, groups of 128
    packed, scales, zeros, of_inputs = 2368 * 3584 * 4, 148 * 3584 * 2, 148 * 448 * 4, 18944 * 4
    gptq, awq = (asked(quant_method=name, bits=4, group_size=128) for name in ("gptq", "awq"))
    assert gptq.weight_bytes(3584, 18944) == packed + scales + zeros + of_inputs
    assert awq.weight_bytes(3584, 18944) == packed + scales + zeros


def test_kinds_without_a_formula_are_named_and_what_is_unpacked_has_its_16_bits():
    for settings in ({"quant_method": "compressed-tensors"}, {"quant_method": "gptq", "dynamic": {"-:x": {}}}, {}):
        with pytest.raises(ConfigError, match=f"already quantized \\({settings.get('quant_method', '[?]')}\\), and"):
            asked(**settings)
    with pytest.raises(ConfigError, match="cannot be read"):
        asked(quant_method="gptq", bits="four")
    assert asked(quant_method="mxfp4") is None and asked(quant_method="fp8", dequantize=True) is None
    assert asked(load_in_8bit=True) == Quantized("bitsandbytes", 8)


def test_a_checkpoint_is_planned_with_the_bytes_that_it_has(planned, tmp_path):
    nested = 0.5 + 1 / 64 + 4 / 64 / 256
    cases = {
        "bits": (None, ["--bits", "4"], nested * LAYER),
        "four": (BNB, [], nested * LAYER),
        "some": (BNB | {"llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"]}, [],
                 nested * LAYER + (2 - nested) * 3 * 128 * 256 / 2),
        "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, [], LAYER + 4 * (4 + 3 * 2)),
    }  # fmt: skip
    adapters = 4 * 8 * 2 * (4 * 256 + 3 * 384) // 2  # of rank 8, in float32
    for name, (settings, options, of_layer) in cases.items():
        folder, result = tmp_path / name, tmp_path / f"{name}.json"
        Qwen3Config(**SIZES, dtype="bfloat16").save_pretrained(folder)
        if settings:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
        common = ["--model", folder, "--prompt", 16, "--completion", 4, "--k", 2]
        done = planned(*common, "--lora", 8, "--dtype", "bfloat16", "--arms", "stock", "--json", result, *options)
        assert done.returncode == 0, done.stderr
        weights = json.loads(result.read_text())["predictions"][0]["phases"][0]["kinds"]["parameters"]
        of_adapters = adapters * 2 * (1 if name == "fp8" else 0.5)  # bfloat16 as TRL's
        assert weights == pytest.approx(2 * of_layer + 2 * (REST + NORMS) + of_adapters, rel=2e-3), name
        assert ("already quantized" in done.stdout) == (settings is not None)
        if settings:
            refused = planned(*common)
            assert refused.returncode == 2 and "cannot be trained themselves" in refused.stderr, refused.stderr
    other = planned(*common, "--lora", 8, "--bits", 4)
    assert other.returncode == 2 and "already quantized, to 8 bits (fp8), not to 4" in other.stderr
    sharded = planned(*common, "--lora", 8, "--accelerate", "fsdp2.yaml")
    assert sharded.returncode == 2 and "8-bit weights have no formula where FSDP2 shards them" in sharded.stderr
    assert planned(*common, "--lora", 8, "--arms", "stock", "--cards").stdout.count(" cannot") == 3  # 2, 4 and 8 cards
    unpacked = planned(*common, "--lora", 8, "--device", "cpu", "--arms", "stock")
    assert unpacked.returncode == 0 and "unpacked to 16 bits" in unpacked.stdout


def test_experts_are_told_from_convolutions():
    """Which hybrids have, with weights of three dimensions, too."""
    found = {name: expert_weights(meta_model(shape_config(name))) for name in ("qwen3.5-8-layers", "gpt-oss-20b")}
    assert not found["qwen3.5-8-layers"] and len(found["gpt-oss-20b"]) == 2 * 24

"""The planner on other models than the built-in shapes: of other families, with weights that are quantized already.
And on prompts with images: what a processor makes of them, and what they take."""

import copy
import functools
import json
from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING, Qwen3Config
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.models.qwen3_5 import modeling_qwen3_5
from trl.data_utils import prepare_multimodal_messages

from experiments.checks.planner_check import measure
from experiments.checks.setup_trainer import text_dataset
from experiments.checks.tiny_families import tiny_config
from experiments.workload import pictures
from experiments.workload.run_models import save_models
from rloo_memory import data, models
from rloo_memory.errors import ConfigError
from rloo_memory.models import meta_model, shape_config
from rloo_memory.plan.checkpoint import Quantized, expert_weights, quantized
from rloo_memory.plan.images import PromptImages
from rloo_memory.plan.predict import predict
from rloo_memory.plan.setups import Setup
from rloo_memory.shapes import SHAPES


def plan_of_tiny(planned, model_type, folder, *arguments, **fields):
    """The planner's result for a tiny model of that type."""
    tiny_config(CONFIG_MAPPING[model_type], **fields).save_pretrained(folder)
    return planned("--model", folder, "--prompt", 200, "--completion", 32, "--k", 4, *arguments)


def planned_arms(result):
    return [line.split()[0] for line in result.stdout.split("\n\n")[0].splitlines()[2:]]


# Soft-capped attention has no fused kernel; latent attention caches other states than it attends to
@pytest.mark.parametrize("model_type", ["gemma2", "deepseek_v3"])
def test_models_with_another_kind_of_attention_are_planned(planned, model_type, tmp_path):
    result = plan_of_tiny(planned, model_type, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert planned_arms(result) == ["stock", "stock-accumulate", "shared"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ("qwen3.5-8-layers", "lfm2-8-layers"))
def test_layers_with_a_state_are_planned_and_what_is_not_sure_is_said(planned, shape, tmp_path):
    # With adapters: of all weights, micro-batches hold gradients that whole groups of so few tokens do not
    options = ("--model", shape, "--lora", 8, "--prompt", 48, "--completion", 16, "--k", 4, "--arms", "stock,shared")
    result = planned(*options, "--json", tmp_path / "plan.json")
    assert result.returncode == 0, result.stderr[-3000:]
    plans = json.loads((tmp_path / "plan.json").read_text())["predictions"]
    stock, shared = ({phase["phase"]: phase["total"] for phase in each["phases"]} for each in plans)
    assert stock["train"] > shared["train"] and stock["score"] >= shared["score"]
    assert "with the kernels of flash-linear-attention, causal-conv1d, mamba-ssm they hold other" in result.stdout


def test_scores_of_any_size_are_planned(planned, tmp_path):
    """Attention with sinks holds all scores: here 100 TiB in one tensor."""
    positions = dict(max_position_embeddings=2**20, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    options = ("--prompt", 900_000, "--completion", 100_000, "--k", 8, "--lora", 4, "--arms", "stock")
    result = plan_of_tiny(planned, "gpt_oss", tmp_path, *options, **positions)
    assert result.returncode == 0, result.stderr[-3000:]
    peak = float(result.stdout.split("\n\n")[0].splitlines()[-1].split()[4].rstrip("*"))
    assert peak > 8 * 4 * 10**12 * 2 / 2**30  # rows, heads, queries x keys, bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type, architecture, vocab, prompt, k, asked",
    [
        # Values are smaller than keys, and no kernel of a CPU takes them, so all scores are held
        ("deepseek_v3", "DeepseekV3ForCausalLM", 1000, 480, 4, {}),
        ("llama", "LlamaForCausalLM", 1000, 480, 4, {"attn_implementation": "eager"}),
        ("llama", "LlamaForCausalLM", 8000, 40, 32, {"top_p": 0.9, "top_k": 40, "temperature": 0.9}),
    ],
)
def test_scores_and_sampling_are_planned_as_measured(tmp_path, model_type, architecture, vocab, prompt, k, asked):
    sizes = {"prompt_tokens": prompt, "max_completion_length": 16} | asked
    setup = Setup(**sizes, device="cpu", padded=False, beta=0.0, dtype="float32", bf16=False).with_k(k)
    config = tiny_config(CONFIG_MAPPING[model_type], vocab_size=vocab, architectures=[architecture])
    documents = data.load_documents()
    tokenizer = models.build_tokenizer(documents, vocab)
    save_models(tmp_path, config, tokenizer, reward=False)
    prompts = text_dataset(data.build_prompts(documents, tokenizer, setup.prompt_tokens))
    measured, _ = measure(setup, tmp_path, tokenizer, prompts)
    predicted = {peak.phase: peak.total for peak in predict("stock", setup, config).phases}
    assert {phase: predicted[phase] for phase in measured} == pytest.approx(measured, rel=0.03)


def test_kernels_that_are_installed_stay_out_of_a_prediction(planned, monkeypatch):
    """Kernels take no tensors without values: transformers' own code is planned in their place."""
    own = modeling_qwen3_5.torch_chunk_gated_delta_rule.__wrapped__
    kernel = functools.wraps(own)(lambda *args, **kwargs: pytest.fail("the kernel ran"))
    options = ("--model", "qwen3.5-8-layers", "--prompt", 32, "--completion", 8, "--k", 4, "--arms", "stock")
    expected = planned(*options).stdout
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", kernel)
    assert planned(*options).stdout == expected != ""


@pytest.mark.parametrize(
    "model_type, reason",
    [
        ("stablelm", "does not go through `transformers.AttentionInterface`"),
        ("mamba2", "whose state cannot be shared"),  # which has no attention, and no positions
    ],
)
def test_a_model_whose_prompts_cannot_be_shared_is_planned_without(planned, tmp_path, model_type, reason):
    result = plan_of_tiny(planned, model_type, tmp_path)
    assert result.returncode == 0 and reason in result.stderr, result.stderr[-3000:]
    assert planned_arms(result) == ["stock", "stock-accumulate"]
    alone = plan_of_tiny(planned, model_type, tmp_path, "--arms", "shared")
    assert alone.returncode == 2 and reason in alone.stderr.splitlines()[-1]


# In billions, as the models' own pages have them
PUBLISHED = {
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77,
    "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53, "qwen3-vl-8b": 8.77, "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77, "qwen2.5-vl-7b": 8.29, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03,
    "llama-3.3-70b": 70.55, "gemma-3-1b": 1.00, "gemma-3-4b": 4.30, "gemma-3-12b": 12.19, "gemma-3-27b": 27.43,
    # 26.90, 8.95 and 4.21 of text; the pages' 9.65 of the 9B has a head for several tokens, which is not trained
    "qwen3.5-27b": 26.90 + 0.46, "qwen3.5-9b": 8.95 + 0.46, "qwen3.5-4b": 4.21 + 0.45,
    "mistral-7b-v0.3": 7.25, "mistral-small-24b-2501": 23.57, "gpt-oss-20b": 20.91, "phi-4": 14.66, "smollm3-3b": 3.08,
}  # fmt: skip


def test_built_in_shapes_have_as_many_weights_as_the_published_models():
    assert models.named_config("mistralai/Mistral-7B-Instruct-v0.3").model_type == "mistral", "by its name on the hub"
    assert PUBLISHED.keys() == {name for name in SHAPES if name != "tiny-qwen3" and "8-layers" not in name}
    for name, size in PUBLISHED.items():
        weights = meta_model(shape_config(name)).parameters()
        assert sum(p.numel() for p in weights) / 1e9 == pytest.approx(size, rel=5e-3), name


# -- weights that are quantized already -------------------------------------------------------------------------------

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


# -- prompts with images ----------------------------------------------------------------------------------------------

WITH_IMAGES = ("--completion", 16, "--k", 4, "--prompt", 200)


@pytest.mark.parametrize("shape", ["qwen2.5-vl-8-layers", "qwen3-vl-8-layers", "gemma-3-8-layers"])
@pytest.mark.parametrize("sizes", [((280, 224),), ((100, 90), (203, 57)), ((57, 200),)])
def test_images_have_the_tokens_and_the_pixels_that_a_processor_gives_them(shape, sizes):
    tokenizer = models.build_tokenizer(data.load_documents(), 600)
    hf_config = pictures.with_token_ids(shape_config(shape), pictures.with_image_tokens(tokenizer))
    row = pictures.dataset_of(sizes, 1, rows=1)[0]
    chat = prepare_multimodal_messages(copy.deepcopy(row["prompt"]), images=row["images"])
    processor = pictures.processor_of(hf_config, tokenizer)
    given = processor.apply_chat_template(
        [chat], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    planned = PromptImages.of(sizes, hf_config)
    assert (given["input_ids"] == planned.token).sum() == sum(planned.lengths)
    assert tuple(given["pixel_values"].shape) == planned.pixels
    assert planned.grid is None or given["image_grid_thw"].tolist() == list(map(list, planned.grid))


@pytest.mark.slow
def test_an_image_takes_a_tower_and_its_pixels_once_a_prompt_where_prompts_are_shared(planned, tmp_path):
    kinds = {}
    for name, image in {"text": (), "image": ("--image", "280x224")}.items():
        path = tmp_path / f"{name}.json"
        model = ("--model", "qwen2.5-vl-8-layers", "--beta", 0, "--lora", 4, "--no-gradient-checkpointing")
        result = planned(*model, *WITH_IMAGES, *image, "--arms", "stock,shared", "--json", path)
        assert result.returncode == 0, result.stderr
        assert ("80 of the prompt's tokens are its image" in result.stdout) == (name == "image")
        for prediction in json.loads(path.read_text())["predictions"]:
            kinds[name, prediction["arm"]] = {phase["phase"]: phase["kinds"] for phase in prediction["phases"]}
    one, towers = 320 * 3 * 2 * 14**2 * 4, {}  # bytes: patches of two frames of three colours in float32
    for arm in ("stock", "shared"):
        of_text, of_image = kinds["text", arm], kinds["image", arm]
        assert "images" not in of_text["train"]
        # those of the rollout that is trained on; before, also those of the one that comes
        assert of_image["train"]["images"] == 4 * one and of_image["generate"]["images"] == 8 * one
        towers[arm] = of_image["train"]["activations"] - of_text["train"]["activations"]
        assert of_image["train"]["optimizer state"] > of_text["train"]["optimizer state"]  # the tower's adapters
    assert towers["shared"] > 0 and 3.5 < towers["stock"] / towers["shared"] < 4.5, towers


def test_a_token_budget_takes_images_where_prompts_are_shared_and_nowhere_else(planned):
    options = ("--model", "qwen2.5-vl-8-layers", *WITH_IMAGES, "--image", "56x56", "--tokens-per-forward", 40)
    result = planned(*options, "--arms", "stock-tokens,shared")
    assert result.returncode == 0 and "\nshared " in result.stdout and "\nstock-tokens " not in result.stdout
    assert "stock-tokens: tokens_per_forward 40 divides rows of text" in result.stderr

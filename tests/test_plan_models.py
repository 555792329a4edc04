"""The planner on models of other families than the built-in shapes."""

import functools
import json

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_5 import modeling_qwen3_5

from experiments.checks.planner_check import measure
from experiments.checks.setup_trainer import text_dataset
from experiments.checks.tiny_families import tiny_config
from experiments.workload.run_models import save_models
from rloo_memory import data, models
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
        weights = models.meta_model(models.shape_config(name)).parameters()
        assert sum(p.numel() for p in weights) / 1e9 == pytest.approx(size, rel=5e-3), name

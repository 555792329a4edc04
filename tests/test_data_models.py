"""Prompts and models: real text, stated lengths, published shapes."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from experiments import config as cfg
from experiments.workload import run_models
from rloo_memory import data, models
from rloo_memory.errors import ConfigError
from rloo_memory.plan import ask


@pytest.fixture(scope="module")
def tokenizer():
    return models.build_tokenizer(data.load_documents(), 18_992)


@pytest.mark.parametrize("prompt_tokens", (64, 3000))
def test_prompts_have_the_stated_number_of_tokens_template_included(tokenizer, prompt_tokens):
    prompts = data.build_prompts(data.load_documents(), tokenizer, prompt_tokens)
    lengths = [len(data.render(tokenizer, messages)) for messages in prompts]
    assert 30 <= len(prompts) <= data.MAX_PROMPTS
    assert max(lengths) == prompt_tokens and min(lengths) >= prompt_tokens - 2
    assert len({messages[0]["content"] for messages in prompts}) == len(prompts)


def test_a_document_without_room_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="--prompt-tokens 16 leaves no room"):
        data.build_prompts(["A short text."], tokenizer, 16)


def test_a_model_of_the_hub_is_read_and_a_shape_of_its_name_stands_in_with_a_line(monkeypatch, capsys):
    assert models.named_config("hub:acme/Qwen3-8B").hidden_size == 4096  # tests have no network
    assert "the built-in shape qwen3-8b stands in for it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot load model 'hub:acme/unheard-of'"):
        models.named_config("hub:acme/unheard-of")
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **options: name)
    assert models.named_config("hub:acme/Qwen3-8B") == "acme/Qwen3-8B" and not capsys.readouterr().err


def test_who_asks_from_python_is_told_that_a_shape_stands_in(planner):
    assert "the built-in shape tiny-qwen3 stands in" in ask.predict({}, "hub:acme/tiny-qwen3", 16).remarks[0]


def test_the_published_workload_has_the_published_number_of_parameters():
    config = cfg.resolve("stock", 2, "seed", "cpu")
    model = models.meta_model(models.shape_config(config.shape, config.vocab_size))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(2.4576e6, rel=5e-3)


@pytest.mark.parametrize("precision, size", [("bf16", 4), ("float64", 8)])
def test_what_the_models_take_is_counted_in_their_own_precision(precision, size):
    """330,536 weights: policy, reference, gradient, two moments and the reward model."""
    weights = sum(p.numel() for p in models.meta_model(models.shape_config("tiny-qwen3", 18_992)).parameters())
    config = cfg.resolve("stock", 2, "cpu", "cpu", budget_bytes=weights * 6 * size, precision=precision)
    run_models.check_fits(config)
    with pytest.raises(ConfigError, match="raise --budget"):
        run_models.check_fits(replace(config, budget_bytes=config.budget_bytes - 1))

"""Prefix sharing for prompts with images."""

import functools
from unittest import mock

import pytest
import torch
from image_rows import FAMILIES, ROWS_PER_PROMPT, Encoded, batch, build_with_images, run, tower
from transformers import GenerationConfig

from experiments.checks.family_check import error, forced_token, in_float64
from experiments.checks.model_families import WITH_IMAGES
from rloo_memory.prefix_sharing import fsdp2, tree
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

TOLERANCE = 1e-10  # relative, in float64, which has 1e-16 a step
of_each_family = pytest.mark.parametrize("family", FAMILIES)
SETTINGS = (
    # (gradient checkpointing, tower trained, settings)
    (False, True, {}),
    (False, True, {"tokens_per_forward": 1}),
    (False, False, {"completions_per_forward": 2}),
    (True, True, {"completions_per_forward": 2}),
    (True, True, {"tokens_per_forward": 9}),
)


def test_the_page_of_model_families_names_those_tried_with_images():
    assert set(WITH_IMAGES) == FAMILIES.keys() - {"gemma4-blocks"}


@pytest.mark.parametrize("alike", [pytest.param(False, marks=pytest.mark.slow), True])
@of_each_family
def test_scores_and_gradients_are_those_of_whole_rows_and_each_image_is_encoded_once(family, alike, monkeypatch):
    """Of all parameters, and of the vision tower alone, trained and frozen, with and without checkpointing. The text
    that all prompts begin with can go through the model before them."""
    monkeypatch.setattr(tree, "MIN_SAVED_TOKENS", 20)
    with in_float64():
        model = build_with_images(family, torch.float64)
        inputs, prompt, counts = batch(family, model.config.image_token_id, start=20 if alike else 0)
        encoded, lengths = Encoded(model), []
        truth = {trained: run_trained(model, inputs, prompt, trained) for trained in (False, True)}
        assert truth[True][2].norm() > 1, "no image matters: the test would be empty"
        whole = encoded.since() / 2
        enable_prefix_sharing(model)
        model.base_model.get_decoder().register_forward_hook(
            lambda module, args, output: lengths.append(output.last_hidden_state.shape[1])
        )
        for checkpointing, trained, settings in SETTINGS:
            if checkpointing:
                model.gradient_checkpointing_enable()
            passes = SharedPrefixPasses(prompt, **settings, **counts)
            got = run_trained(model, inputs, prompt, trained, passes=passes)
            model.gradient_checkpointing_disable()
            assert encoded.since() == pytest.approx(whole / ROWS_PER_PROMPT)
            for mine, theirs in zip(got, truth[trained], strict=True):
                assert (error(mine, theirs) if theirs.norm() > 0 else mine.norm()) <= TOLERANCE
    # But where tokens of an image see those behind them
    assert (lengths[0] == 21) == (alike and family not in ("gemma3", "gemma4-blocks"))


def run_trained(model, inputs, prompt, trained, **shared):
    tower(model).requires_grad_(trained)
    return run(model, inputs, prompt, **shared)


def decode(model, inputs, prompt, generate):
    """Logits of five steps, of shape (steps, rows, vocabulary). What is written differs between rows."""
    config = GenerationConfig(
        max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=1, disable_compile=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    of_tokens = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    inputs = {name: x[:, :prompt] if name in of_tokens else x for name, x in inputs.items()}
    with torch.no_grad():
        return torch.stack(generate(model, **inputs, generation_config=config).logits)


@pytest.mark.slow
@of_each_family
def test_decoding_gives_the_logits_of_whole_rows_and_each_image_is_encoded_once(family):
    with in_float64():
        model = build_with_images(family, torch.float64).eval()
        inputs, prompt, counts = batch(family, model.config.image_token_id)
        encoded = Encoded(model)
        whole_generate = functools.partial(type(model).generate, prefix_allowed_tokens_fn=forced_token)
        truth = decode(model, inputs, prompt, whole_generate)
        whole = encoded.since()
        enable_prefix_sharing(model)
        model.generate = functools.partial(whole_generate, model)
        for options in (counts, dict(group_size=ROWS_PER_PROMPT, **counts)):
            logits = decode(model, inputs, prompt, functools.partial(generate_with_shared_prefix, **options))
            assert error(logits, truth) <= TOLERANCE
            assert encoded.since() == pytest.approx(whole / ROWS_PER_PROMPT)


class TestRefusals:
    @pytest.fixture
    def model(self):
        model = build_with_images("qwen2_5_vl", torch.float32)
        enable_prefix_sharing(model)
        return model

    def score(self, model, change=lambda inputs, prompt: None, **settings):
        inputs, prompt, counts = batch("qwen2_5_vl", model.config.image_token_id)
        change(inputs, prompt)
        run(model, inputs, prompt, passes=SharedPrefixPasses(prompt, **{**counts, **settings}))

    def test_images_without_their_number(self, model):
        with pytest.raises(ValueError, match="num_images"):
            self.score(model, num_images=None)

    def test_positions(self, model):
        with pytest.raises(ValueError, match="position_ids"):
            self.score(model, lambda inputs, prompt: inputs.update(position_ids=inputs["input_ids"]))

    @pytest.mark.parametrize("column, words", [(0, "in prompts only"), (-1, "ends with an image")])
    def test_an_image_behind_the_prefix(self, model, column, words):
        def add_image(inputs, prompt):
            inputs["input_ids"][3, prompt + column] = model.config.image_token_id

        with pytest.raises(ValueError, match=words):
            self.score(model, add_image)

    def test_a_prompt_without_an_image_where_layers_are_sharded(self, model):
        with mock.patch.object(fsdp2, "FSDPModule", torch.nn.Linear):
            with pytest.raises(ValueError, match="prompt of row 3.*FSDP.*prefix_sharing=False"):
                self.score(model)

    def test_generation_behind_an_image(self, model):
        inputs, prompt, counts = batch("qwen2_5_vl", model.config.image_token_id)
        inputs["input_ids"][1, prompt - 1] = model.config.image_token_id
        with pytest.raises(ValueError, match="prompt of row 1.*ends with an image.*text behind the image"):
            decode(model, inputs, prompt, functools.partial(generate_with_shared_prefix, **counts))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["rloo", "grpo"])
def test_training_runs_are_the_same_and_encode_each_prompts_images_once(probe, trainer):
    """Two updates or three in float64 with sampled completions, four a prompt: the policy, its old log-probabilities,
    the reference and generation. Stock encodes every image four times in each of them."""
    result = probe("shared_images_trainer", trainer)
    assert len(result) == {"rloo": 8, "grpo": 5}[trainer]
    for name, training in result.items():
        assert "error" not in training, (name, training)
        assert training["logs"] <= 1e-9 and training["parameters"] <= 1e-9, (name, training)
        assert training["encoded"] == (pytest.approx(1 / 4) if "text alone" not in name else None), (name, training)
        assert max(training["grad_norms"]) > 1e-3, (name, training)
    # Behind what all prompts begin with, but where tokens of an image see those behind them
    assert {name for name, training in result.items() if training["starts"]} == {
        "rloo": {"rloo qwen3_vl, some without", "rloo qwen3_vl, one of 4 a micro-batch"},
        "grpo": {"grpo internvl, two of 4 a micro-batch"},
    }[trainer]

"""The planner on prompts with images: what a processor makes of them, and what they take."""

import copy
import json

import pytest
from trl.data_utils import prepare_multimodal_messages

from experiments.workload import pictures
from rloo_memory import data, models
from rloo_memory.plan.images import PromptImages

OPTIONS = ("--completion", 16, "--k", 4, "--prompt", 200)


@pytest.mark.parametrize("shape", ["qwen2.5-vl-8-layers", "qwen3-vl-8-layers", "gemma-3-8-layers"])
@pytest.mark.parametrize("sizes", [((280, 224),), ((100, 90), (203, 57)), ((57, 200),)])
def test_images_have_the_tokens_and_the_pixels_that_a_processor_gives_them(shape, sizes):
    tokenizer = models.build_tokenizer(data.load_documents(), 600)
    hf_config = pictures.with_token_ids(models.shape_config(shape), pictures.with_image_tokens(tokenizer))
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
        result = planned(*model, *OPTIONS, *image, "--arms", "stock,shared", "--json", path)
        assert result.returncode == 0, result.stderr
        assert ("80 of the prompt's tokens are its image" in result.stdout) == (name == "image")
        for prediction in json.loads(path.read_text())["predictions"]:
            kinds[name, prediction["arm"]] = {phase["phase"]: phase["kinds"] for phase in prediction["phases"]}
    one = 320 * 3 * 2 * 14**2 * 4  # bytes: patches of two frames of three colours in float32
    for arm in ("stock", "shared"):
        of_text, of_image = kinds["text", arm], kinds["image", arm]
        assert "images" not in of_text["train"]
        # those of the rollout that is trained on; before, also those of the one that comes
        assert of_image["train"]["images"] == 4 * one and of_image["generate"]["images"] == 8 * one
        assert of_image["train"]["activations"] > of_text["train"]["activations"]
        assert of_image["train"]["optimizer state"] > of_text["train"]["optimizer state"]  # the tower's adapters
    towers = {
        arm: kinds["image", arm]["train"]["activations"] - kinds["text", arm]["train"]["activations"]
        for arm in ("stock", "shared")
    }
    assert 3.5 < towers["stock"] / towers["shared"] < 4.5, towers


def test_a_token_budget_takes_images_where_prompts_are_shared_and_nowhere_else(planned):
    options = ("--model", "qwen2.5-vl-8-layers", *OPTIONS, "--image", "56x56", "--tokens-per-forward", 40)
    result = planned(*options, "--arms", "stock-tokens,shared")
    assert result.returncode == 0 and "\nshared " in result.stdout and "\nstock-tokens " not in result.stdout
    assert "stock-tokens: tokens_per_forward 40 divides rows of text" in result.stderr

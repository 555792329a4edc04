import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from experiments.fused_head import add_fused_lm_head
from rloo_memory.prefix_sharing import tree
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.images import MultimodalInputs
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

from .test_attention import Operators

IMAGE_TOKEN = 90
NUM_IMAGES = [2, 2, 0, 0, 1, 1]


def make_model():
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def make_batch(start=()):
    """Three prompts with two completions each: two images of different sizes, none, and one image."""
    torch.manual_seed(1)
    first, second, third = ([IMAGE_TOKEN] * n for n in (2, 4, 4))  # an image token stands for 2 x 2 patches
    prompts = [[*start, *rest] for rest in ([5, 6, *first, 7, *second, 8, 9], [5, 6, 8, 9], [5, *third, 8, 9])]
    prompt_length, completion_length = max(map(len, prompts)), 5
    input_ids = torch.randint(10, 80, (6, prompt_length + completion_length))
    attention_mask = torch.ones_like(input_ids)
    for row in range(6):
        prompt = prompts[row // 2]
        input_ids[row, prompt_length - len(prompt) : prompt_length] = torch.tensor(prompt)
        attention_mask[row, : prompt_length - len(prompt)] = 0
        attention_mask[row, prompt_length + 1 + row % 4 :] = 0
    grids = {0: [[1, 2, 4], [1, 4, 4]], 1: [], 2: [[1, 4, 4]]}
    pixel_values = {i: torch.rand(sum(h * w for _, h, w in grids[i]), 3 * 2 * 4 * 4) for i in grids}
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "pixel_values": torch.cat([pixel_values[row // 2] for row in range(6)]),
        "image_grid_thw": torch.tensor([grid for row in range(6) for grid in grids[row // 2]]),
        "mm_token_type_ids": ((input_ids == IMAGE_TOKEN) & (attention_mask == 1)).long(),
    }
    return inputs, prompt_length


def count_patches(model):
    counts = []
    model.base_model.visual.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
    return counts


class TestPrefixSharingImages:
    @pytest.mark.parametrize("tokens_per_forward", [1, None])
    def test_images_behind_what_prompts_begin_with(self, tokens_per_forward, monkeypatch):
        monkeypatch.setattr(tree, "MIN_SAVED_TOKENS", 20)
        model = make_model()
        inputs, prompt_length = make_batch(range(20, 40))
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        labels[:, :prompt_length] = -100
        counts = count_patches(model)
        expected = model(**inputs, labels=labels, fused_lm_head=True)
        expected.log_probs.sum().backward()
        expected_grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        model.zero_grad()
        num_patches = sum(counts)
        counts.clear()

        enable_prefix_sharing(model)
        passes = SharedPrefixPasses(prompt_length, tokens_per_forward, num_images=NUM_IMAGES)
        sizes = []
        model.get_decoder().register_forward_hook(
            lambda module, args, output: sizes.append(output.last_hidden_state.shape[1])
        )
        outputs = model(**inputs, labels=labels, fused_lm_head=True, passes=passes)
        outputs.log_probs.sum().backward()

        assert sizes[0] == 21  # text of all
        assert sum(counts) == num_patches / 2  # each image went through the vision tower once
        torch.testing.assert_close(outputs.log_probs, expected.log_probs[:, prompt_length - 1 :], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outputs.entropy, expected.entropy[:, prompt_length - 1 :], rtol=1e-5, atol=1e-5)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-5)

    def test_equal_text_with_other_images_is_not_shared(self):
        images = {"pixel_values": torch.rand(2, 3, 4, 4).repeat_interleave(2, dim=0)}
        inputs = MultimodalInputs.of(images, num_rows=4, num_images=[1, 1, 1, 1])
        with Operators() as operators:
            assert inputs.with_same_images([0, 1, 2]) == [[0, 1], [2]]
        # A device would be waited for once a group, where all comparisons are read
        assert not operators.named("equal") and not operators.named("local_scalar")
        images["pixel_values"][2:] = torch.nan  # equal to nothing
        inputs = MultimodalInputs.of(images, num_rows=4, num_images=[1, 1, 1, 1])
        assert inputs.with_same_images([0, 1, 2, 3]) == [[0, 1], [2], [3]]

    def test_division_by_tiles(self):
        tiles = {
            "pixel_values": torch.rand(5, 4, 12),
            "pixel_attention_mask": torch.ones(5, 4),
            "spatial_shapes": torch.full((5, 2), 2),
        }
        inputs = MultimodalInputs.of(tiles, num_rows=3, num_images=[1, 0, 2], num_tiles=[1, 0, 4])
        assert inputs.images[1] == {}
        for name, x in tiles.items():
            torch.testing.assert_close(inputs.images[0][name], x[:1])
            torch.testing.assert_close(inputs.images[2][name], x[1:])

    def test_division_of_samples(self):
        samples = {"pixel_values": torch.rand(3, 2, 3, 4, 4), "pixel_attention_mask": torch.ones(3, 2, 4, 4)}
        # As many images as samples, but not one a sample
        inputs = MultimodalInputs.of(samples, num_rows=3, num_images=[1, 0, 2])
        assert inputs.images[1] == {}
        torch.testing.assert_close(inputs.images[2]["pixel_values"], samples["pixel_values"][2:])

    @pytest.mark.parametrize("column, match", [(0, "in prompts only"), (-1, "ends with an image")])
    def test_image_behind_the_prefix(self, column, match):
        model = make_model()
        enable_prefix_sharing(model)
        inputs, prompt_length = make_batch()
        inputs["input_ids"][3, prompt_length + column] = IMAGE_TOKEN
        passes = SharedPrefixPasses(prompt_length, num_images=NUM_IMAGES)
        with pytest.raises(ValueError, match=match):
            model(**inputs, labels=inputs["input_ids"], fused_lm_head=True, passes=passes)

    def test_unknown_input(self):
        with pytest.raises(ValueError, match="pixel_values_videos"):
            MultimodalInputs.of({"pixel_values_videos": torch.rand(2, 3)}, num_rows=2)

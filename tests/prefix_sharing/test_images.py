"""How inputs are divided into the images of each row."""

import pytest
import torch

from rloo_memory.prefix_sharing.images import MultimodalInputs, count_tiles

from .test_attention import Operators


class TestPrefixSharingImages:
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

    def test_more_images_than_counted(self):
        with pytest.raises(ValueError, match="`pixel_values` has 5 entries.*4 rows"):
            MultimodalInputs.of({"pixel_values": torch.zeros(5, 3, 4, 4)}, num_rows=4, num_images=[1, 1, 1, 1])

    def test_rows_without_the_images_of_others(self):
        # Those that go on after a tool call, of a batch with images
        assert count_tiles(None, [[], None], [0, 0], {}) is None

    def test_unknown_input(self):
        with pytest.raises(ValueError, match="pixel_values_videos"):
            MultimodalInputs.of({"pixel_values_videos": torch.rand(2, 3)}, num_rows=2)

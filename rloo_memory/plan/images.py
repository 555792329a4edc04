"""Images of prompts in a simulation: their tokens among those of text, and their pixels."""

from contextlib import contextmanager
from dataclasses import dataclass

from rloo_memory.errors import ConfigError

# Model types whose processors keep an image's shape and cut it into a grid of patches, some of which make a token
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
# Those whose processor brings every image to the one size that the tower takes
ONE_SIZE = ("gemma3",)
LEAST, MOST = 8, 16_384  # pixels of a side


@dataclass(frozen=True)
class PromptImages:
    """What the images of one prompt are for a model."""

    token: int  # id of the tokens that stand for an image
    lengths: tuple[int, ...]  # how many of them each image has
    pixels: tuple[int, ...]  # shape of the prompt's pixel values
    grid: tuple[tuple[int, int, int], ...] | None = None  # patches along time, height, width, where the model is told

    @classmethod
    def of(cls, sizes: tuple[tuple[int, int], ...], hf_config) -> "PromptImages":
        """`sizes` are widths and heights in pixels, as the processor has scaled them. Raises `ConfigError` for models
        whose images the planner does not know."""
        kind = hf_config.model_type
        if hf_config.get_text_config() is hf_config:
            raise ConfigError(f"a model of type {kind} takes no images; name a multimodal one")
        vision = getattr(hf_config, "vision_config", None)
        if vision is None and kind in GRIDS + ONE_SIZE:
            raise ConfigError(f"the config of this model of type {kind} has no vision_config; name one that has")
        if kind in ONE_SIZE:
            side = vision.image_size
            lengths = (hf_config.mm_tokens_per_image,) * len(sizes)
            return cls(hf_config.image_token_id, lengths, (len(sizes), vision.num_channels, side, side))
        if kind not in GRIDS:
            raise ConfigError(
                f"the planner knows images of {', '.join(GRIDS + ONE_SIZE)}, not of {kind}; plan prompts of text with "
                "as many tokens, and expect the tower's activations on top"
            )
        patch, merge = vision.patch_size, vision.spatial_merge_size
        # To multiples of what makes a token, as Qwen's processors round (`smart_resize`)
        grid = tuple((1, *(max(1, round(side / patch / merge)) * merge for side in size[::-1])) for size in sizes)
        values = vision.in_channels * vision.temporal_patch_size * patch**2
        lengths = tuple(rows * columns // merge**2 for _, rows, columns in grid)
        return cls(hf_config.image_token_id, lengths, (sum(lengths) * merge**2, values), grid)

    @property
    def tokens(self) -> int:
        """Of a prompt: those of the images, and one of text before each and behind the last."""
        return sum(self.lengths) + len(self.lengths) + 1

    def columns(self) -> list[int]:
        """Where a prompt has the tokens of its images."""
        columns, start = [], 1
        for length in self.lengths:
            columns += range(start, start + length)
            start += length + 1
        return columns


def wrong_images(setup, hf_config, prompt_called: str) -> str | None:
    """What is wrong with the images of a setup. `prompt_called` is what the user wrote for the tokens of a prompt."""
    for size in setup.images:
        if not all(LEAST <= side <= MOST for side in size):
            return f"an image of {size[0]}x{size[1]} pixels: sides are {LEAST} to {MOST:,}"
    try:
        needed = PromptImages.of(setup.images, hf_config).tokens + 1
    except ConfigError as error:
        return str(error)
    if setup.prompt_tokens >= needed:
        return None
    images = "its image" if len(setup.images) == 1 else f"its {len(setup.images)} images"
    return (
        f"{prompt_called} {setup.prompt_tokens} counts the tokens of images, too: with {images} a prompt has at least "
        f"{needed}"
    )


class RolloutImages:
    """The images of a simulation's rollouts; there are none if its setup has none."""

    def __init__(self, setup, hf_config, shapes, memory):
        self.rows, self.shapes, self.memory = setup.generation_rows, shapes, memory
        self.of_prompt = PromptImages.of(setup.images, hf_config) if setup.images else None
        self.pixel_values = None  # of all rows of a rollout

    def __bool__(self) -> bool:
        return self.of_prompt is not None

    def make(self):
        """Pixel values of a rollout as a processor gives them: float32, those of a prompt for each of its rows."""
        import torch

        if self.of_prompt is None:
            return None
        first, *rest = self.of_prompt.pixels
        with self.shapes.new(), self.memory.of_kind("images"):
            return torch.empty(self.rows * first, *rest)

    @contextmanager
    def new_rollout(self):
        """Within, those of a new rollout are there beside those of the one before: the trainer lets go of its batches
        when it has new ones."""
        before, self.pixel_values = self.pixel_values, self.make()
        yield
        self.pixel_values = before

    def number_of_each(self, rows: int) -> list[int] | None:
        """Images of each of so many rows, as `prefix_sharing` asks for it."""
        return [len(self.of_prompt.lengths)] * rows if self else None

    def among(self, ids):
        """`ids`, of shape (rows, at least P), with the images' tokens in their places."""
        if self:
            ids[:, self.of_prompt.columns()] = self.of_prompt.token
        return ids

    def inputs(self, ids) -> dict:
        """What a model takes beside these ids of rows, whose images are those of the first rows of the rollout."""
        import torch

        if not self:
            return {}
        inputs = {"pixel_values": self.pixel_values[: len(self.pixel_values) // self.rows * len(ids)]}
        types = (ids == self.of_prompt.token).long()
        if self.of_prompt.grid is None:
            return inputs | {"token_type_ids": types}
        grid = torch.tensor(self.of_prompt.grid * len(ids))
        return inputs | {"image_grid_thw": grid, "mm_token_type_ids": types}

    def of_whole_rows(self, backbone, ids) -> dict:
        """The same with positions, which a model counts along the axes of its images, where a mask hides the padding
        that it would count by."""
        inputs = self.inputs(ids)
        if "image_grid_thw" in inputs:
            positions, _ = backbone.get_rope_index(
                ids, mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
            )
            inputs["position_ids"] = positions
        return inputs

"""
Prefix sharing for prompts with images: the images of a prompt go through the vision tower once, in the prompt pass.

Shape suffixes: B rows, P prompt columns, C completion columns, S prefix tokens.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .fsdp2 import is_sharded
from .passes import GoesWhole

OF_IMAGES = (
    "pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids", "image_sizes", "spatial_shapes"
)  # fmt: skip
OF_TOKENS = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class MultimodalInputs:
    """What a batch has beside token ids, divided among its rows."""

    images: list[dict[str, torch.Tensor]]  # of each row, nothing where it has no image
    tokens: dict[str, torch.Tensor]  # of each token, of as many columns as the token ids

    @classmethod
    def of(
        cls,
        inputs: dict[str, torch.Tensor],
        num_rows: int,
        num_images: list[int] | None = None,
        num_tiles: list[int] | None = None,
    ) -> "MultimodalInputs":
        """
        Divide the inputs of a batch of `num_rows` rows, from the number of images of each, and of tiles for models
        whose pixel values are indexed by tile.

        Raises:
            GoesWhole: If it is not known which row an input belongs to.
        """
        if unknown := sorted(inputs.keys() - {*OF_IMAGES, *OF_TOKENS}):
            raise GoesWhole(
                f"`prefix_sharing=True` does not know which prompt each part of {unknown} belongs to. Remove these "
                "inputs, or set `prefix_sharing=False`."
            )
        tokens = {name: x for name, x in inputs.items() if name in OF_TOKENS}
        inputs = {name: x for name, x in inputs.items() if name in OF_IMAGES}
        images: list[dict[str, torch.Tensor]] = [{} for _ in range(num_rows)]
        if not inputs:
            return cls(images, tokens)
        if num_images is None:
            raise ValueError(f"`num_images` must say how many images each row has, to divide {sorted(inputs)}.")
        for name, sizes in _entries_per_row(inputs, num_rows, num_images, num_tiles).items():
            if sum(sizes) != len(inputs[name]):
                raise GoesWhole(
                    f"`{name}` has {len(inputs[name])} entries, which cannot be divided among {num_rows} rows."
                )
            for row, x in enumerate(inputs[name].split(sizes)):
                if num_images[row] > 0:
                    images[row][name] = x
        return cls(images, tokens)

    def check(
        self, backbone: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, prefix_length: int
    ) -> None:
        """Raise a [`GoesWhole`] if an image is elsewhere than in the part of a prompt that is shared."""
        if not any(self.images):
            return
        image_token_id = getattr(backbone.config, "image_token_id", None)
        if image_token_id is None:
            raise GoesWhole(
                f"`prefix_sharing=True` does not support images with {backbone.config.model_type}, whose config does "
                "not name the token that stands for an image. Set `prefix_sharing=False`."
            )
        if not all(self.images) and is_sharded(backbone):
            raise ValueError(
                f"The prompt of row {self.images.index({})} of the batch has no image, but another has one. Processes "
                "that shard the weights gather those of the vision tower together, so with `prefix_sharing=True` and "
                "FSDP or ZeRO-3 all prompts must have images. Filter the dataset, or set `prefix_sharing=False`."
            )
        is_image = (input_ids == image_token_id) & (attention_mask != 0)
        for row in is_image[:, prefix_length - 1].nonzero().flatten().tolist():
            raise GoesWhole(
                f"The prompt of row {row} of the batch ends with an image, and `prefix_sharing=True` needs a token "
                "of text that the completions follow. Put text behind the image, as chat templates do, or set "
                "`prefix_sharing=False`."
            )
        for row in is_image[:, prefix_length:].any(1).nonzero().flatten().tolist():
            raise GoesWhole(
                f"The completion of row {row} of the batch has an image token, and `prefix_sharing=True` supports "
                "images in prompts only. If a tool returned the image, let it return text, or set "
                "`prefix_sharing=False`. If the model generated the token, suppress it with "
                f"`generation_kwargs={{'suppress_tokens': [{image_token_id}]}}`."
            )

    def take_common_start(self, backbone: nn.Module) -> bool:
        """
        Whether prompts can go on behind what they begin with. Tokens of an image that see those behind them (Gemma 3,
        Gemma 4, PaliGemma) have masks that count the tokens of whole prompts.
        """
        looks_ahead = getattr(backbone.config.get_text_config(), "use_bidirectional_attention", None)
        return not any(self.images) or not (looks_ahead or "token_type_ids" in self.tokens)

    def with_same_images(self, rows: list[int]) -> list[list[int]]:
        """Rows whose images are the same, together. The host waits for the device once for each of these groups."""

        def shapes(row: int) -> dict[str, torch.Size]:
            return {name: x.shape for name, x in self.images[row].items()}

        groups = []
        while rows:
            first, *others = rows
            images = self.images[first]
            alike = [row for row in others if shapes(row) == shapes(first)]
            if images and alike:
                equal = [[(self.images[row][name] == x).all() for name, x in images.items()] for row in alike]
                equal = torch.stack([torch.stack(of_row).all() for of_row in equal]).tolist()
                alike = [row for row, is_equal in zip(alike, equal, strict=True) if is_equal]
            groups.append([first, *alike])
            rows = [row for row in others if row not in alike]
        return groups

    def of_tokens(self, row: int, columns: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of the tokens of a row in these columns."""
        return {name: x[row, columns][None] for name, x in self.tokens.items()}


def _entries_per_row(
    inputs: dict[str, torch.Tensor], num_rows: int, num_images: list[int], num_tiles: list[int] | None
) -> dict[str, list[int]]:
    """Number of entries of each input that belong to each row, as the processors of transformers put them together."""
    if "image_grid_thw" in inputs:  # an entry of the pixel values for each patch (Qwen-VL, GLM-V)
        patches = torch.tensor(inputs["image_grid_thw"].prod(-1).tolist()).split(num_images)
        return {**dict.fromkeys(inputs, num_images), "pixel_values": [int(x.sum()) for x in patches]}
    if num_tiles is not None:  # LFM2-VL, InternVL
        return dict.fromkeys(inputs, num_tiles)
    by_row = "pixel_attention_mask" in inputs  # Idefics, SmolVLM
    by_image = "image_position_ids" in inputs or len(inputs["pixel_values"]) == sum(num_images)
    return dict.fromkeys(inputs, num_images if by_image and not by_row else [1] * num_rows)


def count_tiles(
    processing_class, images: list | None, num_images: list[int] | None, inputs: dict[str, torch.Tensor]
) -> list[int] | None:
    """
    Number of tiles of each sample, for models whose pixel values are indexed by tile, None for others. A processor
    made the `inputs` of the model of the images of each.
    """
    if images is None or num_images is None or "pixel_values" not in inputs:
        return None
    images = [sample for sample in images if sample]
    # The full processor drops the rows and columns of tiles
    if "spatial_shapes" in inputs:
        image_info = processing_class.image_processor(images=images, return_tensors="pt", return_row_col_info=True)
        num_tiles = image_info["image_rows"] * image_info["image_cols"]
        if processing_class.image_processor.use_thumbnail:
            num_tiles = num_tiles + (num_tiles > 1).to(num_tiles.dtype)
    elif inputs["pixel_values"].ndim == 4 and inputs["pixel_values"].size(0) != sum(num_images):
        image_info = processing_class.image_processor(images=images, crop_to_patches=True, return_tensors="pt")
        num_tiles = image_info["num_patches"]
    else:
        return None
    return [tiles.sum().item() for tiles in torch.split(num_tiles, num_images)]


def rope_position_ids(backbone: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """
    Positions of the tokens of a prompt, of shape `(3, 1, S)`, where a model counts them along the axes of its images
    (Qwen-VL, GLM-V). Asked for, because the model would keep the difference to columns for its next forward.
    """
    if not hasattr(backbone, "get_rope_index") or not {"image_grid_thw", "mm_token_type_ids"} <= inputs.keys():
        return None
    return backbone.get_rope_index(**inputs)[0]

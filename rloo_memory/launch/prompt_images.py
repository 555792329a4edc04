"""The images of a training set's prompts: which column has them, and what a processor makes of them."""

from rloo_memory.errors import ConfigError
from rloo_memory.models import one_line

ROWS_COUNTED = 200  # without a limit to keep: each of their images is read and scaled


def column_of(rows) -> str | None:
    """The column of images: one a row in `image`, a list of them in `images`, as TRL's trainers take them."""
    return next((name for name in ("images", "image") if name in rows.column_names), None)


def as_trained(rows):
    """The training set with its images as the trainer reads them. Raises `ConfigError`."""
    from datasets import Image, List

    if (column := column_of(rows)) is None:
        return rows
    try:
        return rows.cast_column(column, Image() if column == "image" else List(Image()))
    except Exception as error:  # each kind of column fails in its own way
        wanted = "an image a row" if column == "image" else "a list of images a row"
        raise ConfigError(
            f"the column {column!r} is {one_line(rows.features[column])}; it must be {wanted} (datasets.Image, or "
            "file names), or have another name"
        ) from error


def encode(prompt: list, given: list, processor, options: dict) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Token ids of a chat with its images in it, as the trainer makes them, and width and height of each image in
    pixels, as the processor has scaled it. `options` are the trainer's `chat_template_kwargs`."""
    from trl.data_utils import prepare_multimodal_messages

    encoded = processor.apply_chat_template(
        conversation=[prepare_multimodal_messages(prompt, images=given)],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **options,
    )
    return encoded["input_ids"][0], sizes(encoded, given, processor)


def sizes(encoded, given: list, processor) -> tuple[tuple[int, int], ...]:
    """Width and height of each image, pixels; where the processor does not say them, those of the file."""
    if "image_grid_thw" in encoded:
        patch = processor.image_processor.patch_size
        return tuple((int(columns) * patch, int(rows) * patch) for _, rows, columns in encoded["image_grid_thw"])
    scaled = list(encoded.get("pixel_values", ()))
    if all(len(image.shape) == 3 for image in scaled):  # channels, height, width
        return tuple((int(image.shape[2]), int(image.shape[1])) for image in scaled)
    return tuple(image.size for image in given)

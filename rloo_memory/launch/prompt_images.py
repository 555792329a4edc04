"""The images of a training set's prompts: which column has them, whether each can be opened, and what a processor
makes of them."""

import io
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from rloo_memory.errors import ConfigError
from rloo_memory.models import one_line

COLUMNS = ("image", "images")  # one image a row, a list of them: as TRL's trainers take them
ROWS_COUNTED = 200  # without a limit to keep: each of their images is read and scaled
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def install() -> str:
    """The command that installs what processors are made of. It names the torch that is here, or pip would replace it
    by the one of the newest torchvision."""
    torch, _, build = version("torch").partition("+")
    command = f".venv/bin/python -m pip install pillow torchvision torch=={torch}"
    return f"{command} --extra-index-url {CPU_INDEX}" if build == "cpu" else command


def as_trained(rows):
    """The training set with its images as the trainer reads them. Every image's header is read, no pixels. Raises
    `ConfigError` that names the row."""
    from datasets import Image, List

    columns = [name for name in COLUMNS if name in rows.column_names]
    if len(columns) > 1:
        raise ConfigError("it has the columns 'image' and 'images', and the trainer reads one; remove one of them")
    for column in columns:
        try:
            rows = rows.cast_column(column, Image() if column == "image" else List(Image()))
        except Exception as error:  # each kind of column fails in its own way
            wanted = "an image a row" if column == "image" else "a list of images a row"
            raise ConfigError(
                f"the column {column!r} is {one_line(rows.features[column])}; it must be {wanted} (datasets.Image, "
                "or file names), or have another name"
            ) from error
    if column := column_of(rows):
        for row, (prompt, images) in enumerate(zip(rows["prompt"], images_of(rows, column), strict=True), 1):
            if problem := wrong_images(prompt, images, column):
                raise ConfigError(f"row {row}: {problem}")
    return rows


def images_of(rows, column: str) -> Iterator[list | None]:
    """Of each row its images as they are stored, {"bytes", "path"}. None where it has no value."""
    from datasets import Image, List

    stored = Image(decode=False) if column == "image" else List(Image(decode=False))
    for row in rows.select_columns(column).cast_column(column, stored):
        cell = row[column]
        yield cell if cell is None or isinstance(cell, list) else [cell]


def column_of(rows) -> str | None:
    """The column of `COLUMNS` in which some row has an image."""
    return next((name for name in COLUMNS if name in rows.column_names and any(images_of(rows, name))), None)


def wrong_images(prompt, images: list | None, column: str) -> str | None:
    """What is wrong with a prompt and its images, of which TRL has to find a place for each."""
    from trl.data_utils import prepare_multimodal_messages

    if images is None:
        return f"the column {column!r} is empty; a column 'images' can say with an empty list that a row has none"
    if find_spec("PIL") is None:
        return f"it has images, and pillow is not installed; {install()}"
    for image in images:
        if problem := not_opened(image):
            return f"an image cannot be opened ({problem}); replace it or remove the row"
    if isinstance(prompt, str):
        return 'the prompt is text; images need chats: [{"role": "user", "content": "..."}]'
    try:
        prepare_multimodal_messages(prompt, images=images)
    except Exception as error:  # of a content that is neither text nor parts, whatever its reading raises
        return f"{one_line(error)} Change the row."


def not_opened(image: dict | None) -> str | None:
    """Why a stored image cannot be opened; None where it can be."""
    import PIL.Image

    if image is None or image["bytes"] is None and image["path"] is None:
        return "there is none"
    try:
        PIL.Image.open(image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])).close()
    except PIL.UnidentifiedImageError:
        return "pillow does not know its format"
    except Exception as error:  # a damaged file raises whatever its format's reader raises
        return one_line(error)


def check_gathered(rows, column: str, config) -> None:
    """Raise `ConfigError` where several processes would wait for one another: TRL gathers the images of all of them
    for its log, but not from one whose rows have none."""
    if config.world_size > 1 and config.log_multimodal and not all(images_of(rows, column)):
        raise ConfigError(
            f"some rows have images and some have none: {config.world_size} processes would wait for one another's, "
            "which TRL gathers for its log; --log_multimodal false"
        )


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


def pixels(sizes: tuple[tuple[int, int], ...]) -> int:
    """Of all images together."""
    return sum(width * height for width, height in sizes)

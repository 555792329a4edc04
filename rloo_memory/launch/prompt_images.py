"""The images of a training set's prompts: which column has them, whether each can be opened, and what a processor
makes of them."""

from collections.abc import Iterator
from importlib.metadata import version

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
    """The training set with its images as the trainer reads them. Raises `ConfigError`."""
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
    return rows


def stored(rows, column: str) -> Iterator:
    """Of each row its images as they are stored: nothing is decoded."""
    from datasets import Image, List

    undecoded = Image(decode=False) if column == "image" else List(Image(decode=False))
    return (row[column] for row in rows.select_columns(column).cast_column(column, undecoded))


def column_of(rows) -> str | None:
    """The column of `COLUMNS` in which some row has an image."""
    return next((name for name in COLUMNS if name in rows.column_names and any(stored(rows, name))), None)


def check_each_row_has_some(rows, column: str, config) -> None:
    """Raise `ConfigError` for a row without an image in a column of single ones, and where several processes would
    wait for one another: TRL gathers the images of all of them for its log, but not from one whose rows have none."""
    together = config.world_size > 1 and config.log_multimodal
    if (column == "image" or together) and not all(stored(rows, column)):
        remedy = "--log_multimodal false" if column == "images" else "a column 'images' can say with an empty list so"
        raise ConfigError(f"some rows have no image in the column {column!r}, and others have; {remedy}")


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

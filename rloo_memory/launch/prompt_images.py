"""The images of a training set's prompts: which column has them, whether each can be opened, and what a processor
makes of them."""

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from rloo_memory.errors import ConfigError
from rloo_memory.models import one_line

COLUMNS = ("image", "images")  # one image a row, a list of them: as TRL's trainers take them
ROWS_COUNTED = 200  # without a limit to keep: each of their images is read and scaled
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class ImageColumn:
    """A column of `COLUMNS` that has images, and the first row (from 1) that has one."""

    name: str
    first_row: int

    @property
    def rows_counted(self) -> int:
        return max(ROWS_COUNTED, self.first_row)


def install() -> str:
    """The command that installs what processors are made of. It names the torch that is here, or pip would replace it
    by the one of the newest torchvision."""
    torch, _, build = version("torch").partition("+")
    command = f".venv/bin/python -m pip install pillow torchvision torch=={torch}"
    return f"{command} --extra-index-url {CPU_INDEX}" if build == "cpu" else command


def checked(rows):
    """The training set with its images as the trainer reads them. Every image's header is read, no pixels.

    Raises `ConfigError` for both columns, a column of something else, a row without a value, an image that cannot be
    opened, and images beside prompts that are text; it names the row. Without images, the rows are as they were.
    """
    columns = [name for name in COLUMNS if name in rows.column_names]
    if not columns:
        return rows
    if len(columns) > 1:
        raise ConfigError("it has the columns 'image' and 'images', and the trainer reads one; remove one of them")
    (column,) = columns
    rows = as_images(rows, column)
    if column_of(rows) and isinstance(rows["prompt"][0], str):
        raise ConfigError(
            f"it has images in the column {column!r}, and its prompts are text; images need chats: "
            '[{"role": "user", "content": "..."}]'
        )
    for row, images in enumerate(images_of(rows, column), 1):
        if images is None:
            raise ConfigError(
                f"row {row}: the column {column!r} is empty; a column 'images' can say with an "
                "empty list that a row has none"
            )
        if images and find_spec("PIL") is None:
            raise ConfigError(f"it has images, and pillow is not installed; {install()}")
        for image in images:
            if problem := not_opened(image):
                raise ConfigError(f"row {row}: an image cannot be opened ({problem}); replace it or remove the row")
    return rows


def as_images(rows, column: str):
    """The rows with a column of images, or of lists of them, where it was one of files' names or contents."""
    from datasets import Image, List

    feature = rows.features[column]
    kind = feature.feature if column == "images" and isinstance(feature, List) else feature
    if isinstance(kind, Image) and kind.decode:
        return rows
    try:
        return rows.cast_column(column, Image() if column == "image" else List(Image()))
    except Exception as error:  # each kind of column fails in its own way
        wanted = "an image a row" if column == "image" else "a list of images a row"
        raise ConfigError(
            f"the column {column!r} is {one_line(feature)}; it must be {wanted} (datasets.Image, "
            "or file names), or have another name"
        ) from error


def images_of(rows, column: str) -> Iterator[list | None]:
    """Of each row its images as Arrow has them, {"bytes", "path"}: nothing is decoded. None where it has no value."""
    for table in rows.select_columns(column).with_format("arrow").iter(1000):
        for cell in table[column]:
            if not cell.is_valid:
                yield None
            else:
                yield [cell] if column == "image" else list(cell.values)


def column_of(rows) -> ImageColumn | None:
    """Where checked rows have images; None if no row has one."""
    for name in COLUMNS:
        if name in rows.column_names:
            for row, images in enumerate(images_of(rows, name), 1):
                if images:
                    return ImageColumn(name, row)
    return None


def not_opened(image) -> str | None:
    """Why an image of `images_of` cannot be opened; None where it can be."""
    import PIL.Image
    import pyarrow

    content, path = (image["bytes"], image["path"].as_py()) if image.is_valid else (None, None)
    if content is not None and content.is_valid:
        try:  # not copied: what is not read stays on the disk
            PIL.Image.open(pyarrow.BufferReader(content.as_buffer())).close()
            return None
        except Exception:  # also where pillow looks behind the end, which Arrow does not allow
            file = io.BytesIO(content.as_py())
    elif not path:
        return "there is none"
    elif not os.path.isfile(path):
        return f"there is no file {path[:80]!r}"
    else:
        file = path
    try:
        PIL.Image.open(file).close()
    except PIL.UnidentifiedImageError:
        return "pillow does not know its format"
    except Exception as error:  # a damaged file raises whatever its format's reader raises
        return one_line(error)
    return None


def check_places(rows, images: ImageColumn) -> None:
    """Raise `ConfigError` for a chat that has places for more or fewer images than its row has, or roles that TRL does
    not know."""
    from trl.data_utils import prepare_multimodal_messages

    for row, (prompt, given) in enumerate(zip(rows["prompt"], images_of(rows, images.name), strict=True), 1):
        try:
            prepare_multimodal_messages(prompt, images=given)
        except Exception as error:  # of a content that is neither text nor parts, whatever its reading raises
            raise ConfigError(f"row {row}: {one_line(error)} Change the row.") from error


def check_gathered(rows, images: ImageColumn, config) -> None:
    """Raise `ConfigError` where several processes would wait for one another: TRL gathers the images of all of them
    for its log, but not from one whose rows have none."""
    if config.world_size == 1 or not config.log_multimodal:
        return
    for row, given in enumerate(images_of(rows, images.name), 1):
        if not given:
            raise ConfigError(
                f"row {row} has no image, and others have: {config.world_size} processes would "
                "wait for one another's images, which TRL gathers for its log; --log_multimodal false"
            )


def read(column, row: int) -> list:
    """The images of a row (from 1), decoded. `column` are the rows with the column of images alone. Raises
    `ConfigError`."""
    try:
        (given,) = column[row - 1].values()
    except Exception as error:  # cut off behind its header, as a rule
        raise ConfigError(
            f"row {row}: an image cannot be read ({one_line(error)}); replace it or remove the row"
        ) from error
    return given if isinstance(given, list) else [given]


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

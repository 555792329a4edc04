"""The prompts that a launched training is given: read, checked, and counted before the model is loaded."""

import ast
import contextlib
import csv
import errno
import json
import re
from dataclasses import dataclass
from pathlib import Path

from rloo_memory import data
from rloo_memory.errors import ConfigError, shown
from rloo_memory.launch import prompt_images
from rloo_memory.models import one_line
from rloo_memory.settings.arguments import LaunchArguments

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
FORMATS = f"a {', '.join(KINDS)} file with a column `prompt`, a folder of such files, or hub:owner/name"
CHAT = '[{"role": "user", "content": "..."}]'
CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
NO_ROWS = (  # as readers of each kind say it
    "StopIteration", "No columns to parse", "size is 0 bytes", "BatchSize must be greater than 0", "to no data",
    "contain any data files",
)  # fmt: skip
ROWS_COUNTED = 20_000  # for the summary; all of them where there is a limit to keep


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt, and how many rows were counted. `images` are width and height in pixels, as the
    processor scales them, of the images of the row where they have most pixels."""

    longest: int
    counted: int
    images: tuple[tuple[int, int], ...] = ()


@contextlib.contextmanager
def naming_the_dataset(source: str):
    """What is wrong with prompts is said with the name of their dataset before it."""
    try:
        yield
    except ValueError as error:  # also Arrow's, of chats that have no common form
        raise ConfigError(f"dataset {source!r}: {' '.join(str(error).split())}") from error


def load(launch: LaunchArguments):
    """The training set, with a column `prompt` of texts or of chats, and of chats one of images where it has them.
    None for "builtin", which needs the tokenizer. Only hub: downloads. Raises `ConfigError`."""
    if launch.dataset_name == "builtin":
        return None
    with naming_the_dataset(launch.dataset_name):
        rows = read(launch.dataset_name, launch.dataset_config, launch.dataset_train_split)
        return prompt_images.as_trained(of_one_kind(with_chats_read(rows)))


def read(source: str, config: str | None, split: str):
    """The rows of a file, a folder or a dataset on the hub, which have a column `prompt`. Raises `ConfigError`."""
    path = Path(source)
    if source.startswith("hub:"):
        rows = loaded(source.removeprefix("hub:"), config, split=split)
    elif path.is_dir():
        rows = rows_of_folder(path, config, split)
    elif path.suffix in KINDS and path.is_file():
        rows = rows_of_file(source, split)
    else:
        what = f"it ends in {path.suffix!r}: unpack or convert it" if path.is_file() else "it is not here"
        raise ConfigError(f"{what} ({path.absolute()}); name {FORMATS}")
    if "prompt" not in rows.column_names:
        raise ConfigError(f"no column 'prompt'; it has {', '.join(rows.column_names)}: rename one of them")
    return rows


def loaded(*source, **options):
    """What `load_dataset` reads. Raises `ConfigError` that says what is in the way."""
    from datasets import config, load_dataset

    try:
        return load_dataset(*source, **options)
    except Exception as error:  # a malformed file raises whatever its parser raises
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeError):
            raise ConfigError(f"it is not UTF-8 ({one_line(cause)}); save it as UTF-8") from error
        if isinstance(cause, OSError) and is_about(cause, Path(config.HF_DATASETS_CACHE)):
            raise ConfigError(
                f"the cache {config.HF_DATASETS_CACHE} cannot be written ({cause.strerror}); set HF_HOME to a folder "
                "that can"
            ) from error
        if any(words in one_line(cause) for words in NO_ROWS):
            raise ConfigError("it has no rows; write one a prompt") from error
        raise ConfigError(f"cannot be read: {one_line(cause)}") from error


def is_about(error: OSError, cache: Path) -> bool:
    """Whether what failed is a write to the cache: in it, or in making the folders above it."""
    path = Path(error.filename or "")
    return error.errno == errno.ENOSPC or cache in path.parents or path in (cache, *cache.parents[:-1])


def rows_of_folder(folder: Path, config: str | None, split: str):
    """Texts are read file by file, because one can have nothing in a column where others have values."""
    from datasets import load_dataset_builder

    try:
        files = load_dataset_builder(str(folder), config).config.data_files[split]
    except Exception:  # no such split, no files, a script: said below
        files = []
    if not files or any(KINDS.get(Path(file).suffix) not in ("json", "csv") for file in files):
        return loaded(str(folder), config, split=split)
    return joined(files)


def rows_of_file(file: str, split: str):
    kind, options = KINDS[Path(file).suffix], {}
    if kind == "csv":  # "NA" and 5 are texts like others
        options = {"sep": separator_of(file), "keep_default_na": False, "converters": {"prompt": str}}
    rows = loaded(kind, data_files=file, split=split, **options)
    if field := rows_inside(rows):
        rows = loaded(kind, data_files=file, split=split, field=field)
    try:
        rows.data.table.validate(full=kind == "json")  # of which bytes are taken as they are
    except ValueError as error:
        raise ConfigError(f"it is not UTF-8 ({one_line(error)}); save it as UTF-8") from error
    return rows


def separator_of(file: str) -> str:
    with open(file, encoding="utf-8-sig", errors="replace", newline="") as opened:
        try:
            return csv.Sniffer().sniff(opened.readline(), delimiters=",;\t").delimiter
        except csv.Error:  # a single column
            return ","


def rows_inside(rows) -> str | None:
    """The name under which all rows lie, as in {"data": [{"prompt": ...}]}."""
    for name, feature in rows.features.items():
        inner = getattr(feature, "feature", None)
        if "prompt" not in rows.column_names and isinstance(inner, dict) and "prompt" in inner:
            return name
    return None


def joined(files: list[str]):
    """The rows of all files. Raises `ConfigError` that names the file which cannot be read, or has other columns."""
    import pyarrow
    from datasets import Dataset

    table = None
    for file in files:
        try:
            part = rows_of_file(file, "train").data.table.replace_schema_metadata(None)
            table = part if table is None else pyarrow.concat_tables([table, part], promote_options="permissive")
        except (ConfigError, pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise ConfigError(f"{Path(file).name}: {one_line(error)}") from error
    return Dataset(table)


def builtin_prompts(tokenizer, tokens: int):
    """A training set of prompts of that many tokens from Python's documentation. Raises `ConfigError`."""
    from datasets import Dataset

    try:
        return Dataset.from_dict({"prompt": data.build_prompts(data.load_documents(), tokenizer, tokens)})
    except ConfigError:
        raise
    except Exception as error:  # no template, or one that does not take these chats
        remedy = "name a dataset of texts (--dataset_name), or a model with a chat template"
        raise ConfigError(f"the built-in prompts cannot be made tokens: {one_line(error)}; {remedy}") from error


def with_chats_read(rows):
    """The rows with chats where prompts are chats as text, as JSON or as Python writes them: all that a table such as
    CSV can hold. Raises `ConfigError` that names a row which is none."""
    if not any(isinstance(prompt, str) and CHAT_AS_TEXT.match(prompt) for prompt in rows["prompt"]):
        return rows
    chats = []
    for row, text in enumerate(rows["prompt"], 1):
        try:
            chats.append(chat_in(str(text)))
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:  # the last two of brackets in brackets
            raise ConfigError(f"row {row}: the prompt is no chat, as others are; write it as JSON: {CHAT}") from error
    return rows.add_column("the chats", chats).remove_columns("prompt").rename_column("the chats", "prompt")


def of_one_kind(rows):
    """The rows. Raises `ConfigError` where one is neither text nor a chat, or both are among them: TRL treats a batch
    as its first prompt."""
    first = None
    for row, prompt in enumerate(rows["prompt"], 1):
        kind = "text" if isinstance(prompt, str) else "a chat" if is_chat(prompt) else None
        if kind is None:
            raise ConfigError(f"row {row}: the prompt is {shown(prompt)}; write text, or a chat: {CHAT}")
        if kind != (first := first or kind):
            raise ConfigError(f"row 1 is {first} and row {row} is {kind}; write all prompts as chats, or all as text")
    return rows


def is_chat(prompt) -> bool:
    """Whether TRL takes it for one, and a template for one that says something."""
    return (
        isinstance(prompt, list)
        and prompt != []
        and all(isinstance(message, dict) and message.get("role") for message in prompt)
    )


def chat_in(text: str) -> list[dict]:
    try:
        chat = json.loads(text)
    except ValueError:
        chat = ast.literal_eval(text.strip())
    if not isinstance(chat, list):
        raise ValueError(text)
    return chat


def check_enough(rows, config) -> None:
    """Raise `ConfigError` where there are fewer prompts than a rollout has: TRL leaves out what does not fill one, so
    it would train nothing."""
    prompts = config.generation_batch_size // config.num_generations
    if len(rows) < prompts:
        raise ConfigError(
            f"{len(rows)} in it, and {prompts} prompts are generated for at a time ({config.generation_batch_size} "
            f"completions, k = {config.num_generations}): add prompts or lower steps_per_generation"
        )


def measure(rows, tokenizer, options: dict, limit: int | None, images: str | None = None) -> Lengths:
    """Count the tokens of the prompts as the trainer will: `options` are its `chat_template_kwargs`. With `images`,
    their column, `tokenizer` is the model's processor.

    Raises `ConfigError` that names the row for a prompt that is longer than `limit` tokens, that has none, and for
    what the chat template does not take.
    """
    longest, longest_row, largest = 0, 0, ()
    counted = len(rows) if limit else min(len(rows), prompt_images.ROWS_COUNTED if images else ROWS_COUNTED)
    for row in range(1, counted + 1):
        try:
            tokens, sizes = tokens_of(rows[row - 1], tokenizer, options, images)
        except Exception as error:  # a template is a program, an image can be anything
            remedy = "change the row" if tokenizer.chat_template else "use text, or a model with a chat template"
            raise ConfigError(f"row {row} cannot be made tokens: {one_line(error)}; {remedy}") from error
        if tokens > longest:
            longest, longest_row = tokens, row
        # A model's image tokens grow with the pixels, and so does what its vision tower holds
        largest = max(largest, sizes, key=lambda row: sum(width * height for width, height in row))
    if limit and longest > limit:
        raise ConfigError(
            f"row {longest_row}: the prompt has {longest:,} tokens, and the settings are for at most "
            f"max_prompt_tokens {limit:,}; shorten it, or plan again with --prompt {longest}"
        )
    return Lengths(longest, counted, largest)


def tokens_of(row: dict, tokenizer, options: dict, images: str | None) -> tuple[int, tuple]:
    """How many tokens a row's prompt has, and the sizes of its images."""
    prompt, sizes = row["prompt"], ()
    if images:
        given = row[images] if isinstance(row[images], list) else [row[images]]
        ids, sizes = prompt_images.encode(prompt, given, tokenizer, options)
    elif isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **options)
    if not ids:
        raise ConfigError("the prompt is empty")
    return len(ids), sizes

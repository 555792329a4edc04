"""The prompts that a launched training is given: read, checked, and counted before the model is loaded."""

import ast
import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import ConfigError
from rloo_memory.launch import prompt_images
from rloo_memory.models import one_line
from rloo_memory.settings.arguments import LaunchArguments

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
FORMATS = f"a {', '.join(KINDS)} file with a column `prompt`, a folder of such files, or hub:owner/name"
CHAT = '[{"role": "user", "content": "..."}]'
CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
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
        return prompt_images.as_trained(with_chats_read(rows))


def read(source: str, config: str | None, split: str):
    """The rows of a file, a folder or a dataset on the hub, which have a column `prompt`. Raises `ConfigError`."""
    from datasets import load_dataset

    path = Path(source)
    what, files = KINDS.get(path.suffix), source
    if path.is_dir() or source.startswith("hub:"):
        what, files = source.removeprefix("hub:"), None
    elif not what or not path.is_file():
        raise ConfigError(f"it is not here ({path.absolute()}); name {FORMATS}")
    try:
        rows = load_dataset(what, config, data_files=files, split=split)
    except Exception as error:  # a malformed file raises whatever its parser raises
        raise ConfigError(f"cannot be read: {one_line(error.__cause__ or error)}") from error
    if "prompt" not in rows.column_names:
        raise ConfigError(f"no column 'prompt'; it has {', '.join(rows.column_names)}: rename one of them")
    return rows


def builtin_prompts(tokenizer, tokens: int):
    """A training set of prompts of that many tokens from Python's documentation. Raises `ConfigError`."""
    from datasets import Dataset

    from rloo_memory import data

    return Dataset.from_dict({"prompt": data.build_prompts(data.load_documents("builtin"), tokenizer, tokens)})


def with_chats_read(rows):
    """The rows with chats where prompts are chats as text, as JSON or as Python writes them: all that a table such as
    CSV can hold. Raises `ConfigError` that names a row which is none."""
    if not any(isinstance(prompt, str) and CHAT_AS_TEXT.match(prompt) for prompt in rows["prompt"]):
        return rows
    chats = []
    for row, text in enumerate(rows["prompt"], 1):
        try:
            chats.append(chat_in(str(text)))
        except (ValueError, SyntaxError) as error:
            raise ConfigError(f"row {row}: the prompt is no chat, as others are; write it as JSON: {CHAT}") from error
    return rows.add_column("the chats", chats).remove_columns("prompt").rename_column("the chats", "prompt")


def chat_in(text: str) -> list[dict]:
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text.strip())


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
        largest = max(largest, sizes, key=prompt_images.pixels)
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

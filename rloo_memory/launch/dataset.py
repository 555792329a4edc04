"""The prompts that a launched training is given: read and checked before torch is imported, counted before the model
is loaded."""

import ast
import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.errors import ConfigError
from rloo_memory.launch import model_limits, prompt_images
from rloo_memory.models import one_line
from rloo_memory.settings.arguments import LaunchArguments

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
FORMATS = f"a {', '.join(KINDS)} file with a column `prompt`, a folder of such files, or hub:owner/name"
CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
ROWS_COUNTED = 20_000  # for the summary; all of them where there is a limit to keep


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts: the longest one, its row (from 1), and how many rows were counted. `images` are width and
    height in pixels, as the processor scales them, of the images of the row where they have most pixels."""

    longest: int
    row: int
    counted: int
    images: tuple[tuple[int, int], ...] = ()


@contextlib.contextmanager
def named(source: str):
    """What is wrong with prompts is said with the name of their dataset before it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"dataset {source!r}: {error}") from error


def load(launch: LaunchArguments):
    """The training set, with a column `prompt` of texts or of chats, and of chats one of images where it has them.
    Raises `ConfigError` that names the row.

    None for "builtin", which needs the tokenizer. Only hub: downloads. Does not import torch.
    """
    if launch.dataset_name == "builtin":
        return None
    with named(launch.dataset_name):
        rows = with_chats_read(read(launch.dataset_name, launch.dataset_config, launch.dataset_train_split))
        for row, prompt in enumerate(rows["prompt"], 1):
            if problem := wrong_prompt(prompt):
                raise ConfigError(f"row {row}: {problem}")
        return prompt_images.checked(rows)


def read(source: str, config: str | None, split: str):
    """The rows of a file, a folder or a dataset on the hub, which have a column `prompt`. Raises `ConfigError`."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    path, what, files = Path(source), source.removeprefix("hub:"), None
    if not what:
        raise ConfigError(f"it has no name; name builtin, {FORMATS}")
    if source.startswith("hub:"):
        pass
    elif path.is_dir():
        if not any(file.suffix in KINDS for file in path.rglob("*")):
            raise ConfigError(f"a folder without a {', '.join(KINDS)} file; name {FORMATS}")
    elif not path.exists():
        looks_like_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) and path.suffix not in KINDS
        hint = f"hub:{source} downloads it from the hub" if looks_like_hub else f"name {FORMATS}"
        raise ConfigError(f"it is not here ({path.absolute()}); {hint}")
    elif path.suffix not in KINDS or not path.is_file():
        raise ConfigError(f"no dataset by its ending; name {FORMATS}")
    elif path.stat().st_size == 0:
        raise ConfigError("an empty file; it needs a column `prompt` and at least one row")
    elif KINDS[path.suffix] == "json" and (problem := broken_row(path)):
        raise ConfigError(problem)
    else:
        what, files = KINDS[path.suffix], source
    try:
        rows = load_dataset(what, config, data_files=files, split=split)
    except Exception as error:  # a malformed file raises whatever its parser raises
        reason = one_line(error.__cause__ or error)
        if "corresponds to no data" in reason:
            reason = "it has no rows"
        remedy = "write one row a prompt" if path.exists() else "check name and network"
        remedy = "name a dataset_train_split that it has" if "split" in reason else remedy
        raise ConfigError(f"cannot be read: {reason}; {remedy}") from error
    if "prompt" not in rows.column_names:
        raise ConfigError(f"no column 'prompt'; it has {', '.join(rows.column_names)}: rename one of them")
    if not len(rows):
        raise ConfigError("it has no rows; it needs at least one prompt")
    return rows


def builtin_prompts(tokenizer, tokens: int):
    """A training set of prompts of that many tokens from Python's documentation. Raises `ConfigError`."""
    from datasets import Dataset

    from rloo_memory import data

    return Dataset.from_dict({"prompt": data.build_prompts(data.load_documents("builtin"), tokenizer, tokens)})


def with_chats_read(rows):
    """The rows with chats where each prompt is a chat as text: all that a table such as CSV can hold, as JSON or as
    Python writes it. Raises `ConfigError` that names a row which is none, or cannot be read."""
    prompts = rows["prompt"][:]
    written = [row for row, prompt in enumerate(prompts, 1) if isinstance(prompt, str) and CHAT_AS_TEXT.match(prompt)]
    if not written:
        return rows
    if len(written) < len(prompts):
        other = next(row for row, at in enumerate([*written, 0], 1) if row != at)
        raise ConfigError(
            f"the prompt is a chat as text in row {written[0]} and none in row {other}; all have to be chats, or all "
            "text"
        )
    chats = [chat_in(prompt, row) for row, prompt in enumerate(prompts, 1)]
    if os.environ.get("RANK", "0") == "0":
        print("data    the prompts are chats as text: read as chats", flush=True)
    try:
        return (
            rows.rename_column("prompt", "text of the prompt")
            .add_column("prompt", chats)
            .remove_columns("text of the prompt")
        )
    except Exception as error:  # contents of several kinds: Arrow's own errors
        raise ConfigError(f"the chats have no common form: {one_line(error)}") from error


def chat_in(text: str, row: int) -> list[dict]:
    """The chat that a text holds. Raises `ConfigError` that names the row."""
    try:
        chat = json.loads(text)
    except ValueError:
        try:
            chat = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ConfigError(
                f"row {row}: the prompt is no chat that can be read ({one_line(error)}); write it as JSON: "
                '[{"role": "user", "content": "..."}]'
            ) from error
    if problem := wrong_prompt(chat):  # before Arrow says less of it
        raise ConfigError(f"row {row}: {problem}")
    return chat


def wrong_prompt(prompt) -> str | None:
    """What is wrong with a prompt, which must be text or a chat that says something."""
    if isinstance(prompt, str):
        return None if prompt.strip() else f"the prompt {prompt!r} is empty; remove the row or fill it"
    if prompt is None or prompt == []:
        return "the prompt is empty; remove the row or fill it"
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return f"the prompt is {one_line(repr(prompt))}; it must be text or a list of messages"
    if not all(isinstance(message.get("role"), str) and "content" in message for message in prompt):
        return f"the prompt is {one_line(repr(prompt))}; each message needs a `role` and a `content`"
    if not any(message["content"] and str(message["content"]).strip() for message in prompt):
        return "no message of the prompt says anything; remove the row or fill it"
    return None


def broken_row(path: Path) -> str | None:
    """Which line of a JSON file is no row, and why; None where every line is one. A .json file may also be one list.

    The parser of `datasets` is faster, but it says neither the line nor that text is not UTF-8.
    """
    number, first = 0, None
    try:
        if path.suffix == ".json" and path.read_bytes().lstrip()[:1] == b"[":
            rows = json.loads(path.read_text("utf-8"))
            strange = next((row for row in rows if not isinstance(row, dict)), None)
            return None if strange is None else f"{one_line(repr(strange))} is no object like {{'prompt': ...}}"
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line.decode().rstrip("\r\n"))  # the end of a line is said to be on the next one
                if not isinstance(row, dict):
                    return f"line {number} is {one_line(repr(row))}, not an object like {{'prompt': ...}}"
                first = first or (number, type(row.get("prompt")))
                if row.get("prompt") is not None and not isinstance(row["prompt"], first[1]):
                    return (
                        f"the prompt is {kind(type(row['prompt']))} on line {number}, {kind(first[1])} on {first[0]}"
                    )
    except json.JSONDecodeError as error:
        return f"line {number or error.lineno} is not JSON: {error.msg} (character {error.colno})"
    except UnicodeDecodeError as error:
        byte = f"{error.object[error.start]:#x}"
        return f"line {number} is not UTF-8 ({byte})" if number else f"{byte} at byte {error.start} is not UTF-8"
    except (RecursionError, ValueError) as error:  # nested without end, or a number of thousands of digits
        return f"line {number}: {one_line(error)}"
    return None


def kind(python_type: type) -> str:
    return {str: "text", list: "a list", dict: "an object", type(None): "missing"}.get(python_type, "a number")


def check_enough(rows, config) -> None:
    """Raise `ConfigError` where there are fewer prompts than a rollout has: TRL leaves out what does not fill one, so
    it would train nothing."""
    prompts = config.generation_batch_size // config.num_generations
    if len(rows) < prompts:
        what = f"{config.steps_per_generation} micro-batches of {config.per_device_train_batch_size} completions"
        devices = f" on each of {config.world_size} devices" if config.world_size > 1 else ""
        raise ConfigError(
            f"it has {len(rows)} prompt{'s' if len(rows) > 1 else ''}, and {prompts} are generated for at a time "
            f"({what}{devices}, k = {config.num_generations}): nothing would be trained; add prompts or lower "
            "steps_per_generation"
        )


def measure(
    rows,
    tokenizer,
    options: dict,
    limit: int | None,
    images: prompt_images.ImageColumn | None = None,
    hf_config=None,
) -> Lengths:
    """Count the tokens of the prompts as the trainer will: `options` are its `chat_template_kwargs`. With `images`,
    `tokenizer` is the model's processor.

    Raises `ConfigError` for a prompt that is longer than `limit` tokens, that has none, that has one without a row in
    the embedding of the model (`hf_config`), or that the chat template does not take, and for images that cannot be
    read or have no place in their chat; it names the row.
    """
    longest, longest_row, counted, largest = 0, 0, 0, ()
    stand_ins = model_limits.placeholders(hf_config) if hf_config else ()
    to_count = images.rows_counted if images else ROWS_COUNTED
    counted_rows = rows if limit else rows.select(range(min(len(rows), to_count)))
    if images:
        prompt_images.check_places(rows, images)
        column = counted_rows.select_columns(images.name)
    for row, prompt in enumerate(counted_rows["prompt"], 1):
        given, sizes = prompt_images.read(column, row) if images else None, ()
        try:
            if images:
                ids, sizes = prompt_images.encode(prompt, given, tokenizer, options)
            elif isinstance(prompt, str):
                ids = tokenizer(prompt)["input_ids"]
            else:
                ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **options)
        except Exception as error:  # a template is a program: it raises what it likes
            use = "use a model with one" if images else "use text, or a model with one"
            remedy = use if not tokenizer.chat_template else "change the row"
            raise ConfigError(f"row {row}: the chat template: {one_line(error)}; {remedy}") from error
        if not ids:
            raise ConfigError(f"row {row}: the prompt has no tokens; remove the row or fill it")
        if hf_config and (problem := model_limits.beyond(max(set(ids) - stand_ins, default=0), hf_config, tokenizer)):
            raise ConfigError(f"row {row}: {problem}")
        if len(ids) > longest:
            longest, longest_row = len(ids), row
        # A model's image tokens grow with the pixels, and so does what its vision tower holds
        largest = max(largest, sizes, key=prompt_images.pixels)
        counted = row
    if limit and longest > limit:
        raise ConfigError(
            f"row {longest_row}: the prompt has {longest:,} tokens, and the settings are for at most "
            f"max_prompt_tokens {limit:,}; shorten it, or plan again with --prompt {longest}"
        )
    return Lengths(longest, longest_row, counted, largest)

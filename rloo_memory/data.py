"""Prompts from real documents: text -> chat messages that render to a stated number of tokens."""

from pathlib import Path

from rloo_memory.errors import ConfigError

INSTRUCTION = "Summarize the following document:\n\n"
TEXT_COLUMNS = ("text", "report", "document", "input", "content", "article")
MAX_PROMPTS = 40  # the published experiment trained on 40 documents


def load_documents(source: str) -> list[str]:
    """Documents from `source`: `builtin` (Python's own language reference, 465,000 characters), a .txt, .jsonl, .csv
    or .parquet file, a folder of .txt files, or `hub:owner/dataset[:split]` (downloads; needs network).

    Raises `ConfigError` when there is nothing to read.
    """
    if source == "builtin":
        from pydoc_data.topics import topics

        return ["\n\n".join(topics[name] for name in sorted(topics))]
    if source.startswith("hub:"):
        from datasets import load_dataset

        name, _, split = source.removeprefix("hub:").partition(":")
        try:
            return _column(load_dataset(name, split=split or "train"), source)
        except ConfigError:
            raise
        except Exception as error:  # the hub client raises many types; all mean "not to be had"
            raise ConfigError(f"cannot load dataset {name!r} from the hub: {str(error).splitlines()[0]}") from error
    path = Path(source)
    if not path.exists():
        raise ConfigError(
            f"document source {source!r} does not exist; give a file, a folder of .txt, hub:owner/name or builtin"
        )
    if path.is_dir() or path.suffix == ".txt":
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        try:  # UTF-8 in every locale: another encoding would be other tokens
            documents = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename!r}: {error.strerror}; mend or remove it") from error
    else:
        from datasets import load_dataset

        loaders = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
        if path.suffix not in loaders:
            raise ConfigError(f"document source {source!r}: unknown ending; use {', '.join(['.txt', *loaders])}")
        try:
            documents = _column(load_dataset(loaders[path.suffix], data_files=str(path), split="train"), source)
        except ConfigError:
            raise
        except Exception as error:  # a malformed file raises whatever its parser raises
            raise ConfigError(f"cannot read {source!r}: {str(error).splitlines()[0]}") from error
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ConfigError(f"document source {source!r} holds no text; give at least one non-empty document")
    return documents


def _column(dataset, source: str) -> list[str]:
    for name in TEXT_COLUMNS:
        if name in dataset.column_names:
            return [str(text) for text in dataset[name][:MAX_PROMPTS]]
    raise ConfigError(
        f"{source!r} has no text column; it has {', '.join(dataset.column_names)}, one of "
        f"{', '.join(TEXT_COLUMNS)} is needed"
    )


def build_prompts(documents: list[str], tokenizer, prompt_tokens: int) -> list[list[dict]]:
    """Chat messages whose rendered prompt has at most `prompt_tokens` tokens, template included.

    A long document is cut into consecutive pieces, each its own prompt; a short one gives a shorter prompt. At most
    `MAX_PROMPTS`. Raises `ConfigError` when instruction and template alone take that many.
    """
    overhead = len(render(tokenizer, message("")))
    if overhead + 8 > prompt_tokens:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens} leaves no room for a document: instruction and chat template take "
            f"{overhead}; use {overhead + 8} or more"
        )
    prompts = []
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        start = 0
        # a last piece that is much shorter than the others would make the group of lengths uneven: leave it out
        while start == 0 or start + prompt_tokens <= len(ids):
            size = prompt_tokens - overhead
            messages = message(tokenizer.decode(ids[start : start + size]))
            while len(render(tokenizer, messages)) > prompt_tokens:  # a cut can split a word into more tokens
                size -= 1
                messages = message(tokenizer.decode(ids[start : start + size]))
            prompts.append(messages)
            start += prompt_tokens
            if len(prompts) == MAX_PROMPTS:
                return prompts
    return prompts


def message(text: str) -> list[dict]:
    return [{"role": "user", "content": INSTRUCTION + text}]


def render(tokenizer, messages: list[dict]) -> list[int]:
    """Token ids of the chat, with the marker that starts the assistant's turn."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def letter_reward(completions=None, **kwargs) -> list[float]:
    """A reward that a tiny model can learn in a few updates: the number of letters "e" in the completion, over 10.

    Serves both lines: TRL 0.21 calls it with whole texts, special tokens dropped, so the completion is what follows
    the template's last "assistant" line; TRL 1.x with `completions` as chat messages.
    """
    texts = [text.rsplit("assistant\n")[-1] if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [text.count("e") / 10 for text in texts]

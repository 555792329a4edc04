"""Prompts from real documents: text -> chat messages that render to a stated number of tokens."""

from pathlib import Path

from rloo_memory.errors import ConfigError

INSTRUCTION = "Summarize the following document:\n\n"
TEXT_COLUMNS = ("text", "report", "document", "input", "content", "article")
MAX_PROMPTS = 40  # the published experiment trained on 40 documents


LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_documents(source: str) -> list[str]:
    """Documents from `source`: `builtin` (Python's own language reference, 465,000 characters), a .txt, .jsonl, .csv
    or .parquet file, a folder of .txt files, or `hub:owner/dataset[:split]` (downloads; needs network).

    Raises `ConfigError` when there is nothing to read.
    """
    if source == "builtin":
        from pydoc_data.topics import topics

        return ["\n\n".join(topics[name] for name in sorted(topics))]
    path = Path(source)
    try:
        if source.startswith("hub:") or path.suffix in LOADERS:
            documents = from_table(source)
        else:  # UTF-8 in every locale: another encoding would be other tokens
            files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
            documents = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    except ConfigError:
        raise
    except Exception as error:  # the hub's client and a malformed file raise whatever they come to
        raise ConfigError(f"cannot read documents from {source!r}: {str(error).splitlines()[0]}") from error
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ConfigError(f"document source {source!r} holds no text; give at least one non-empty document")
    return documents


def from_table(source: str) -> list[str]:
    from datasets import load_dataset

    if source.startswith("hub:"):
        name, _, split = source.removeprefix("hub:").partition(":")
        dataset = load_dataset(name, split=split or "train")
    else:
        dataset = load_dataset(LOADERS[Path(source).suffix], data_files=source, split="train")
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

"""Prompts from real documents: text -> chat messages that render to a stated number of tokens."""

from rloo_memory.errors import ConfigError

INSTRUCTION = "Summarize the following document:\n\n"
MAX_PROMPTS = 40  # the published experiment trained on 40 documents


def load_documents() -> list[str]:
    """Python's own language reference, 465,000 characters."""
    from pydoc_data.topics import topics

    return ["\n\n".join(topics[name] for name in sorted(topics))]


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
        # a last piece that is much shorter than the others would make the group of lengths uneven: leave it out
        for start in range(0, max(1, len(ids) - prompt_tokens + 1), prompt_tokens):
            for end in range(start + prompt_tokens - overhead, start, -1):  # a cut can split a word into more tokens
                messages = message(tokenizer.decode(ids[start:end]))
                if len(render(tokenizer, messages)) <= prompt_tokens:
                    break
            prompts.append(messages)
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

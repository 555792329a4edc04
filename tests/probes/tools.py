"""A tool, and completions that call it: a model without training calls none."""


def lookup(word: str) -> str:
    """
    Looks a word up.

    Args:
        word: What to look up.
    """
    return f"river {word} green"


def parsed(tokenizer, ids, *args, **kwargs) -> dict:
    """In place of TRL's `parse_response`: a third of the completions calls the tool."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    call = {"type": "function", "function": {"name": lookup.__name__, "arguments": {"word": text[:4]}}}
    return {"role": "assistant", "content": text} | ({} if sum(ids) % 3 else {"tool_calls": [call]})

"""What a model can take of the prompts: ids of its embedding, its positions, the tokens that end and pad a text."""

from rloo_memory.errors import ConfigError


def check_special_tokens(hf_config, tokenizer, named: str) -> None:
    """Raise `ConfigError` where no token ends a text, or where the model has no embedding for the one that ends or
    pads it."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of model {named!r} has no eos_token: no completion could end; name one in its "
            "tokenizer_config.json"
        )
    for name in ("eos_token", "pad_token"):
        if problem := beyond(getattr(tokenizer, f"{name}_id"), hf_config, tokenizer):
            raise ConfigError(f"the {name} of model {named!r}: {problem}")


def beyond(token_id: int | None, hf_config, tokenizer) -> str | None:
    """What is wrong with a token's id, which must be a row of the embedding."""
    text_config = hf_config.get_text_config()
    rows = getattr(text_config, "vocab_size", None)
    if None in (token_id, rows) or token_id < rows + getattr(text_config, "additional_vocab_size", 0):
        return None
    token = getattr(tokenizer, "tokenizer", tokenizer).convert_ids_to_tokens(token_id)
    return (
        f"the token {token!r} has the id {token_id}, and the model's embedding has {rows} rows; resize it "
        "(model.resize_token_embeddings) and save the model, or use another token"
    )


def placeholders(hf_config) -> set[int]:
    """Ids that stand for an image, a video or a sound: some models have no embedding for them."""
    return {value for name, value in vars(hf_config).items() if "_token_" in name and isinstance(value, int)} - {
        getattr(hf_config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")
    }


def check_positions(hf_config, lengths, completion: int) -> None:
    """Raise `ConfigError` where the longest prompt and a completion of that many tokens exceed the rotary positions
    that the model was trained with. Scaled ones are stretched, and an image takes fewer than tokens."""
    text_config = hf_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None)
    too_long = positions and rope and lengths.longest + completion > positions
    if too_long and "factor" not in str(rope) and not (lengths.images and "mrope_section" in str(rope)):
        left = positions - lengths.longest
        shorter = f"--max_completion_length {left}, or " if left > 0 else ""
        raise ConfigError(
            f"row {lengths.row}: a prompt of {lengths.longest:,} tokens and max_completion_length {completion:,} "
            f"exceed the model's {positions:,} positions; {shorter}shorten the prompt; --anyway trains beyond them"
        )

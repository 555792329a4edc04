"""What a model can take of the prompts: ids of its embedding, its positions, the tokens that end and pad a text."""

from rloo_memory.errors import ConfigError

SCALED_WITHOUT_END = "dynamic"  # these rotary positions are stretched to any length
LOOKED_UP = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "opt", "biogpt")  # in a table, which ends


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


def positions_of(hf_config) -> int | None:
    """How many tokens the model has positions for. None where nothing is known to limit them: recurrent models, ALiBi,
    rotary positions that are stretched to any length."""
    text_config = hf_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None)
    if text_config.model_type in LOOKED_UP:
        return positions
    if positions is None or not rope or getattr(text_config, "alibi", False):
        return None
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # some have one a kind of layer
    if any(kind.get("rope_type") == SCALED_WITHOUT_END for kind in kinds):
        return None
    # `max_position_embeddings` may or may not be those of the scaled model already
    scaled = [k["factor"] * (k.get("original_max_position_embeddings") or positions) for k in kinds if k.get("factor")]
    return max(positions, *map(int, scaled), 0)


def check_positions(hf_config, lengths, completion: int) -> None:
    """Raise `ConfigError` where the longest prompt and a completion of that many tokens exceed the positions."""
    positions = positions_of(hf_config)
    in_image_rows = lengths.images and "mrope_section" in str(hf_config.get_text_config().rope_parameters)
    if positions is None or lengths.longest + completion <= positions or in_image_rows:  # those take fewer than tokens
        return
    left = positions - lengths.longest
    shorter = f"--max_completion_length {left}, or " if left > 0 else ""
    raise ConfigError(
        f"row {lengths.row}: a prompt of {lengths.longest:,} tokens and max_completion_length {completion:,} exceed "
        f"the model's {positions:,} positions; {shorter}shorten the prompt; --anyway trains beyond them"
    )

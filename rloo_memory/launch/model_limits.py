"""What a model can take of the prompts: ids of its embedding, its positions, the tokens that end and pad a text."""

from rloo_memory.errors import ConfigError

SCALED_WITHOUT_END = ("dynamic",)  # these rotary positions are stretched to any length


def config_of(path: str, overrides: dict | None):
    """The model's config as the trainer loads it: `overrides` are its `model_init_kwargs`."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(path)
    for name, value in (overrides or {}).items():
        if hasattr(hf_config, name) and name not in ("dtype", "torch_dtype"):
            setattr(hf_config, name, value)
    return hf_config


def check_special_tokens(hf_config, tokenizer, named: str) -> None:
    """Raise `ConfigError` where no token ends a text, or where the model has no embedding for the one that ends or
    pads it. As TRL does, the token that ends a text pads where no other does."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of model {named!r} has no eos_token: no completion could end; name one in its "
            "tokenizer_config.json"
        )
    for name in ("eos_token", "pad_token"):
        problem = beyond(getattr(tokenizer, f"{name}_id"), hf_config, tokenizer)
        if problem:
            raise ConfigError(f"the {name} of model {named!r}: {problem}")


def beyond(token_id: int | None, hf_config, tokenizer) -> str | None:
    """What is wrong with a token's id, which must be a row of the embedding."""
    text_config = hf_config.get_text_config()
    vocab_size = getattr(text_config, "vocab_size", None)
    if token_id is None or vocab_size is None:
        return None
    if token_id < vocab_size + getattr(text_config, "additional_vocab_size", 0):
        return None
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    return (
        f"the token {tokenizer.convert_ids_to_tokens(token_id)!r} has the id {token_id}, and the model's embedding "
        f"has {vocab_size} rows; resize it (model.resize_token_embeddings) and save the model, or use another token"
    )


def placeholders(hf_config) -> set[int]:
    """Ids that stand for an image, a video or a sound: some models have no embedding for them."""
    return {value for name, value in vars(hf_config).items() if "_token_" in name and isinstance(value, int)} - {
        getattr(hf_config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")
    }


def positions_of(hf_config) -> tuple[int | None, bool]:
    """(how many tokens the model has positions for, whether it cannot go on without them). (None, False) where nothing
    limits them: recurrent models, ALiBi, relative positions, rotary ones that are stretched to any length."""
    text_config = hf_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is None or getattr(text_config, "alibi", False):
        return None, False
    rope = getattr(text_config, "rope_parameters", None)
    if not rope:
        return (positions, True) if has_table(text_config, positions) else (None, False)
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # some have one a kind of layer
    if any(kind.get("rope_type") in SCALED_WITHOUT_END for kind in kinds):
        return None, False
    # `max_position_embeddings` may or may not be those of the scaled model already
    scaled = [
        int(kind["factor"] * (kind.get("original_max_position_embeddings") or positions))
        for kind in kinds
        if kind.get("factor")
    ]
    return max(positions, *scaled, 0), False


def has_table(text_config, positions: int) -> bool:
    """Whether the model looks its positions up in a table of `positions` rows, up to a few that some keep in front."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config)
    table = model.get_input_embeddings()
    learned = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module is not table]
    if any(positions <= module.num_embeddings <= positions + 2 for module in learned):
        return True
    return any("pos" in name and positions in buffer.shape[:2] for name, buffer in model.named_buffers())


def check_positions(hf_config, lengths, completion: int, anyway: bool) -> None:
    """Raise `ConfigError` where the longest prompt and a completion of `completion` tokens exceed the model's
    positions. Rotary ones go on behind their end, for the worse: with `anyway` they may."""
    length = lengths.longest + completion
    rope = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    if lengths.images and "mrope_section" in str(rope):  # there an image takes fewer positions than tokens
        return
    if length <= (getattr(hf_config.get_text_config(), "max_position_embeddings", None) or length):
        return
    positions, learned = positions_of(hf_config)
    if positions is None or length <= positions or (anyway and not learned):
        return
    left = positions - lengths.longest
    shorter = f"--max_completion_length {left}, or " if left > 0 else ""
    go_on = "" if learned else "; --anyway trains beyond the positions that the model was trained with"
    raise ConfigError(
        f"row {lengths.row}: a prompt of {lengths.longest:,} tokens and max_completion_length "
        f"{completion:,} exceed the model's {positions:,} positions; {shorter}shorten the prompt{go_on}"
    )

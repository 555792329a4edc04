"""The passes that the trainers hand to the model for a setup."""

from rloo_memory.errors import ConfigError


def open_prefix_of(setup):
    """An `OpenPrefix` if the completions of a prompt are spread over micro-batches, else None."""
    from rloo_memory.prefix_sharing.micro_batches import OpenPrefix

    if not setup.splits_groups:
        return None
    number = setup.num_generations // setup.per_device_train_batch_size
    return OpenPrefix(number, in_one_backward=setup.is_distributed)


def passes_of(setup, rows: int, open_prefix, num_images: list[int] | None):
    """Of `rows` rows with so many images each, in which the groups follow one another; `open_prefix` is that of the
    training. Raises `ConfigError` for whole rows with images within a token budget, as the trainers do."""
    from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
    from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses

    bounds = dict(
        prefix_length=setup.prompt_tokens,
        tokens_per_forward=setup.tokens_per_forward,
        activation_offloading=setup.activation_offloading,
    )
    if setup.prefix_sharing:
        return SharedPrefixPasses(
            **bounds,
            completions_per_forward=setup.rows_per_pass,
            group_size=min(rows, setup.num_generations),
            num_images=num_images,
            open_prefix=open_prefix,
        )
    if num_images:
        raise ConfigError(
            f"tokens_per_forward {setup.tokens_per_forward} divides rows of text, and prompts have images; set "
            "prefix_sharing, or leave it out"
        )
    return TokenBudgetPasses(**bounds)

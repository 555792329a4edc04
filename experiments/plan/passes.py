"""The passes that the trainers hand to the model for a setup."""

from experiments.config import ConfigError


def open_prefix_of(setup):
    """An `OpenPrefix` if the completions of a prompt are spread over micro-batches, else None."""
    from trl.models.prefix_sharing_micro_batches import OpenPrefix

    if not setup.splits_groups:
        return None
    number = setup.num_generations // setup.per_device_train_batch_size
    return OpenPrefix(number, in_one_backward=setup.num_devices > 1)


def passes_of(setup, rows: int, open_prefix, num_images: list[int] | None):
    """Of `rows` rows with so many images each, in which the groups follow one another; `open_prefix` is that of the
    training. Raises `ConfigError` for whole rows with images within a token budget, as the trainers do."""
    from trl.models.prefix_sharing import SharedPrefixPasses
    from trl.models.token_budget import TokenBudgetPasses

    common = dict(
        prefix_length=setup.prompt_tokens,
        group_size=min(rows, setup.num_generations),
        num_images=num_images,
        activation_offloading=setup.activation_offloading,
        open_prefix=open_prefix,
    )
    if setup.tokens_per_forward is None:
        return SharedPrefixPasses(**common, completions_per_forward=setup.rows_per_pass)
    if num_images and not setup.prefix_sharing:
        raise ConfigError(
            f"tokens_per_forward {setup.tokens_per_forward} divides rows of text, and prompts have images; set "
            "prefix_sharing, or leave it out"
        )
    return TokenBudgetPasses(
        **common, tokens_per_forward=setup.tokens_per_forward, prefix_sharing=setup.prefix_sharing
    )

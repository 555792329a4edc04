"""The passes that the trainers hand to the model for a setup."""

from rloo_memory.errors import ConfigError
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses
from rloo_memory.prefix_sharing.tree import Prompts, Tree


def tree_of(setup, prompt_ids):
    """The `Tree` of a prompt whose completions are spread over micro-batches; `prompt_ids` has a row for each."""
    prompts = Prompts.of(prompt_ids, prompt_ids.new_ones(prompt_ids.shape))
    rows = setup.per_device_train_batch_size
    return Tree.of(prompts, rows_per_backward=rows, in_one_backward=setup.is_distributed)


def passes_of(setup, num_images: list[int] | None, tree=None, rows: range | None = None):
    """Of rows with so many images each, in which the groups follow one another, and that are these of `tree`. Raises
    `ConfigError` for whole rows with images within a token budget, as the trainers do."""
    bounds = dict(
        prefix_length=setup.prompt_tokens,
        tokens_per_forward=setup.tokens_per_forward,
        activation_offloading=setup.activation_offloading,
    )
    if setup.prefix_sharing:
        return SharedPrefixPasses(
            **bounds, completions_per_forward=setup.rows_per_pass, num_images=num_images, tree=tree, rows=rows
        )
    if num_images:
        raise ConfigError(
            f"tokens_per_forward {setup.tokens_per_forward} divides rows of text, and prompts have images; set "
            "prefix_sharing, or leave it out"
        )
    return TokenBudgetPasses(**bounds)

"""The models of a run, built on the spot with random weights."""

import hashlib
from pathlib import Path

from experiments.config import ROOT, RunConfig
from rloo_memory import models
from rloo_memory.errors import ConfigError
from rloo_memory.storage import new_folder


def check_fits(config: RunConfig) -> None:
    """Raise `ConfigError` when the models, gradients and Adam's two moments alone exceed the budget, or the sequence
    exceeds the model's positions. Counts on the meta device: no memory is used."""
    hf_config = models.shape_config(config.shape, config.vocab_size)
    length = config.prompt_tokens + config.completion_tokens
    positions = hf_config.get_text_config().max_position_embeddings
    if length > positions:
        raise ConfigError(
            f"prompt {config.prompt_tokens} + completion {config.completion_tokens} = {length} tokens exceed the "
            f"model's {positions} positions; lower --prompt-tokens to {positions - config.completion_tokens} or less"
        )
    parameters = sum(p.numel() for p in models.meta_model(hf_config).parameters())
    copies = 5 + (config.reward == "model")  # policy, reference, gradient, two moments
    needed = parameters * copies * (8 if config.precision == "float64" else 4)
    if needed > config.budget_bytes:
        raise ConfigError(
            f"budget {config.budget_bytes / 2**20:.0f} MiB is below the {needed / 2**20:.0f} MiB that the models, "
            f"gradients and Adam state take before any activation; raise --budget"
        )


def prepare(config: RunConfig, documents: list[str], cache: Path = ROOT / ".build" / "models"):
    """Folders of the policy and the reward model, and the tokenizer: `(policy, reward, tokenizer)`. With another
    reward than "model" there is no reward model in its folder.

    Built models are stored below `cache`, because TRL 1.x loads the reference model from where the policy came from.
    """
    tokenizer = models.build_tokenizer(documents, config.vocab_size)
    text = hashlib.sha256("\0".join(documents).encode()).hexdigest()[:8]
    reward = config.reward == "model"
    kind = "" if reward else "-policy"
    folder = cache / f"{config.shape}-v{config.vocab_size}-s{config.seed}-{text}{kind}"
    if not folder.exists():
        with new_folder(folder) as new:
            save_models(new, models.shape_config(config.shape, config.vocab_size), tokenizer, reward, config.seed)
    return str(folder / "policy"), str(folder / "reward"), tokenizer


def save_models(folder: Path, hf_config, tokenizer, reward: bool, seed: int = 0) -> None:
    """A model with random weights in `folder`/policy and, with `reward`, one that gives a number in `folder`/reward,
    each with the tokenizer. The config gets its ids."""
    import torch
    from transformers import AutoModelForSequenceClassification

    hf_config.pad_token_id, hf_config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    torch.manual_seed(seed)
    models.auto_class(hf_config).from_config(hf_config).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    if reward:
        hf_config.num_labels = 1
        AutoModelForSequenceClassification.from_config(hf_config).save_pretrained(folder / "reward")
        tokenizer.save_pretrained(folder / "reward")

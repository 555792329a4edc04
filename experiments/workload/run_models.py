"""The models of a run: built on the spot with random weights, or named."""

import hashlib
from pathlib import Path

from experiments.config import ROOT, RunConfig
from rloo_memory.errors import ConfigError
from rloo_memory.models import build_tokenizer, load_config, meta_model, model_source, shape_config, typed_line
from rloo_memory.storage import new_folder


def model_config(config: RunConfig):
    """The policy's transformers configuration. Raises `ConfigError` when the model is not there."""
    return shape_config(config.shape, config.vocab_size) if config.model is None else load_config(config.model)


def check_fits(config: RunConfig, hf_config) -> None:
    """Raise `ConfigError` when the models, gradients and Adam's two moments alone exceed the budget, or the sequence
    exceeds the model's positions. Counts on the meta device: no memory is used. LoRA's own weights are left out."""
    length = config.prompt_tokens + config.completion_tokens
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)  # recurrent models have none
    if positions is not None and length > positions:
        raise ConfigError(
            f"prompt {config.prompt_tokens} + completion {config.completion_tokens} = {length} tokens exceed the "
            f"model's {positions} positions; lower --prompt-tokens to {positions - config.completion_tokens} or less"
        )
    try:
        parameters = sum(p.numel() for p in meta_model(hf_config).parameters())
    except Exception as error:  # no causal model, or fields that do not go together: whatever building one raises
        wrong = typed_line(error)
        raise ConfigError(f"cannot build model {config.model or config.shape!r}: {wrong}; mend its config") from error
    copies = 1 if config.lora_rank else 5  # policy; reference, gradient, two moments
    copies += config.reward == "model"
    needed = parameters * copies * {"bfloat16": 2, "float64": 8}.get(config.precision, 4)
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
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    if config.model is not None:
        source = model_source(config.model)
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
        if tokenizer.pad_token is None:
            tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        return source, source, tokenizer
    tokenizer = build_tokenizer(documents, config.vocab_size)
    text = hashlib.sha256("\0".join(documents).encode()).hexdigest()[:8]
    # Large models are stored once, as small as they are trained, and without a reward model that nothing asks for
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    kind = ("-bfloat16" if dtype == torch.bfloat16 else "") + ("" if config.reward == "model" else "-policy")
    folder = cache / f"{config.shape}-v{config.vocab_size}-s{config.seed}-{text}{kind}"
    if not folder.exists():
        hf_config = model_config(config)
        hf_config.pad_token_id = tokenizer.pad_token_id
        hf_config.eos_token_id = tokenizer.eos_token_id
        torch.manual_seed(config.seed)
        with new_folder(folder) as new:
            AutoModelForCausalLM.from_config(hf_config, dtype=dtype).save_pretrained(new / "policy")
            tokenizer.save_pretrained(new / "policy")
            if config.reward == "model":
                hf_config.num_labels = 1
                AutoModelForSequenceClassification.from_config(hf_config, dtype=dtype).save_pretrained(new / "reward")
                tokenizer.save_pretrained(new / "reward")
    return str(folder / "policy"), str(folder / "reward"), tokenizer

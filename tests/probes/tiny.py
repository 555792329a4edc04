"""A model, a tokenizer and trainings of a second, offline, on the TRL that is first on the path."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY, ENDS = 100, (3, 40)  # every token id from the first to the second ends a completion
# Of 1 to 12 words
PROMPTS = [" ".join(f"w{50 + (7 * row + word) % 50}" for word in range(1 + 5 * row % 12)) for row in range(12)]


def build_tokenizer(vocabulary=VOCABULARY):
    """A word is a token: `w7` has the id 7."""
    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{i}": i for i in range(2, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", padding_side="left"
    )


def build_config(**extra):
    return Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, **extra,
    )  # fmt: skip


def build_model(config=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or build_config())
    for parameter in model.parameters():  # larger than at initialisation, so that attention matters
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.generation_config.eos_token_id = list(range(*ENDS))
    return model


def save_shape(folder, prompt_tokens, vocabulary=512):
    """The planner's smallest shape with random weights in a folder `policy`, and a reward model of it in `reward`.
    (weights, config, tokenizer, prompts)"""
    from experiments.workload.run_models import save_models
    from rloo_memory import data, models

    documents = data.load_documents()
    tokenizer = models.build_tokenizer(documents, vocabulary)
    config = models.shape_config("tiny-qwen3", vocabulary)
    save_models(folder, config, tokenizer, reward=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    weights = torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])
    return weights, config, tokenizer, data.build_prompts(documents, tokenizer, prompt_tokens)


def reward(completion_ids, **kwargs):
    return [len(set(ids)) / 10 for ids in completion_ids]


def build_trainer(
    trainer_class, folder, model=None, prompts=PROMPTS, reward_funcs=reward, given=None, launched=True, **options
):
    """A trainer of the model in `folder`, if no other, and with what is `given` in place of what it has here. One that
    is `launched` has what the launcher adds, and takes its options."""
    import trl
    from rloo_memory.launch.additions import add_to
    from rloo_memory.settings import trl_parser

    name = "RLOOConfig" if issubclass(trainer_class, trl.RLOOTrainer) else "GRPOConfig"
    defaults = dict(
        per_device_train_batch_size=4, num_generations=4, max_steps=1, max_completion_length=6, learning_rate=1e-2,
        lr_scheduler_type="constant", seed=1, bf16=False, use_cpu=True, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = trainer_class(
        args=getattr(trl_parser if launched else trl, name)(output_dir=str(folder), **{**defaults, **options}),
        **{
            "model": model or str(folder),
            "reward_funcs": reward_funcs,
            "train_dataset": Dataset.from_dict({"prompt": prompts}),
            "processing_class": build_tokenizer(),
            **(given or {}),
        },
    )
    if launched:
        add_to(trainer)
    return trainer

"""A reward model as the trainers call it: whether it gives back keys and values, and whether its rewards are those
that it gives with them. One result a trainer."""

import json
import tempfile

import torch
from datasets import Dataset
from shared_exactness import SHAPE  # builds the fork and puts it on the path
from shared_trainer import TOKENIZER
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

results = {}
for name, make_config, make_trainer in (("rloo", RLOOConfig, RLOOTrainer), ("grpo", GRPOConfig, GRPOTrainer)):
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    reward = AutoModelForSequenceClassification.from_config(Qwen3Config(**SHAPE, num_labels=1)).eval()
    ids = torch.randint(3, SHAPE["vocab_size"], (4, 12))
    ids[1, 5:] = TOKENIZER.pad_token_id
    batch = {"input_ids": ids, "attention_mask": (ids != TOKENIZER.pad_token_id).long()}
    expected = reward(**batch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            model=policy,
            reward_funcs=reward,
            processing_class=TOKENIZER,
            reward_processing_classes=TOKENIZER,
            args=make_config(folder, beta=0.0, use_cpu=True, bf16=False, report_to="none"),
            train_dataset=Dataset.from_dict({"prompt": ["a b"]}),
        )
    with torch.inference_mode():
        scored = trainer.reward_funcs[0](**batch)
    results[name] = {
        "cached before": expected.past_key_values is not None,
        "cached": scored.past_key_values is not None,
        "rewards are equal": torch.equal(scored.logits, expected.logits),
        "rewards differ by row": expected.logits.unique().numel() == 4,
    }
print(json.dumps(results))

"""Makes in FOLDER what upstream's tests take from the Hugging Face Hub, small and random, in folders of those names,
and the parts of tests/testing_utils.py that ours use. Run from FOLDER, `from_pretrained` and `load_dataset` find them.

    upstream_fixtures.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Cohere2Config,
    Gemma3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = dict(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
MODELS = {
    "tiny-Cohere2ForCausalLM": Cohere2Config(**SHAPE, sliding_window=6),
    "tiny-Gemma3ForConditionalGeneration": Gemma3Config(
        text_config=dict(SHAPE, head_dim=4, sliding_window=6),
        vision_config=dict(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        ),  # fmt: skip
        image_token_index=297,
        boi_token_index=298,
        eoi_token_index=299,
        mm_tokens_per_image=4,
    ),  # fmt: skip
    "tiny-Qwen2ForCausalLM-2.5": Qwen2Config(**SHAPE),
    "tiny-Qwen3ForCausalLM": Qwen3Config(**SHAPE, head_dim=8),
    "tiny-Qwen3MoeForCausalLM": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "tiny-Qwen2ForSequenceClassification-2.5": Qwen2Config(**SHAPE, num_labels=1),
}
UTILITIES = """
import pytest
import torch
from transformers.utils import is_peft_available

require_peft = pytest.mark.skipif(not is_peft_available(), reason="needs peft")
require_torch_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


class TrlTestCase:
    @pytest.fixture(autouse=True)
    def set_tmp_dir(self, tmp_path):
        self.tmp_dir = str(tmp_path)
"""
# Configs ask for bfloat16 unless told otherwise, and transformers refuses it without a GPU unless `use_cpu` is set
CONFTEST = """
import transformers.training_args

transformers.training_args.is_torch_bf16_gpu_available = lambda: True
"""


def build_tokenizer():
    """Byte-level BPE, as Qwen has it: transformers makes that class of tokenizer for these models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(["the sky is blue and the sea is green"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", padding_side="left"
    )


folder = Path(sys.argv[1])
hub = folder / "trl-internal-testing"
for name, config in MODELS.items():
    torch.manual_seed(0)
    kinds = {"Sequence": AutoModelForSequenceClassification, "Conditional": AutoModelForImageTextToText}
    kind = next((kind for word, kind in kinds.items() if word in name), AutoModelForCausalLM)
    kind.from_config(config).save_pretrained(hub / name)
    build_tokenizer().save_pretrained(hub / name)
data = hub / "zen" / "standard_prompt_only"
data.mkdir(parents=True)
words = "The sky is blue and the sea is green because of".split()
rows = [{"prompt": " ".join(words[row % 3 : row % 3 + 3 + row % 5])} for row in range(17)]
(data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
(hub / "zen" / "README.md").write_text(
    "---\nconfigs:\n- config_name: standard_prompt_only\n  data_files:\n  - split: train\n"
    "    path: standard_prompt_only/train.jsonl\n---\n"
)
(folder / "tests").mkdir()
(folder / "tests" / "__init__.py").write_text("")
(folder / "tests" / "conftest.py").write_text(CONFTEST)
(folder / "tests" / "testing_utils.py").write_text(UTILITIES)

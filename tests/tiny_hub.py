"""Tiny random models and data in a folder, by the names that tests of TRL take them from the Hugging Face Hub."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen3Config

from rloo_memory.models import build_tokenizer

SHAPE = dict(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, eos_token_id=3,
)  # fmt: skip
MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": Qwen2Config(**SHAPE),
    "tiny-Qwen3ForCausalLM": Qwen3Config(**SHAPE, head_dim=8),
    "tiny-Qwen2ForSequenceClassification-2.5": Qwen2Config(**SHAPE, num_labels=1),
}
# The parts of TRL's tests/testing_utils.py that tests of patches use
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
WORDS = "The sky is blue and the sea is green because of".split()
PROMPTS = "---\nconfigs:\n- config_name: standard_prompt_only\n  data_files: standard_prompt_only/*.jsonl\n---\n"


def make(hub: Path) -> None:
    """Run from there, `from_pretrained` and `load_dataset` find them."""
    tokenizer = build_tokenizer(["the sky is blue and the sea is green"] * 4, 290)
    with torch.random.fork_rng():
        for name, config in MODELS.items():
            torch.manual_seed(0)
            kind = AutoModelForSequenceClassification if "Sequence" in name else AutoModelForCausalLM
            kind.from_config(config).save_pretrained(hub / name)
            tokenizer.save_pretrained(hub / name)
    data = hub / "zen" / "standard_prompt_only"
    data.mkdir(parents=True)
    rows = [{"prompt": " ".join(WORDS[row % 3 : row % 3 + 3 + row % 5])} for row in range(17)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (hub / "zen" / "README.md").write_text(PROMPTS)


def make_for_upstream(folder: Path) -> None:
    """The hub, and what tests of patches find in TRL's folder of tests."""
    make(folder / "trl-internal-testing")
    (folder / "tests").mkdir()
    files = {"__init__.py": "", "conftest.py": CONFTEST, "testing_utils.py": UTILITIES}
    for name, text in files.items():
        (folder / "tests" / name).write_text(text)

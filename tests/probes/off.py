"""Four updates of a trainer without any of the fork's options. Prints what was logged and a digest of the parameters.

Arguments: the trainer, and the patches to apply ("none", "all" or file names)."""

import hashlib
import json
import logging
import sys
import tempfile

from experiments import config as cfg
from experiments.builds import use_fork

name, patches = sys.argv[1], sys.argv[2]
use_fork(cfg.Arm("shared", "current", {"none": (), "all": None}.get(patches, tuple(patches.split(","))), shows=""))

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: E402

import trl  # noqa: E402, I001
from experiments.workload import models  # noqa: E402

logging.disable(logging.WARNING)
WORDS = "apple stone river cloud seven tiger green paper light money".split()
tokenizer = models.build_tokenizer([" ".join(WORDS)] * 4, 300)
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=3,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    trainer = getattr(trl, f"{name}Trainer")(
        model=folder,
        reward_funcs=lambda completions, **kwargs: [len(set(text)) / 10 for text in completions],
        args=getattr(trl, f"{name}Config")(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_generations=4,
            num_iterations=2,
            max_steps=4,
            max_completion_length=6,
            learning_rate=1e-2,
            beta=0.05,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            gradient_accumulation_steps=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [" ".join(WORDS[:n]) for n in (3, 5, 8)]}),
        processing_class=tokenizer,
    )
    trainer.train()
logs = [
    {name: value for name, value in log.items() if "time" not in name and "per_second" not in name}
    for log in trainer.state.log_history
]
digest = hashlib.sha256()
for parameter in trainer.model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(json.dumps({"version": trl.__file__, "logs": logs, "parameters": digest.hexdigest()}))

"""The memory callback on a trainer without rewards and reference: prints the record that it writes."""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset

from rloo_memory.hooks.memory_callback import MemoryCallback
from trl import SFTConfig, SFTTrainer

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, max_steps=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = SFTTrainer(sys.argv[1], args=arguments, train_dataset=Dataset.from_dict({"text": ["a b c d e"] * 16}))
    trainer.add_callback(MemoryCallback(trainer))
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    print(json.dumps(json.loads(Path(folder, "memory.json").read_text())))

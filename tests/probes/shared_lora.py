"""Four updates of RLOO with LoRA in float32 with SGD, sharing on and off, same seed. Prints the largest relative
difference of what is logged, that of the trained parameters, and how far they moved."""

import json
import logging
import tempfile

import tiny
import torch
from peft import LoraConfig
from shared_exactness import error  # builds the fork and puts it on the path

LOGGED = ("grad_norm", "kl", "entropy", "reward")


def train(shared):
    with tempfile.TemporaryDirectory() as folder:
        tiny.build_model().save_pretrained(folder)
        torch.manual_seed(0)
        # One micro-batch an update: sharing shuffles by prompt, and the rows of two would be others
        trainer = tiny.build_trainer(
            "RLOO", folder, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
            per_device_train_batch_size=16, max_completion_length=12, prefix_sharing=shared, max_grad_norm=0.0,
            tokens_per_forward=2 * 13 if shared else None, optim="sgd", learning_rate=1.0,
        )  # fmt: skip
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        before = torch.cat([p.detach().flatten().double() for p in trained])
        trainer.train()
        after = torch.cat([p.detach().flatten().double() for p in trained])
    return before, after, [log for log in trainer.state.log_history if "grad_norm" in log]


logging.disable(logging.WARNING)
before, stock, stock_logs = train(False)
_, shared, logs = train(True)
assert len(logs) == len(stock_logs) == 4
pairs = [(log[name], stock_log[name]) for log, stock_log in zip(logs, stock_logs, strict=True) for name in LOGGED]
result = {
    "logs": max(abs(got - expected) / max(abs(expected), 1e-2) for got, expected in pairs),
    "parameters": error(shared, stock),
    "moved": error(before, stock),
}
print(json.dumps(result))

"""Trainings with Liger's layers, its Triton kernels interpreted: TRL's own and shared. JSON."""

import json
import os
import tempfile

os.environ["TRITON_INTERPRET"] = "1"

import liger_kernel.ops.rms_norm
import numpy as np
import tiny
import torch
import triton.language as tl
from triton.runtime import interpreter

import trl
from rloo_memory import share_prompts

implicit = interpreter._implicit_cvt


def as_tensor(arg):
    """Numbers with a fraction are tensors in a kernel, as Triton's compiler has them."""
    if isinstance(arg, float):
        return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
    return implicit(arg)


def rsqrt(x):
    """The one of libdevice has nothing to interpret."""
    return tl.tensor(interpreter.TensorHandle(1 / np.sqrt(x.handle.data), x.dtype), x.dtype)


interpreter._implicit_cvt, liger_kernel.ops.rms_norm.rsqrt = as_tensor, rsqrt


def trained(folder, trainer_class, rows, share=False):
    """How far two updates moved the weights, and which of its layers are Liger's."""
    trainer = tiny.build_trainer(
        trainer_class, folder, per_device_train_batch_size=rows, gradient_accumulation_steps=4 // rows,
        steps_per_generation=4 // rows, max_steps=2, learning_rate=0.05, optim="sgd", max_grad_norm=0.0, beta=0.05,
        use_liger_kernel=True,
    )  # fmt: skip
    before = [param.detach().clone() for param in trainer.model.parameters()]
    if share:
        share_prompts(trainer)
    torch.manual_seed(0)
    trainer.train()
    layers = {module.forward.__module__ for module in trainer.model.modules()}
    moved = [(x - y).flatten() for x, y in zip(trainer.model.parameters(), before, strict=True)]
    return torch.cat(moved).detach(), sorted(name for name in layers if "liger" in name)


result = {}
with tempfile.TemporaryDirectory() as folder:
    tiny.build_model().save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    for trainer_class in (trl.RLOOTrainer, trl.GRPOTrainer):
        for rows in (4, 2):
            stock, _ = trained(folder, trainer_class, rows)
            shared, layers = trained(folder, trainer_class, rows, share=True)
            apart = ((shared - stock).norm() / stock.norm()).item()
            result[f"{trainer_class.__name__}, {rows} rows"] = {"apart": apart, "layers": layers}
print(json.dumps(result))

"""What a training with activation offloading leaves on the device, beside one without. Prints JSON, MiB."""

import gc
import importlib.util
import json
import tempfile

import device
import torch
from datasets import Dataset
from transformers import set_seed

from rloo_memory import share_prompts
from rloo_memory.launch.offload import offload_activations
from trl import RLOOConfig, RLOOTrainer


def trained(example, offloading: bool = False) -> float:
    """MiB in use when a short training of the example's model has ended; model and trainer are gone then."""
    set_seed(0)
    model, tokenizer = example.small_model()
    rows = Dataset.from_list([{"prompt": f"{example.CONTEXT}{x}:", "answer": x} for x in "abcd"])
    groups = dict(num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        config = RLOOConfig(folder, max_steps=2, bf16=True, **groups, **example.SETTINGS)
        trainer = RLOOTrainer(model, example.reward, config, train_dataset=rows, processing_class=tokenizer)
        share_prompts(trainer)
        if offloading:
            offload_activations(trainer)
        trainer.train()
    return torch.cuda.memory_allocated() / 2**20


spec = importlib.util.spec_from_file_location("example", device.ROOT / "examples" / "train_with_prefix_sharing.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
trained(example)  # what stays for good: cuBLAS's workspaces, others'
gc.collect()
stays = torch.cuda.memory_allocated() / 2**20
plain = trained(example) - stays
gc.collect()
offloaded = trained(example, offloading=True) - stays
gc.collect()
left = torch.cuda.memory_allocated() / 2**20 - stays
found = {"without_offloading": plain, "mib_at_the_end_of_training": offloaded}
print(json.dumps({**found, "mib_after_the_trainer_is_gone": left}))

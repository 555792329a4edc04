"""Bytes of the prompts' keys and values that are alive while shared prompts generate, after each decoding step.

Prints for each step "alive", all keys and values that are reachable, and "cache", what the cache holds: the prompt and
room for what is generated."""

import gc
import json

import tiny
import torch
from shared_exactness import SHAPE  # noqa: F401  builds the fork and puts it on the path
from transformers import GenerationConfig
from trl.generation.shared_prefix import generate_with_shared_prefix
from trl.models.prefix_sharing import enable_prefix_sharing

PROMPT, HEAD = 50, 8


def keys_and_values():
    """Bytes of the storages of all tensors that can hold a prompt's keys or values."""
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dim() >= 3 and x.shape[-1] == HEAD]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.shape[-2] >= PROMPT - 1
    }
    return sum(storages.values())


model = tiny.build_model().eval()
enable_prefix_sharing(model)
torch.manual_seed(0)
prompts = torch.randint(50, 100, (2, PROMPT)).repeat_interleave(3, dim=0)
steps = []


def count(module, args, kwargs, output):
    if kwargs.get("past_key_values") is not None:  # a decoding step, not a prompt
        gc.collect()
        layers = kwargs["past_key_values"].layers
        states = [x for layer in layers for pair in (*layer.prefixes, layer.own) for x in pair]
        cache = sum(x.untyped_storage().nbytes() for x in states)
        steps.append({"alive": keys_and_values(), "cache": cache})


model.register_forward_hook(count, with_kwargs=True)
config = GenerationConfig(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0, disable_compile=True)
with torch.no_grad():
    generate_with_shared_prefix(model, prompts, torch.ones_like(prompts), config)
print(json.dumps(steps))

"""Seconds, memory and images encoded of a policy forward and backward on prompts with images, stock against shared.

    images_cost.py [REPEATS]

Qwen2.5-VL's architecture, narrow, in float32: a prompt of 1,024 image tokens (4,096 patches) and 200 of text, eight
completions of 64, layer checkpointing on. Each measurement has a process of its own; stock and shared alternate.
"""

import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from shared_exactness import passes_of  # builds the fork, puts it on the path
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from trl.models.prefix_sharing import enable_prefix_sharing
from trl.trainer import utils

IMAGE_TOKENS, TEXT, COMPLETION, ROWS = 1024, 200, 64, 8
SETTINGS = {"stock": None, "together": {}, "passes of 2": dict(completions_per_forward=2)}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(name):
    torch.manual_seed(0)
    text = dict(
        vocab_size=32_000, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[8, 12, 12]),
    )  # fmt: skip
    vision = dict(depth=8, hidden_size=256, intermediate_size=768, out_hidden_size=256, num_heads=4)
    special = dict(image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    ).train()
    utils.add_fused_lm_head(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    encoded = []
    model.base_model.visual.register_forward_pre_hook(lambda module, args: encoded.append(len(args[0])))
    prompt = IMAGE_TOKENS + TEXT
    ids = torch.randint(10, 32_000, (ROWS, prompt + COMPLETION))
    ids[:, :prompt] = ids[0, :prompt]
    ids[:, 20 : 20 + IMAGE_TOKENS] = 3
    side = 2 * int(IMAGE_TOKENS**0.5)
    inputs = dict(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == 3).long(),
        pixel_values=torch.randn(side * side, 3 * 2 * 14 * 14).repeat(ROWS, 1),
        image_grid_thw=torch.tensor([[1, side, side]] * ROWS),
    )
    labels = ids.clone()
    labels[:, :prompt] = -100
    shared = {}
    if SETTINGS[name] is not None:
        enable_prefix_sharing(model)
        shared["passes"] = passes_of(prompt, group_size=ROWS, num_images=[1] * ROWS, **SETTINGS[name])
    encoded.clear()
    before, start = peak(), time.perf_counter()
    out = model(**inputs, labels=labels, fused_lm_head=True, **shared)
    out.log_probs[:, -COMPLETION:].mean().backward()
    seconds = time.perf_counter() - start
    gradient = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item()
    return dict(seconds=seconds, gib=peak() - before, images=sum(encoded) / side**2, gradient=gradient)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1 and sys.argv[1] in SETTINGS:
        print(json.dumps(measure(sys.argv[1])))
        sys.exit()
    results = {name: [] for name in SETTINGS}
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        for name, runs in results.items():
            run = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
            runs.append(json.loads(run.stdout.splitlines()[-1]))
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    print(json.dumps(medians))

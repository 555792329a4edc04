"""A profile of a training that takes seconds on a CPU."""

import json

USUAL = dict(
    dtype="float32", bf16=False, beta=0.0, gradient_accumulation_steps=1, optim="adamw_torch", save_strategy="no",
    report_to="none", disable_tqdm=True,
)  # fmt: skip


def small_profile(k: int, completion: int, **more) -> str:
    """Its text, a setting a line: all k completions of a prompt together, each of `completion` tokens at most."""
    lengths = dict(num_generations=k, per_device_train_batch_size=k, max_completion_length=completion)
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in {**USUAL, **lengths, **more}.items())

"""The tensors of transformers' `_sample`, of one token of each row."""

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def sample(logits: torch.Tensor, setup) -> None:
    """Choose from the last of `logits`, in float32. What is there of the token before stays until there is another:
    its probabilities, and its scores where these are no logits."""
    warpers: list = [TemperatureLogitsWarper(float(setup.temperature))] if setup.temperature != 1 else []
    warpers += [TopKLogitsWarper(setup.top_k)] if setup.top_k else []
    warpers += [TopPLogitsWarper(setup.top_p)] if setup.top_p < 1 else []
    warpers += [MinPLogitsWarper(setup.min_p)] if setup.min_p is not None else []
    scores = last = logits[:, -1, :].to(torch.float32, copy=True)
    before = [torch.empty_like(last) for _ in range(2 if warpers else 1)]
    for warper in warpers:
        scores = warper(None, scores)
    del before[1:]
    torch.nn.functional.softmax(scores, dim=-1)

"""Generation in a simulation: caches, brought from what the prompts left to what they hold before the last token, and
the tensors of transformers' `_sample`."""

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import Cache, DynamicLayer


def grow(cache: Cache, steps: int, event) -> None:
    """transformers' own, by so many tokens. `event` is told ("grow", layer) before each."""
    for i, layer in enumerate(cache.layers):
        event("grow", i)
        # Not where it keeps a state, whatever the length, or attends to the keys of an earlier layer
        if not isinstance(layer, DynamicLayer) or layer.keys is None:
            continue
        kept = layer.sliding_window - 1 if layer.is_sliding else float("inf")
        layer.keys, layer.values = (
            x.new_empty(*x.shape[:2], min(x.shape[2] + steps, kept), x.shape[3]) for x in (layer.keys, layer.values)
        )
        if layer.is_sliding:
            layer.cumulative_length += steps


def attending(cache: Cache) -> list[tuple[int, object]]:
    """Index and layer of `prefix_sharing`'s cache for those that attend: others keep a state alone."""
    return [(i, layer) for i, layer in enumerate(cache.layers) if hasattr(layer, "make_room")]


def grow_shared(cache: Cache, prefix: int, steps: int, window_of, event) -> None:
    """That of `prefix_sharing`, behind prefixes of `prefix` columns, to `steps` tokens less the one that comes.
    `window_of` says how many tokens a layer sees, None for all."""
    for i, layer in attending(cache):
        window = window_of(i)
        while layer.num_steps < steps - 1:
            if window is not None and prefix + layer.num_steps + 1 > window:
                layer.window = window
            if layer.num_kept == layer.own[0].shape[2]:
                event("grow", i)
                layer.make_room()
            filled = min(layer.own[0].shape[2] - layer.num_kept, steps - 1 - layer.num_steps)
            layer.num_steps += filled
            layer.num_kept += filled


def sample(logits: torch.Tensor, setup) -> None:
    """Choose a token of each row from the last of `logits`, in float32. What is there of the token before stays until
    there is another: its probabilities, and its scores where these are no logits."""
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

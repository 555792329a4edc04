"""A decoded token of stock and of shared prompts: operations a layer, bytes of keys and values that attention reads,
bytes that are copied to make room. Prompts of equal and of different lengths."""

import json

from dispatched import PROMPT, ROWS, last_step, operations_of_a_layer

LENGTHS = {"one": (PROMPT,), "four": (PROMPT,) * 4, "four of other lengths": (20, 17, 12, 5)}
LAYERS, BYTES_OF_A_TOKEN = 2, 2 * 2 * 8 * 4  # keys and values, key heads, head size, float32
results = {}
for name, lengths in LENGTHS.items():
    for shared in (False, True):
        steps = 40
        token = last_step(LAYERS, lengths, steps, shared)
        own = ROWS * steps  # the last prompt token is a row's own, the last generated one is never read
        whole = len(lengths) * ROWS * (PROMPT - 1) + len(lengths) * own
        once = sum(length - 1 for length in lengths) + len(lengths) * own
        results.setdefault(name, {})["shared" if shared else "stock"] = {
            "operations": operations_of_a_layer(lengths, shared),
            "read": token.read,
            "concatenated": token.concatenated,
            "expected": LAYERS * BYTES_OF_A_TOKEN * (once if shared else whole),
        }
print(json.dumps(results))

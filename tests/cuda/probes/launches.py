"""Kernel launches and waits of an update's passes, forward and backward, by way to divide eight completions.

Prints JSON: {way: {"launches_a_layer", "launches_outside_layers", "waits", "pageable"}}, the last one where sharing
copies from pageable memory and means not to wait. A layer's launches are the difference of models of two depths.
Micro-batches are of two completions; the LM head's kernels are compiled and do not run.
"""

import json

import emulate
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from experiments.fused_head import add_fused_lm_head
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.tree import Prompts, Tree

PROMPT, COMPLETION, K, ROWS = 200, 20, 8, 2  # tokens, tokens, completions, completions a micro-batch
DEPTHS = (2, 4)
SHAPE = dict(
    vocab_size=1000, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)


def model_of(layers: int):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=layers, **SHAPE), dtype=torch.bfloat16)
    add_fused_lm_head(model)
    return model.train().cuda()


def batch():
    ids = torch.randint(3, 900, (K, PROMPT + COMPLETION))
    ids[:, :PROMPT] = ids[0, :PROMPT]
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": ids.cuda(), "attention_mask": torch.ones_like(ids).cuda(), "labels": labels.cuda()}


def update(model, inputs, rows: int, sharing: bool) -> None:
    """Forward and backward of all completions, `rows` a micro-batch."""
    prompt_ids, mask = (inputs[name][:, :PROMPT].cpu() for name in ("input_ids", "attention_mask"))
    tree = Tree.of(Prompts.of(prompt_ids, mask), rows_per_backward=rows)
    for first in range(0, K, rows):
        passes = SharedPrefixPasses(PROMPT, tree=tree, rows=range(first, first + rows))
        settings = {"passes": passes} if sharing else {}
        part = {name: x[first : first + rows] for name, x in inputs.items()}
        model(**part, fused_lm_head=True, **settings).log_probs.sum().backward()
        tree.leave(first + rows)


def counted(layers: int) -> dict[str, tuple[int, int, list[str]]]:
    """{way: (launches, waits, copies from pageable memory that are meant not to wait)} of an update."""
    model, inputs, found = model_of(layers), batch(), {}
    for sharing in (False, True):
        if sharing:
            enable_prefix_sharing(model)
        for rows in (K, ROWS):
            for checkpointing in (False, True):
                (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
                for _ in range(2):  # the first one also makes what stays
                    model.zero_grad()
                    emulate.reset()
                    emulate.current.clear()
                    update(model, inputs, rows, sharing)
                way = ["whole rows", "shared"][sharing] + [", together", ", two a micro-batch"][rows < K]
                way += ", checkpointed" if checkpointing else ""
                waits, counts = emulate.current.waits, emulate.counts()
                pageable = sorted(place for kind, place in waits if kind == "from pageable memory, async")
                found[way] = (counts["launches"] + counts["blas"], sum(waits.values()), pageable)
    return found


few, many = map(counted, DEPTHS)
rows = {}
for way, (launches, waits, pageable) in many.items():
    layer = (launches - few[way][0]) / (DEPTHS[1] - DEPTHS[0])
    outside = launches - layer * DEPTHS[1]
    assert waits == few[way][1], f"{way}: waits in layers"
    rows[way] = {
        "launches_a_layer": layer,
        "launches_outside_layers": outside,
        "waits": waits,
        "pageable": pageable,
    }
print(json.dumps(rows))

"""What is alive on the device and on the host when all passes of shared prompts went through a model, before the
backward.

Prints for each way, number of layers and number of completions the bytes on both:

* "again": each pass but the last is computed again, nothing is offloaded,
* "kept": what passes keep that are not computed again, with nothing offloaded,
* "TRL" and "TRL, streams": the same, offloaded by TRL's own code, for which the CPU stands in as the device,
* "planner": the same by the planner's rules.
"""

import contextlib
import json
from unittest import mock

import tiny
import torch
from cpu_offloading import get_act_offloading_ctx_manager

from experiments.fused_head import add_fused_lm_head
from rloo_memory.plan.simulation.live_bytes import LiveBytes
from rloo_memory.plan.simulation.offloaded import offloaded
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

PROMPT, COMPLETION = 40, 30


def offloading(way: str, model, memory: LiveBytes):
    if way == "planner":
        return offloaded(model, memory)
    if not way.startswith("TRL"):
        return contextlib.nullcontext()
    manager = get_act_offloading_ctx_manager(model, use_streams="streams" in way)
    pack = manager.pack_hook

    def counted(tensor):
        with memory.of_kind("host"):
            return pack(tensor)

    manager.pack_hook = counted
    return manager


def alive(way: str, layers: int, k: int) -> list[int]:
    with mock.patch.object(tiny, "build_config", lambda build=tiny.build_config: shaped(build(), layers)):
        model = tiny.build_model().train()
    add_fused_lm_head(model)
    enable_prefix_sharing(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(0)
    prompts = torch.randint(3, tiny.VOCABULARY, (1, PROMPT)).repeat(k, 1)
    ids = torch.cat([prompts, torch.randint(3, tiny.VOCABULARY, (k, COMPLETION))], dim=1)
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    passes = SharedPrefixPasses(PROMPT, tokens_per_forward=2 * (COMPLETION + 1), activation_offloading=way != "again")
    memory = LiveBytes()
    memory.watch(model)
    before = memory.total
    with memory, offloading(way, model, memory):
        outputs = model(**inputs, passes=passes)
        assert outputs.log_probs.requires_grad
        return [memory.total - before, memory.live["host"]]


def shaped(config, layers: int):
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    return config


WAYS = ("again", "kept", "TRL", "TRL, streams", "planner")
print(
    json.dumps(
        {
            "bytes of a token": tiny.build_config().hidden_size * 4,
            "tokens of a completion": COMPLETION + 1,  # the prompt's last
            "alive": {way: {layers: {k: alive(way, layers, k) for k in (4, 12)} for layers in (3, 6)} for way in WAYS},
        }
    )
)

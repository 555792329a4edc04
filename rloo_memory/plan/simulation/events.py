"""Events of a simulation: where one stretch of a phase ends and the next begins, see `Simulation.event`."""

import functools
import inspect

import torch

from rloo_memory.plan.simulation.building import decoder_layers
from rloo_memory.prefix_sharing.routing import RecordPrefix

REFERENCE = "reference's "  # events of its layers, or, with LoRA, of the policy's without the adapters
TOWER = ("tower", "tower's backward")  # those within which the tower for images computes


def mark(simulation) -> None:
    """Events of each layer, which keep apart what goes through it: a shared prompt or anything else, in a forward or
    computed again in a backward. And of the tower, if there are images."""
    event = simulation.event

    def again() -> str:
        return " again" if torch._C._current_graph_task_id() != -1 else ""

    def before_forward(i, module, args, kwargs):
        event(f"{simulation.scores}{whose(kwargs)}forward{again()}", i)

    def after_forward(i, last, module, args, kwargs, output):
        states = output[0] if isinstance(output, tuple) else output
        if last and whose(kwargs):  # of a prompt, only keys and values have gradients
            states = kwargs["shared_prefix"].prefix.slots.get((i, "key"), states)
        if states.requires_grad:
            name = f"{whose(kwargs)}backward"  # the hook must not keep the arguments alive
            states.register_hook(lambda grad: event(name, i))
        if last:
            event(f"{simulation.scores}{whose(kwargs)}behind{again()}")

    for model in filter(None, (simulation.model, simulation.reference)):
        if simulation.images:
            mark_tower(simulation, model.get_encoder(modality="image"))
        layers = decoder_layers(model)
        for i, layer in enumerate(layers):
            last = i == len(layers) - 1
            layer.register_forward_pre_hook(functools.partial(before_forward, i), with_kwargs=True)
            layer.register_forward_hook(functools.partial(after_forward, i, last), with_kwargs=True)
    simulation.model.get_output_embeddings().register_forward_pre_hook(lambda module, args: event("logits"))


def mark_tower(simulation, tower) -> None:
    """Its forward, what is behind it, and its backward. Its many allocations are not kept apart, as they do not depend
    on the number of layers and passes."""

    def before(module, args, kwargs):
        simulation.event(simulation.scores + TOWER[0])

    def behind(module, args, output):
        simulation.event(f"{simulation.scores}behind tower")
        for states in (output.pooler_output, output.last_hidden_state):
            if states is not None and states.requires_grad:
                states.register_hook(lambda grad: simulation.event(TOWER[1]))
                return

    tower.register_forward_pre_hook(before, with_kwargs=True)
    tower.register_forward_hook(behind)
    for module in tower.modules():
        if "cu_seqlens" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(in_one_call, with_kwargs=True)


def in_one_call(module, args, kwargs):
    """Attention of all windows at once: hundreds of small calls allocate as many bytes, and took most of the time."""
    bounds = kwargs["cu_seqlens"]
    return args, kwargs | {"cu_seqlens": bounds[[0, -1]]}


def whose(kwargs: dict) -> str:
    """What a layer's keyword arguments say about what goes through it."""
    return "prompt's " if isinstance(kwargs.get("shared_prefix"), RecordPrefix) else ""

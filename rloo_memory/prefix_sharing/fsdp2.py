"""What FSDP2 needs to be told where a prompt goes through a model for its keys and values alone."""

import types
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


def is_sharded(backbone: nn.Module) -> bool:
    """Whether processes gather weights together, in each pass: with FSDP2, and with DeepSpeed's ZeRO-3."""
    return is_deepspeed_zero3_enabled() or any(isinstance(module, FSDPModule) for module in backbone.modules())


def unshard_in_backward(backbone: nn.Module, slots: dict[tuple, torch.Tensor]) -> None:
    """
    Have FSDP2 gather the weights of the last layer for the backward of a prompt pass. FSDP2 gathers those of a layer
    when the gradient of its output arrives, and the output of the last layer is not used, only what it left in
    `slots`.
    """
    units = [unit for unit in backbone.modules() if isinstance(unit, FSDPModule)]
    if not units:
        return
    last_idx = max(layer_idx for layer_idx, *_ in slots if layer_idx is not None)
    last = [unit for unit in units if any(getattr(m, "layer_idx", None) == last_idx for m in unit.modules())]

    def reshard():
        for unit in units:
            unit.reshard()

    def unshard(grad):
        for unit in last:
            unit.unshard()
        # Gradient checkpointing runs all of the last layer again. What has no part in the keys and values has no
        # backward, after which FSDP2 would put the shards back: it would be trained no more.
        torch.autograd.Variable._execution_engine.queue_callback(reshard)

    for (layer_idx, *_), states in slots.items():
        if layer_idx == last_idx and states.requires_grad:
            states.register_hook(unshard)


def base_model_forward(model: PreTrainedModel) -> Callable:
    """Forward of the base model of a PEFT model, with the weights that FSDP2 keeps at the PEFT model gathered."""
    if not isinstance(model, FSDPModule):
        return model.get_base_model()
    # FSDP2 gathers weights in methods that it knows
    model._base_model_forward = types.MethodType(lambda self, **kwargs: self.get_base_model()(**kwargs), model)
    register_fsdp_forward_method(model, "_base_model_forward")
    return model._base_model_forward

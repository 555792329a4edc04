"""The LM head of a model, behind hidden states that its backbone has computed already."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rloo_memory.calls import replaced

from .hooks import is_here, without_own_hooks

# One thread at a time replaces a forward: another would put back what it has found there
_lock = RLock()


class _Output(BaseModelOutputWithPast):
    """Hidden states, of shape `(B, T, H)`. What a model reads beside them, of images or sound, is None."""

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return None


@contextmanager
def backbone_gives(model: nn.Module, states: torch.Tensor) -> Iterator[None]:
    """Have the backbone of a causal language model give these states, whatever this thread calls it with."""
    backbone, thread = model.base_model, get_ident()
    with _lock:
        own = backbone.forward

        def forward(*args, **kwargs):
            if is_here(thread):
                return _Output(last_hidden_state=states)
            return own(*args, **kwargs)

        with replaced(backbone, "forward", forward), without_own_hooks(backbone, thread):
            yield


def causal_lm_of(model: PreTrainedModel) -> PreTrainedModel:
    """The causal language model, of a PEFT model the one inside."""
    if is_peft_model(model):
        return model.get_base_model()
    return model.base_model.model if type(model).__name__ == "PeftMixedModel" else model  # which has no such method


def logits_of(model: nn.Module, states: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    Logits as the model's own forward makes them of hidden states, with what it has of caps, scales and multipliers.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model.
        states (`torch.Tensor` of shape `(..., H)`):
            Last hidden states.
        ids (`torch.Tensor` of shape `(...)`, *optional*):
            Ids of the tokens that have these states, for a forward of one's own that makes logits of them, too.

    Returns:
        `torch.Tensor` of shape `(..., V)`: Logits.
    """
    flat = states.reshape(1, -1, states.shape[-1])
    no_ids = torch.zeros(flat.shape[:2], dtype=torch.long, device=flat.device)
    with backbone_gives(causal_lm_of(model), flat):
        logits = model(input_ids=no_ids if ids is None else ids.reshape(1, -1), use_cache=False).logits
    return logits.reshape(*states.shape[:-1], logits.shape[-1])  # also of no states

"""LM heads: how TRL's versions get log-probabilities from hidden states, with what each keeps for the backward.

Each takes hidden states of shape (rows, completion + 1, hidden), the head, the ids of the completions of shape
(rows, completion), the temperature, and whether accelerate brings what a model gives to float32 (mixed precision).
"""

import torch

from rloo_memory.plan.simulation.replaced import head_log_probs


def fused(hidden, head, ids, temperature, widens):
    """TRL 1.15 and newer: tiles of logits, none kept (`trl.kernels.ChunkedLogProbFunction`)."""
    return head_log_probs(hidden[:, :-1].reshape(-1, hidden.shape[-1]), head, ids.reshape(-1), temperature)


def logits_of(hidden, head, widens):
    given = head(hidden)
    return (given.float() if widens else given)[:, :-1]


def full_logits(hidden, head, ids, temperature, widens):
    """TRL 0.26 and 1.10 to 1.13: logits of the completions and, divided by the temperature, once more."""
    logits = logits_of(hidden, head, widens)  # TRL keeps them to the end
    return selected(logits / temperature, ids)


def full_logits_in_place(hidden, head, ids, temperature, widens):
    """TRL 1.0 to 1.9: divided in place, in a view, so the backward copies the gradient of all of them."""
    logits = logits_of(hidden, head, widens)
    logits.div_(temperature)
    return selected(logits, ids)


def full_logits_in_a_kernel(hidden, head, ids, temperature, widens):
    """TRL 1.14: a Triton kernel keeps the logits, and makes their gradient beside them."""
    return OneKernel.apply(logits_of(hidden, head, widens))


class OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.new_empty(logits.shape[:-1], dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(ctx.saved_tensors[0], memory_format=torch.contiguous_format)


def selected(logits, ids):
    """Log-probabilities of `ids` by TRL's own function, and the entropies that it logs."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    log_probs = selective_log_softmax(logits, ids)
    with torch.no_grad():
        entropy_from_logits(logits)
    return log_probs


# By the name in `Setup.lm_head`
HEADS = {head.__name__: head for head in (fused, full_logits, full_logits_in_place, full_logits_in_a_kernel)}

"""A model in float64 throughout: norms, softmax, masks and TRL's LM head compute in float32 whatever the model is."""

from contextlib import ExitStack, contextmanager

import torch

from rloo_memory.calls import replaced


class PlainLogProb:
    """The LM head's outputs in the dtype of its inputs: TRL sums in float32, too coarse to compare in float64."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs):
        logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_probs = (logits / temperature).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, targets[:, None])[:, 0], entropy, None, None, None


@contextmanager
def pure_float64():
    """In here, what asks torch for float32 gets float64."""
    from trl.trainer import utils

    names = [
        (torch, "float32", torch.float64),
        (torch, "float", torch.float64),
        (torch.Tensor, "float", torch.Tensor.double),
        (utils, "_ChunkedLogProbFunction", PlainLogProb),
    ]
    with ExitStack() as until_then:
        for name in names:
            until_then.enter_context(replaced(*name))
        yield

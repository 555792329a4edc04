"""LM heads: how TRL's versions get log-probabilities from hidden states, with what each keeps for the backward.

Each takes hidden states of shape (rows, positions + 1, hidden), the head, the ids of what is scored, of shape (rows,
positions), and the setup. They are models of TRL's own, which a version alone has: tests hold them against TRL's.
"""

import torch

from rloo_memory.sharing import CPU_TILE

TOKENS, WORDS = 4096, 32768  # of a tile of TRL's fused head


def fused(hidden, head, ids, setup):
    """TRL 1.15 and newer: tiles of logits, none kept. On a CPU, `share_prompts` makes them smaller."""
    in_torch = setup.device == "cpu"
    words = CPU_TILE if in_torch and setup.uses_passes else WORDS
    hidden = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    return FusedHead.apply(hidden, head.weight, head.bias, ids.reshape(-1), words, in_torch)


class FusedHead(torch.autograd.Function):
    """What `trl.kernels.ChunkedLogProbFunction` allocates, for hidden states of shape (N, H) and N ids. `in_torch`:
    without Triton, whose kernels work in the buffers that they are given."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, words, in_torch):
        ctx.words, ctx.in_torch = words, in_torch
        autocast = torch.is_autocast_enabled("cpu")
        ctx.dtype = dtype = torch.get_autocast_dtype("cpu") if autocast else hidden.dtype
        sums = [torch.empty(len(hidden)) for _ in range(7)]
        buffer = torch.empty(min(len(hidden), TOKENS), words, dtype=dtype)
        for rows in hidden.split(TOKENS):
            some = rows.to(dtype)
            for start in range(0, len(weight), words):
                of_words = slice(start, start + words)
                tile = buffer[: len(some), : len(weight[of_words])]
                torch.mm(some, weight[of_words].to(dtype).t(), out=tile)
                if bias is not None:
                    tile.add_(bias[of_words].to(dtype))
                if in_torch:
                    fold(tile)
        log_sum = sums[0] + torch.log(sums[1])
        log_probs, entropy = sums[2] - log_sum, log_sum - sums[3] / sums[1]
        ctx.save_for_backward(hidden, weight, bias, ids, log_sum, entropy)
        return log_probs

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias = ctx.saved_tensors[:3]
        dtype, words = ctx.dtype, ctx.words
        sums = [
            torch.empty(x.shape) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        of_hidden, of_weight, of_bias = sums
        buffer = torch.empty(min(len(hidden), TOKENS), words, dtype=dtype)
        grad = grad.contiguous()
        for begin in range(0, len(hidden), TOKENS):
            some = hidden[begin : begin + TOKENS].to(dtype)
            for start in range(0, len(weight), words):
                of_words = slice(start, start + words)
                others = weight[of_words].to(dtype)
                tile = buffer[: len(some), : len(others)]
                torch.mm(some, others.t(), out=tile)
                if bias is not None:
                    tile.add_(bias[of_words].to(dtype))
                if ctx.in_torch:
                    turn_into_gradient(tile)
                if of_hidden is not None:
                    add_product(of_hidden[begin : begin + TOKENS], tile, others)
                if of_weight is not None:
                    add_product(of_weight[of_words], tile.t(), some)
                if of_bias is not None:
                    of_bias[of_words] += tile.sum(dim=0, dtype=torch.float32)
        given = zip(sums, (hidden, weight, bias), strict=True)
        return *(None if x is None else x.to(like.dtype) for x, like in given), None, None, None


def add_product(total, a, b) -> None:
    """Of a CPU: on CUDA a matrix product into what it is given takes its place."""
    total.addmm_(a.float(), b.float())


def fold(tile) -> None:
    """What the sums over a tile of logits take in torch."""
    logits = tile.float() * 1.0 * 1.0  # scale, temperature
    exps = torch.exp(logits - logits.amax(-1, keepdim=True))
    (exps * logits).sum(-1)


def turn_into_gradient(tile) -> None:
    """The same of the backward."""
    scaled = tile.float() * 1.0
    logits = scaled * 1.0
    log_probs = logits - logits[:, :1]
    probs = torch.exp(log_probs)
    grad = torch.empty_like(logits)
    is_target = logits == logits[:, :1]
    grad += grad[:, :1] * (is_target.float() - probs)
    grad = grad * 1.0
    tile.copy_(grad * 1.0)
    del scaled, log_probs  # which TRL keeps until here


def logits_of(hidden, head, setup):
    """Logits but the last, in mixed precision in float32, to which accelerate brings what a model gives."""
    given = head(hidden)
    return (given.float() if setup.autocast else given)[:, :-1]


def full_logits(hidden, head, ids, setup):
    """TRL 0.26 and 1.10 to 1.13: logits of the completions and, divided by the temperature, once more."""
    logits = logits_of(hidden, head, setup)  # TRL keeps them to the end
    return selected(logits / setup.temperature, ids)


def full_logits_in_place(hidden, head, ids, setup):
    """TRL 1.0 to 1.9: divided in place, in a view, so the backward copies the gradient of all of them."""
    logits = logits_of(hidden, head, setup)
    logits.div_(setup.temperature)
    return selected(logits, ids)


def full_logits_in_a_kernel(hidden, head, ids, setup):
    """TRL 1.14: a Triton kernel keeps the logits, and makes their gradient beside them. Without it, as before, but
    that a temperature of 1 divides nothing."""
    logits = logits_of(hidden, head, setup)
    if setup.device == "cpu":
        return selected(logits if setup.temperature == 1 else logits / setup.temperature, ids)
    return OneKernel.apply(logits)


class OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.new_empty(logits.shape[:-1], dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(ctx.saved_tensors[0], memory_format=torch.contiguous_format)


def selected(logits, ids):
    """Log-probabilities of `ids` by TRL's own function, and in training the entropies that it logs."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    log_probs = selective_log_softmax(logits, ids)
    if torch.is_grad_enabled():
        with torch.no_grad():
            entropy_from_logits(logits)
    return log_probs


# By the name in `Setup.lm_head`
HEADS = {head.__name__: head for head in (fused, full_logits, full_logits_in_place, full_logits_in_a_kernel)}

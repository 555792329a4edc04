"""The multiplications of a pass, and how many times faster than whole rows an exact method can be that needs them."""

from dataclasses import dataclass

from experiments.bench.samples import Cell

LIMITED = ("score", "train")  # decoding is bound by what it reads, not by multiplications


@dataclass(frozen=True)
class Work:
    """Multiplications of a pass over `tokens` tokens whose queries meet `pairs` keys in all, `scored` of them scored.

    Linear layers, attention and LM head are counted. Training computes each layer (but its last product) and each tile
    of the LM head again in the backward, and takes two products there for one in the forward. Attention takes five for
    the two of the forward (FlashAttention-2, section 3.1), after it was computed again with the layer. That of the
    prompt's last layer only keys and values are needed is left out: it is one layer of many in a real model.
    """

    tokens: int
    pairs: int
    scored: int

    @classmethod
    def of(cls, sizes: Cell, shared: bool) -> "Work":
        """Of k rows; with the prompt in one of them if `shared`, and the completions behind it."""
        rows_of_prompts = 1 if shared else sizes.k
        scored = sizes.k * sizes.completion_tokens
        own = sizes.completion_tokens * (sizes.completion_tokens + 1) // 2
        pairs = (
            rows_of_prompts * sizes.prompt_tokens * (sizes.prompt_tokens + 1) // 2
            + scored * sizes.prompt_tokens
            + sizes.k * own
        )
        return cls(rows_of_prompts * sizes.prompt_tokens + scored, pairs, scored)

    def multiplications(self, config, phase: str) -> float:
        """Of a Qwen3 model in "score" or "train"."""
        query, key = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        last = self.tokens * config.num_hidden_layers * config.hidden_size * config.intermediate_size
        in_linear = 3 * last + self.tokens * config.num_hidden_layers * config.hidden_size * 2 * (query + key)
        in_attention = self.pairs * config.num_hidden_layers * 2 * query
        in_head = self.scored * config.vocab_size * config.hidden_size
        if phase == "score":
            return in_linear + in_attention + in_head
        return 4 * in_linear - last + 4.5 * in_attention + 4 * in_head


def limit(config, sizes: Cell, phase: str) -> float:
    """How many times faster than whole rows an exact method can be that is bound by multiplications."""
    return Work.of(sizes, False).multiplications(config, phase) / Work.of(sizes, True).multiplications(config, phase)

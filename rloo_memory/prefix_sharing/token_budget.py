"""
Token budget: the rows of a batch go through a model in passes of at most some tokens, put together by length.

Shape suffixes: B rows, P prompt columns, C completion columns.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .lm_head import causal_lm_of
from .passes import (
    PassesOutput,
    TokenCount,
    check_mask,
    completion_states,
    load_balancing_loss,
    pass_inputs,
    position_shift,
    rope_parameters,
    router_sums,
    run_passes,
    same_number_everywhere,
    split_by_tokens,
    to_device,
)
from .probe import PROBE_PREFIX_LENGTH, attends_to_later_tokens, can_be_tried, error_of_passes
from .tree import Tree

# Tokens of whole rows, padding included, for each token with shared prompts, from which on sharing takes less time.
# Attention to a prompt and to a completion apart takes longer than to both at once.
SAVES_TIME_FROM = 1.1


@dataclass(frozen=True)
class TokenBudgetPasses:
    """
    Rows of similar length go through the model together, each with its prompt, padded behind it to the longest one.
    Each pass but the last is checkpointed as a whole, so the activations of one pass are alive at a time. With
    `activation_offloading` and gradient checkpointing, the inputs of the layers of all passes wait on the CPU instead.
    """

    prefix_length: int  # number of prompt columns, P
    tokens_per_forward: int | None = None  # with padding; a row that is longer goes by itself. None: all together
    activation_offloading: bool = False
    count: TokenCount | None = None

    def forward(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        output_router_logits: bool = False,
    ) -> PassesOutput:
        """Hidden states of completions, of rows of text. The arguments are those of [`SharedPrefixPasses.forward`]."""
        device = input_ids.device
        host_mask = attention_mask.cpu()
        check_mask(host_mask)
        passes = [(0, torch.tensor(rows)) for rows in self.divide(host_mask.sum(1).tolist())]
        if self.tokens_per_forward is not None:
            passes = same_number_everywhere(passes, backbone, device)
        each = [self._tokens_of(rows, input_ids, host_mask) for _, rows in passes]
        ids, masks, positions, tokens, places = map(list, zip(*each, strict=True))
        if self.count is not None:
            self.count.add(sum(x.numel() for x in ids), input_ids.numel())
        inputs = pass_inputs(backbone, ids)
        shift = position_shift(backbone.config, input_ids.shape[1])
        kwargs = {"output_router_logits": True} if output_router_logits else {}

        def forward_rows(model_inputs, mask, position_ids, tokens):
            outputs = backbone(
                **model_inputs,
                # No token of a causal model sees the padding behind it, and a mask would take the slower kernels
                attention_mask=torch.ones_like(mask),
                position_ids=position_ids + shift,
                use_cache=False,
                **kwargs,
            )
            sums = router_sums(backbone, outputs.router_logits, mask) if output_router_logits else None
            row, token = tokens
            return outputs.last_hidden_state.to(device)[row, token], sums  # the rest of a pass is not kept

        arguments = list(zip(inputs, masks, positions, tokens, strict=True))
        recompute = self.tokens_per_forward is not None
        outputs = run_passes(backbone, forward_rows, arguments, recompute, self.activation_offloading)
        all_rows, all_columns = map(list, zip(*places, strict=True))
        shape = (len(input_ids), input_ids.shape[1] - self.prefix_length + 1)
        last_hidden_state = completion_states([states for states, _ in outputs], all_rows, all_columns, shape)
        aux_loss = load_balancing_loss([sums for _, sums in outputs]) if output_router_logits else None
        return PassesOutput(last_hidden_state, aux_loss)

    def _tokens_of(self, rows: torch.Tensor, input_ids: torch.Tensor, host_mask: torch.Tensor) -> tuple:
        """
        Ids, mask and positions of the rows of a pass; row and token in the pass of what is read from it; row and
        column where that goes.
        """
        device = input_ids.device
        # Positions are columns: the positions that a left-padded row has when it goes through the model by itself
        columns = [host_mask[row].nonzero().squeeze(1) for row in rows]
        position_ids = nn.utils.rnn.pad_sequence(columns, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in columns], batch_first=True)
        row, token = (mask.bool() & (position_ids >= self.prefix_length - 1)).nonzero(as_tuple=True)
        column = position_ids[row, token] - self.prefix_length + 1
        read_from, goes_to = to_device(torch.stack([row, token, rows[row], column]), device).split(2)
        position_ids, mask = to_device(position_ids, device), to_device(mask, device)
        return input_ids[to_device(rows, device)[:, None], position_ids], mask, position_ids, read_from, goes_to

    def divide(self, lengths: list[int]) -> list[list[int]]:
        """Rows of each pass, from the number of tokens of each row."""
        if self.tokens_per_forward is None:
            return [list(range(len(lengths)))]
        return split_by_tokens(lengths, self.tokens_per_forward, packed=False)

    def count_tokens(self, lengths: list[int]) -> int:
        """Tokens that go through the model, padding included, for rows of so many tokens each."""
        return sum(len(rows) * max(lengths[row] for row in rows) for rows in self.divide(lengths))


def saves_time(
    tree: Tree, lengths: torch.Tensor, rows_per_micro_batch: int, tokens_per_forward: int | None = None
) -> bool:
    """
    Whether rows of so many tokens each, `(B,)` on the host, take less time with the shared prompts of `tree` than
    whole, as far as the number of tokens tells. The rows of a micro-batch are padded to one length.
    """
    whole = TokenBudgetPasses(tree.prompts.ids.shape[1], tokens_per_forward)
    of_whole_rows = sum(whole.count_tokens(rows.tolist()) for rows in lengths.split(rows_per_micro_batch))
    of_completions = int((lengths - tree.prompts.lengths).sum())
    return of_whole_rows >= SAVES_TIME_FROM * (tree.num_tokens + of_completions)


def check_whole_rows(model: PreTrainedModel) -> None:
    """Raise a `ValueError` if rows do not go through `model` in passes with the same result as together. It is tried
    where its weights are here."""
    model = causal_lm_of(model)

    def refuse(reason: str):
        raise ValueError(
            f"`tokens_per_forward` does not support {type(model).__name__} ({model.config.model_type}): {reason}. "
            "Remove it and lower `per_device_train_batch_size` instead."
        )

    if any("dynamic" in x.get("rope_type", "") for x in rope_parameters(model.config)):
        refuse("its rotary embedding (dynamic) depends on the longest row that goes with a row")
    if name := attends_to_later_tokens(model):
        refuse(f"{name} attends to later tokens, of which passes leave out the padding")
    for tokens_per_forward in (1, None) if can_be_tried(model) else ():  # by themselves, and padded to one length
        error = error_of_passes(model, TokenBudgetPasses(PROBE_PREFIX_LENGTH, tokens_per_forward))
        if error != 0:  # not a number, too
            refuse(f"hidden states of rows in passes differ from those of the rows together by {100 * error:.3g}%")


def takes_whole_rows(model: PreTrainedModel) -> bool | None:
    """Whether [`check_whole_rows`] finds nothing; None where it cannot try."""
    if not can_be_tried(model):
        return None
    try:
        check_whole_rows(model)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False
    return True

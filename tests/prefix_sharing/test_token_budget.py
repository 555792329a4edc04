import pytest
import torch

from experiments.checks.family_check import COMPLETION, PROMPT, TOLERANCE, error_of, in_float64, run
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses
from rloo_memory.prefix_sharing.trainer import saves_time
from rloo_memory.prefix_sharing.tree import Prompts, Tree

from .conftest import llama


class TestTokenBudget:
    @pytest.mark.parametrize("tokens_per_forward", [None, 2 * (PROMPT + COMPLETION)])
    def test_no_mask_is_needed(self, tokens_per_forward):
        # Rows are padded behind their tokens, which do not see it
        with in_float64():
            model, masks = llama(), []
            truth = run(model)
            model.model.layers[0].self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
            )
            found = run(model, passes=TokenBudgetPasses(PROMPT, tokens_per_forward))
        assert masks == [None] * len(masks) and len(masks) > 0
        assert max(error_of(found, truth)) <= TOLERANCE

    # Tokens of whole rows, padding included, and with shared prompts
    @pytest.mark.parametrize(
        "prompt_length, lengths, rows_per_micro_batch, tokens_per_forward, expected",
        [
            (2, [40, 40], 2, None, False),  # 84 and 83
            (20, [40, 40], 2, None, True),  # 120 and 101
            (3, [40, 2, 2, 2], 4, None, True),  # 172 and 52
            (3, [40, 2, 2, 2], 1, None, True),  # 58 and 52
            (2, [40, 2, 2, 2], 1, None, False),  # 54 and 51
            (2, [40, 2, 2, 2], 4, 20, False),  # 54 and 51, in passes by length
        ],
    )
    def test_when_sharing_saves_time(self, prompt_length, lengths, rows_per_micro_batch, tokens_per_forward, expected):
        one = torch.arange(prompt_length).repeat(len(lengths), 1)
        for ids in (one, torch.cat([one, one + 50])):  # also of two prompts
            tree = Tree.of(Prompts.of(ids, torch.ones_like(ids)))
            all_lengths = prompt_length + torch.tensor(lengths).repeat(len(ids) // len(lengths))
            assert saves_time(tree, all_lengths, rows_per_micro_batch, tokens_per_forward) == expected

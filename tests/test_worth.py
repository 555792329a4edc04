"""The limit that `worth` holds its seconds against is what a counter of operations finds."""

import pytest

from experiments.bench.group import Group
from experiments.bench.random_models import config_of
from experiments.bench.samples import Cell
from experiments.bench.work import LIMITED, Work

SIZES = Cell("tiny", 24, 5, 3)


@pytest.mark.torch
def test_the_multiplications_are_those_that_run(shared_fork):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config = config_of("tiny")
    in_place = {torch.ops.aten.addmm_: lambda x, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}
    for way, shared in (("whole", False), ("shared", True)):
        # The counter does not know the CPU's kernel
        group = Group(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 512, SIZES)
        work = Work.of(SIZES, shared)
        tokens = work.tokens + (SIZES.k - 1 if shared else 0)  # each completion has the prompt's last token before it
        for phase in LIMITED:
            with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
                getattr(group, phase)(way)
            counted = {str(op): flops // 2 for op, flops in counter.get_flop_counts()["Global"].items()}
            linear = sum(n for op, n in counted.items() if op != "aten.bmm")
            without_attention = Work(tokens, 0, work.scored).multiplications(config, phase)
            if shared and phase == "train":  # nothing of the prompt's last layer but keys and values has a gradient
                per_token = config.hidden_size * (2 * 4 * 64 + 3 * config.intermediate_size)
                without_attention -= 2 * (SIZES.prompt_tokens - 1) * per_token
            assert linear == without_attention, (way, phase)
            if way == "whole" and phase == "score":  # eager attention takes whole squares
                square = Work(0, SIZES.k * (SIZES.prompt_tokens + SIZES.completion_tokens) ** 2, 0)
                assert counted["aten.bmm"] == square.multiplications(config, phase)

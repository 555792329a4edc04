"""What the trial of a model finds that ZeRO-3 divides, in one process: by case, whether prompts that begin alike share
that, or why no prompt is shared."""

import json
import logging
import tempfile

import one_process  # noqa: F401
import tiny
import torch
import torch.distributed as dist
import with_deepspeed
from transformers import AutoModelForCausalLM, BambaConfig, GPT2Config, Qwen3ForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from rloo_memory.prefix_sharing.enabling import CannotShare, enable_prefix_sharing, shares_starts

ONE = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


class SeesRows(Qwen3ForCausalLM):
    """The last token of a row changes those before it."""

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, args, states: states + states[:, -1:])


def trial(config, model_class=AutoModelForCausalLM, dtype=torch.float32):
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        divided = HfDeepSpeedConfig(with_deepspeed.config() | ONE | {"bf16": {"enabled": dtype == torch.bfloat16}})
        model = model_class.from_pretrained(folder, dtype=dtype)
        weights = list(model.parameters())
        assert all(weight.numel() == 0 for weight in weights)
        try:
            enable_prefix_sharing(model)
            found = shares_starts(model)
        except CannotShare as error:
            found = error.reason
        assert all(weight.numel() == 0 and weight.dtype == dtype for weight in weights)
        del divided
    return found


logging.disable(logging.WARNING)
dist.init_process_group("gloo")
small = dict(vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=1)
bamba = BambaConfig(
    **small, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    attn_layer_indices=[1], mamba_d_state=16, mamba_d_head=16, mamba_n_heads=4,
)  # fmt: skip
no_dropout = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
found = {
    "Qwen3": trial(tiny.build_config()),
    "Qwen3, bfloat16": trial(tiny.build_config(), dtype=torch.bfloat16),
    "Bamba": trial(bamba),
    "GPT-2": trial(GPT2Config(**small, n_embd=32, n_layer=2, n_head=4, **no_dropout)),
    "sees rows": trial(tiny.build_config(), SeesRows),
}
print(json.dumps(found))

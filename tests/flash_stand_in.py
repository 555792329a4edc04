"""
Stands in for the kernels of flash-attn 2 and 3 and for that of flex_attention, on a CPU: transformers' own integration
runs (unpadding, bounds of sequences, windows, soft-capping, sinks, block masks), the kernels alone are PyTorch's.
"""

from collections import Counter

import torch
from flash_kernels import flash_forward
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, modeling_flash_attention_utils
from transformers.integrations import flex_attention
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

KERNELS = ("kernels-community/flash-attn2", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3")


class FlashStandIn:
    """
    Kernels in PyTorch. What they may be called with, transformers reads from their signatures.

    Args:
        strict (`bool`):
            Whether they take half precision only, as the real ones do.
    """

    def __init__(self, strict: bool):
        self.strict = strict
        self.calls = Counter()  # by kernel that was asked for

    def attend(self, query, key, value, bounds, scale, causal, window, softcap, sink):
        if self.strict and query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        about = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "sink": sink}
        return flash_forward(query, key, value, *bounds, **about)[0].to(query.dtype)

    def varlen(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False, s_aux=None,
    ):  # fmt: skip
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return self.attend(q, k, v, bounds, softmax_scale, causal, window_size, softcap, s_aux)

    def dense(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        deterministic=False, s_aux=None,
    ):  # fmt: skip
        return self.attend(q, k, v, [None] * 4, softmax_scale, causal, window_size, softcap, s_aux)

    def load(self, implementation, *args, **kwargs):
        """What transformers takes from a kernel's package: it asks the config for the name."""
        assert implementation in KERNELS, implementation
        self.calls[implementation] += 1
        padding = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
        return self.dense, self.varlen, None, *padding

    def flex(self, query, key, value, score_mod=None, block_mask=None, scale=None, **kwargs):
        self.calls["flex_attention"] += 1
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        places = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
        if score_mod is not None:
            scores = score_mod(scores, *places)
        if block_mask is not None:
            scores = scores.masked_fill(~block_mask.mask_mod(*places), -torch.inf)
        return scores.softmax(-1).nan_to_num() @ value


def install(monkeypatch, strict: bool = False) -> FlashStandIn:
    """Have models be loaded with these kernels."""
    stand_in = FlashStandIn(strict)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", stand_in.load)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", stand_in.flex)
    compiled = {"_compile": False}  # which takes half a minute
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **kwargs: create_block_mask(**kwargs | compiled))
    for name in KERNELS:
        monkeypatch.setitem(AttentionInterface._global_mapping, name, flash_attention_forward)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, flash_attention_mask)
    return stand_in

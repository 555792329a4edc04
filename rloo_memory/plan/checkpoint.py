"""Checkpoints whose weights are already quantized: what `quantization_config` in a model's config.json says of them.

Bytes of a linear layer's weight are those of the tensors in such a checkpoint, which stay as they are on the device:

* bitsandbytes: with 4 bits a float32 for 64 weights, or nested one byte and a float32 for 256 of those (QLoRA, arXiv
  2305.14314), with 8 bits a float32 a row.
* GPTQ (gptqmodel, `BaseQuantLinear`): `qweight` of `bits` a weight; for each group of inputs a float16 scale and a
  zero of `bits` an output; an int32 an input (`g_idx`).
* AWQ (gptqmodel, `AWQuantLinear`): the same without `g_idx`.
* FP8 (transformers, `FP8Linear`): a byte a weight, and a float32 a block (`weight_scale_inv`).

What such layers keep for the backward is planned as for 4-bit bitsandbytes: the weight is unpacked for each product.
That was compared with trainings for bitsandbytes only. MXFP4 cannot be trained packed: transformers unpacks it to 16
bits.
"""

import re
from dataclasses import dataclass

from rloo_memory.errors import ConfigError
from rloo_memory.models import meta_model
from rloo_memory.sizes import GIB


@dataclass(frozen=True)
class Quantized:
    """Weights that a checkpoint has in `bits` by `method`, its own name for it. A scale is for `block` weights:
    outputs and inputs, None for all of them. Modules that match `kept` are not quantized, nor is the output
    embedding."""

    method: str
    bits: int
    block: tuple[int | None, int | None] = (1, None)
    nested_scales: bool = False
    kept: tuple[str, ...] | None = None

    @property
    def by_bitsandbytes(self) -> bool:
        return self.method == "bitsandbytes"

    @property
    def by_layer(self) -> bool:
        """Whether the layers differ in what is quantized."""
        return any(re.search(r"layers\.\d", name) for name in self.kept or ())

    def keeps(self, name: str, of_decoder: bool) -> bool:
        """Whether a linear layer that is not the output embedding stays as it is."""
        from transformers.quantizers.quantizers_utils import should_convert_module

        if self.method == "gptq" and not of_decoder:  # it quantizes block by block
            return True
        return not should_convert_module(name, list(self.kept or ()))

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight of that shape."""
        if self.by_bitsandbytes and self.bits == 4:
            scales = outputs * inputs // 64
            return outputs * inputs // 2 + (scales + scales // 256 * 4 if self.nested_scales else scales * 4)
        if self.by_bitsandbytes:
            return outputs * inputs + outputs * 4
        rows, columns = (size or whole for size, whole in zip(self.block, (outputs, inputs), strict=True))
        scales = -(-outputs // rows) * -(-inputs // columns)
        if self.method == "fp8":
            return outputs * inputs + scales * 4
        packed = (outputs * inputs + scales) * self.bits // 8 + scales * 2
        return packed + (inputs * 4 if self.method == "gptq" else 0)


def quantized(hf_config, device: str = "cuda") -> Quantized | None:
    """What the weights of a checkpoint are quantized by, as they are on a "cuda" or "cpu" device; None if they have 16
    bits or more there. Raises `ConfigError` for a kind that the planner has no formula for."""
    settings = settings_in(hf_config)
    if settings is None:
        return None
    get, method = settings.get, str(settings.get("quant_method", "")).lower()
    method = method or ("bitsandbytes" if get("load_in_4bit") or get("load_in_8bit") else "?")
    if method == "mxfp4" or get("dequantize") or method == "fp8" and device == "cpu":
        return None
    try:
        found = _of_method(method, get)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the quantization_config of the model cannot be read: {error}; mend its config.json"
        ) from error
    if found is None:
        raise ConfigError(
            f"the model's weights are already quantized ({method}), and the planner has no formula for that; known "
            "are bitsandbytes, gptq, awq, fp8 and mxfp4"
        )
    return found


def expert_weights(model) -> list:
    """Those of experts, one tensor a layer or two; a convolution's has three dimensions as well."""
    from torch.nn import Conv1d

    modules = (module for module in model.modules() if not isinstance(module, Conv1d))
    return [weight for module in modules for weight in module.parameters(recurse=False) if weight.ndim == 3]


def of_experts(setup, hf_config) -> str | None:
    """What is said of experts whose weights are no linear layers, with 4 or 8 bits; None where there are none."""
    if setup.weight_bits == 16 or quantized(hf_config, setup.device):
        return None
    experts = sum(weight.numel() for weight in expert_weights(meta_model(hf_config)))
    size = experts * (4 if setup.dtype == "float32" else 2) / GIB
    why = "bitsandbytes quantizes linear layers only, and the experts of a layer are one tensor"
    return f"experts stay in {setup.dtype}, {size:.2f} GiB: {why}" if experts else None


def _of_method(method: str, get) -> Quantized | None:
    kept = get("llm_int8_skip_modules") if method == "bitsandbytes" else get("modules_to_not_convert")
    kept = None if kept is None else tuple(map(str, kept))
    if method == "bitsandbytes":
        nested = bool(get("bnb_4bit_use_double_quant"))
        return Quantized(method, 4 if get("load_in_4bit") else 8, nested_scales=nested, kept=kept)
    if method in ("gptq", "awq") and not get("dynamic") and not get("modules_in_block_to_quantize"):
        bits, group = int(get("bits") or get("w_bit") or 4), int(get("group_size") or get("q_group_size") or 128)
        return Quantized(method, bits, (1, group if group > 0 else None), kept=kept)
    if method == "fp8":
        return Quantized(method, 8, tuple(get("weight_block_size") or (None, None)), kept=kept)
    return None


def settings_in(hf_config) -> dict | None:
    """The `quantization_config` of a model's config as a dictionary; None if it has none."""
    settings = getattr(hf_config, "quantization_config", None)
    if settings is None:
        settings = getattr(hf_config.get_text_config(), "quantization_config", None)
    return settings.to_dict() if hasattr(settings, "to_dict") else settings


def in_words(hf_config, device: str) -> str | None:
    """What a prediction says of weights that are already quantized; None where it is nothing."""
    found = quantized(hf_config, device)
    if found:
        compared = "" if found.by_bitsandbytes else "; by a formula that was compared with no training"
        return f"the checkpoint's weights are already quantized: {found.bits} bits ({found.method}){compared}"
    if settings_in(hf_config):
        return "the checkpoint's weights are unpacked to 16 bits where they are loaded: only so can they be trained"
    return None

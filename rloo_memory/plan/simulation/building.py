"""The models of a simulation, built from their config without values: adapters, quantized weights."""

import functools

import torch
from transformers.initialization import no_init_weights

from rloo_memory.errors import ConfigError
from rloo_memory.models import auto_class
from rloo_memory.plan.checkpoint import Quantized, expert_weights, quantized
from rloo_memory.plan.simulation.replaced import QuantizedLinear


def decoder_layers(model) -> torch.nn.ModuleList:
    """The longest list of modules in the language model."""
    return max((m for m in model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList)), key=len)


def build(setup, shapes, hf_config, kind=None):
    """A model of that kind (a transformers auto class; None: the one that is trained), in `setup.dtype`."""
    eager = {"attn_implementation": "eager"} if setup.attn_implementation == "eager" else {}
    with shapes.new(), no_init_weights():
        model = (kind or auto_class(hf_config)).from_config(hf_config, dtype=getattr(torch, setup.dtype), **eager)
        model.tie_weights()  # left out with the initialization
    return model


def with_adapters(model, setup, shapes):
    """The model with LoRA: float32, on quantized weights bfloat16 (TRL, after QLoRA; not with fp16, whose GradScaler
    takes none), under DeepSpeed in the dtype of the rest. Raises `ConfigError` for target modules that the model does
    not have."""
    from peft import LoraConfig, get_peft_model

    modules = setup.lora_target_modules
    modules = list(modules) if isinstance(modules, tuple) else modules
    config = LoraConfig(
        r=setup.lora_rank, target_modules=modules, lora_dropout=setup.lora_dropout, task_type="CAUSAL_LM"
    )
    with shapes.new(), no_init_weights():
        try:
            model = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"lora_target_modules {modules}: {str(error).partition('. ')[0]}") from error
        already = quantized(model.config, setup.device)
        by_bitsandbytes = setup.weight_bits < 16 and (already is None or already.by_bitsandbytes)
        if by_bitsandbytes and not setup.fp16 or setup.zero_stage:
            dtype = getattr(torch, setup.dtype) if setup.zero_stage else torch.bfloat16
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
    if setup.gradient_checkpointing:
        model.enable_input_require_grads()
    return model


def quantize(model, setup, shapes) -> None:
    """4 or 8 bits a weight of every linear layer but the head, and bitsandbytes' scales, as `plan.checkpoint` has
    them. A checkpoint that is already quantized says itself what of it is, and how. Raises `ConfigError` for one with
    experts, whose weights are no linear layers."""
    head, already = model.get_output_embeddings(), quantized(model.config, setup.device)
    if already and expert_weights(model.get_decoder()):
        raise ConfigError(f"the planner has no formula for experts that are already quantized ({already.method})")
    how = already or Quantized("bitsandbytes", setup.weight_bits, nested_scales=setup.nested_scales)
    in_decoder = set(model.get_decoder().modules())
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or module is head or "lora_" in name:
            continue
        own_name = name.removeprefix("base_model.model.").removesuffix(".base_layer")  # PEFT's around it
        if already and already.keeps(own_name, module in in_decoder):
            continue
        shape = module.weight.shape
        size = how.weight_bytes(*shape)
        with shapes.new():
            module.weight = torch.nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        if how.by_bitsandbytes and name.endswith(".base_layer"):
            adapted = model.get_submodule(name.removesuffix(".base_layer"))
            adapted.forward = functools.partial(forward_on_bitsandbytes, adapted, how.bits)
        holds_input = how.bits == 8 and how.by_bitsandbytes
        module.forward = lambda x, m=module, s=shape, h=holds_input: QuantizedLinear.apply(x, m.bias, s, h)


def forward_on_bitsandbytes(adapted, bits: int, x):
    """Of PEFT's adapters on bitsandbytes' layers: unlike on others, nothing is converted under autocast."""
    result = adapted.base_layer(x)
    if adapted.disable_adapters:
        return result
    result = result.clone() if bits == 4 else result
    down, up = adapted.lora_A.default, adapted.lora_B.default
    converts = not torch.is_autocast_enabled("cpu")
    output = up(down(adapted.lora_dropout.default(x.to(down.weight.dtype) if converts else x)))
    output = output * adapted.scaling["default"]
    return result + (output.to(result.dtype) if converts else output)


def weights_not_in_8_bits(model) -> int:
    """Trained weights whose moments an 8-bit optimizer keeps in float32: those of tensors below 4,096 elements
    (bitsandbytes, `min_8bit_size`) and of embeddings (transformers' `Trainer.create_optimizer`)."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(p.numel() for p in trained if p.numel() < 4096 or any(p is weight for weight in embeddings))

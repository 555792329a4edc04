"""Bad input to prefix sharing: prints the error of each case by name, and what an exception leaves behind."""

import json
import logging
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

import shared_trainer
import torch  # noqa: E402, I001
from accelerate import Accelerator
from peft import (  # noqa: E402
    LilyConfig,
    LoHaConfig,
    LoraConfig,
    PromptTuningConfig,
    PveraConfig,
    get_peft_model,
)
from shared_exactness import SHAPE, batch, passes_of  # builds the fork and puts it on the path
from shared_trainer import train
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig  # noqa: E402
from trl.generation.shared_prefix import generate_with_shared_prefix  # noqa: E402
from trl.models.prefix_sharing_enabling import enable_prefix_sharing  # noqa: E402
from trl.models.token_budget import check_whole_rows  # noqa: E402
from trl.trainer import passes  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from trl import GRPOConfig, RLOOConfig  # noqa: E402

logging.disable(logging.WARNING)


def model(model_type, attention="sdpa", **extra):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **extra})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def message(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def settings(make, **options):
    defaults = dict(per_device_train_batch_size=8, num_generations=4, prefix_sharing=True, use_cpu=True, bf16=False)
    return message(make, tempfile.mkdtemp(), **{**defaults, **options})


def adapted(config):
    return get_peft_model(model("llama"), config)


def prompt_tuning():
    return get_peft_model(model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


flash = model("llama")
flash.config._attn_implementation_internal = "flash_attention_2"  # as if the package were there
MODELS = {
    "no attention interface": lambda: model("stablelm"),
    "linear attention": lambda: model("minimax", layer_types=["linear_attention", "full_attention"] * 2, block_size=8,
                                      num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2),
    "state space": lambda: model("mamba", "eager"),
    "positions from the mask": lambda: model("opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    # Stock fails on it, too: what TRL takes for its backbone is the whole model
    "chunked attention": lambda: model("llama4_text", num_local_experts=2, intermediate_size_mlp=48),
    "flash attention": lambda: flash,
    "dropout": lambda: model("llama", attention_dropout=0.1),
    "another dropout": lambda: model("gpt_bigcode", n_layer=2, n_head=4, n_embd=32, embd_pdrop=0.0, resid_pdrop=0.0),
    "embedding dropout": lambda: model("gpt2", embd_pdrop=0.1, attn_pdrop=0.0, resid_pdrop=0.0),
    "length-dependent rotary": lambda: model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    "prompt learning": prompt_tuning,
    # Noise that is no dropout layer's
    "residual dropout": lambda: model("starcoder2", residual_dropout=0.1),
    "router jitter": lambda: model("mixtral", num_local_experts=4, router_jitter_noise=0.1),
    "adapter left out at random": lambda: adapted(LoHaConfig(target_modules=["q_proj"], r=4, module_dropout=0.5)),
    "adapter that samples": lambda: adapted(PveraConfig(target_modules=["q_proj"], r=4)),
    # Its experts are mixed by a mean over all tokens of a call, which a start at zero hides
    "adapter that mixes tokens": lambda: adapted(LilyConfig(target_modules=["q_proj"], r=4)),
    "adapter for some tokens": lambda: adapted(
        LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")
    ),
}  # fmt: skip
result = {name: message(lambda make=make: enable_prefix_sharing(make())) for name, make in MODELS.items()}
for name in ("positions from the mask", "length-dependent rotary"):
    result[f"whole rows, {name}"] = message(lambda make=MODELS[name]: check_whole_rows(make()))
for name in ("no attention interface", "linear attention", "state space"):  # rows that share nothing can go in passes
    assert message(lambda make=MODELS[name]: check_whole_rows(make())) is None, name
for make in (RLOOConfig, GRPOConfig):
    name = make.__name__[:4]
    result |= {
        f"{name} fine": settings(make, tokens_per_forward=4),
        f"{name} parts of groups": settings(make, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        f"{name} uneven parts": settings(make, per_device_train_batch_size=6, gradient_accumulation_steps=2),
        f"{name} parts of an update": settings(make, per_device_train_batch_size=2, steps_per_generation=2),
        f"{name} reentrant": settings(make, gradient_checkpointing_kwargs={"use_reentrant": True}),
        f"{name} reentrant unsaid": settings(make, gradient_checkpointing_kwargs={}),
        f"{name} reentrant undecided": settings(make, gradient_checkpointing_kwargs={"use_reentrant": None}),
        f"{name} tokens reentrant unsaid": settings(
            make, prefix_sharing=False, tokens_per_forward=64, gradient_checkpointing_kwargs={"debug": False}
        ),
        f"{name} noise on embeddings": settings(make, neftune_noise_alpha=5.0),
        f"{name} guidance": settings(make, generation_kwargs={"guidance_scale": 1.5}),
        f"{name} beams": settings(make, generation_kwargs={"num_beams": 2}),
        f"{name} static cache": settings(make, cache_implementation="static"),
        f"{name} compile": settings(make, torch_compile=True),
        f"{name} zero tokens": settings(make, tokens_per_forward=0),
        f"{name} tokens reentrant": settings(
            make, prefix_sharing=False, tokens_per_forward=64, gradient_checkpointing_kwargs={"use_reentrant": True}
        ),
    }

# What a check does is undone: weights, random numbers, the mode
checked = adapted(LoraConfig(target_modules=["q_proj"], r=4)).train()
parameters, random_numbers = [p.detach().clone() for p in checked.parameters()], torch.get_rng_state()
enable_prefix_sharing(checked)
result["a check leaves no trace"] = bool(
    all(map(torch.equal, parameters, checked.parameters()))
    and torch.equal(random_numbers, torch.get_rng_state())
    and checked.training
)
guided = model("llama")
enable_prefix_sharing(guided)
guided.generation_config.num_beams = 2
result["beams in the model's config"] = message(
    generate_with_shared_prefix, guided, torch.full((2, 4), 7), torch.ones(2, 4, dtype=torch.long),
    generation_config=GenerationConfig(max_new_tokens=2, pad_token_id=0),
)  # fmt: skip

backend = passes.DistributedBackend
passes.DistributedBackend = lambda _: SimpleNamespace(is_zero3=False, fsdp_version=1)
for name in ("rloo", "grpo"):
    result[f"{name.upper()} FSDP1"] = message(train, tempfile.mkdtemp(), True, trainer=name)
passes.DistributedBackend = backend
for make in (RLOOConfig, GRPOConfig):
    args = make(tempfile.mkdtemp(), tokens_per_forward=9, report_to="none", use_cpu=True)
    result[f"{make.__name__[:4]} images in whole rows"] = message(
        passes.TrainerPasses, args, Accelerator(cpu=True), None, takes_images=True
    )

# A model that was refused, or that failed in the middle of a pass, computes as before
refused = model("opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)
message(enable_prefix_sharing, refused)
result["refused model keeps"] = refused.config._attn_implementation
for kind in (TypeError, KeyboardInterrupt):  # whatever ends the check of a model
    unlucky = model("llama")
    unlucky.model.layers[1].mlp.forward = mock.Mock(side_effect=kind)
    try:
        enable_prefix_sharing(unlucky)
    except (kind, ValueError):
        result[f"after a {kind.__name__}"] = unlucky.config._attn_implementation
good = model("llama")
add_fused_lm_head(good)
ids, mask, prompt = batch()
labels = ids.masked_fill(mask == 0, -100)
inputs = dict(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
enable_prefix_sharing(good)
result["engines find"] = good.config._attn_implementation
before, shared = good(**inputs).log_probs, good(**inputs, passes=passes_of(prompt)).log_probs

empty = mask.clone()
empty[4, :prompt] = 0
result["empty prompt, scored"] = message(good, **{**inputs, "attention_mask": empty}, passes=passes_of(prompt))
prompts = dict(input_ids=ids[:, :prompt], attention_mask=empty[:, :prompt])
config = GenerationConfig(max_new_tokens=2, pad_token_id=0)
result["empty prompt, generated"] = message(generate_with_shared_prefix, good, **prompts, generation_config=config)
for name in ("rloo", "grpo"):
    for what, texts in (("one", ["apple stone", ""]), ("all", ["", ""])):
        with mock.patch.object(shared_trainer, "PROMPTS", texts):
            result[f"{name.upper()} {what} empty"] = message(train, tempfile.mkdtemp(), True, trainer=name, batch=8)

calls, forward = [], good.model.layers[1].mlp.forward


def failing(*arguments):
    calls.append(1)
    if len(calls) == 3:  # the prompts of two groups, then the first pass of completions
        raise RuntimeError("out of memory, as if")
    return forward(*arguments)


good.model.layers[1].mlp.forward = failing
result["failing pass"] = message(good, **inputs, passes=passes_of(prompt))
result["after a failing pass"] = good.config._attn_implementation
good.model.layers[1].mlp.forward = forward
result["usable after a failure"] = bool(
    torch.equal(good(**inputs).log_probs, before)
    and torch.equal(good(**inputs, passes=passes_of(prompt)).log_probs, shared)
)
print(json.dumps(result), file=sys.stdout)

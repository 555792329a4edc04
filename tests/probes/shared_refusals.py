"""Bad input to prefix sharing and to passes, each with words that its error must have: all of them, or no error where
there are none. Prints how many cases there are, and the errors of those that went otherwise, by name."""

import json
import logging
import tempfile
from types import SimpleNamespace
from unittest import mock

import tiny
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import LilyConfig, LoHaConfig, LoraConfig, PromptTuningConfig, PveraConfig, get_peft_model
from shared_exactness import SHAPE  # builds the fork and puts it on the path
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from trl.prefix_sharing import trainer as shared_trainer
from trl.prefix_sharing.enabling import enable_prefix_sharing
from trl.prefix_sharing.token_budget import check_whole_rows

from trl import GRPOConfig, RLOOConfig

logging.disable(logging.WARNING)
number, otherwise = 0, {}


def expect(name, words, function, *arguments, **options):
    """Call the function, which must raise a ValueError with all of the words, or none where there are no words."""
    global number
    number += 1
    error = None
    try:
        function(*arguments, **options)
    except (ValueError, RuntimeError) as raised:
        error = raised
    as_expected = isinstance(error, ValueError) and all(word in str(error) for word in words) if words else not error
    if not as_expected:
        otherwise[name] = repr(error)


def model(model_type, attention="sdpa", **extra):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **extra})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def adapted(config):
    return get_peft_model(model("llama"), config)


def flash():
    """As if the package were there."""
    llama = model("llama")
    llama.config._attn_implementation_internal = "flash_attention_2"
    return llama


MODELS = {
    "no attention interface": (lambda: model("stablelm"), ["StableLmForCausalLM", "AttentionInterface"]),
    "linear attention": (lambda: model("minimax", layer_types=["linear_attention", "full_attention"] * 2, block_size=8,
                                       num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2),
                         ["MiniMaxForCausalLM", "linear_attention"]),
    "state space": (lambda: model("mamba", "eager"), ["MambaForCausalLM", "linear_attention"]),
    "positions from the mask": (lambda: model("opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
                                ["OPTForCausalLM", "differ"]),
    # Stock fails on it, too: what TRL takes for its backbone is the whole model
    "chunked attention": (lambda: model("llama4_text", num_local_experts=2, intermediate_size_mlp=48),
                          ["Llama4ForCausalLM", "chunked_attention", "prefix_sharing=False"]),
    "flash attention": (flash, ["flash_attention_2", "attn_implementation='sdpa'"]),
    "dropout": (lambda: model("llama", attention_dropout=0.1), ["self_attn` is 0.1", "disable_dropout=True"]),
    "another dropout": (lambda: model("gpt_bigcode", n_layer=2, n_head=4, n_embd=32, embd_pdrop=0.0, resid_pdrop=0.0),
                        ["attn` is 0.1", "disable_dropout=True"]),
    "embedding dropout": (lambda: model("gpt2", embd_pdrop=0.1, attn_pdrop=0.0, resid_pdrop=0.0),
                          ["transformer.drop", "0.1"]),
    "length-dependent rotary": (lambda: model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
                                ["dynamic", "prefix_sharing=False"]),
    "prompt learning": (lambda: adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
                        ["PROMPT_TUNING"]),
    # Noise that is no dropout layer's
    "residual dropout": (lambda: model("starcoder2", residual_dropout=0.1),
                         ["self_attn` is 0.1", "disable_dropout=True"]),
    "router jitter": (lambda: model("mixtral", num_local_experts=4, router_jitter_noise=0.1),
                      ["MixtralForCausalLM", "differ", "noise"]),
    "adapter left out at random": (lambda: adapted(LoHaConfig(target_modules=["q_proj"], r=4, module_dropout=0.5)),
                                   ["module_dropout", "0.5"]),
    "adapter that samples": (lambda: adapted(PveraConfig(target_modules=["q_proj"], r=4)), ["differ", "noise"]),
    # Its experts are mixed by a mean over all tokens of a call, which a start at zero hides
    "adapter that mixes tokens": (lambda: adapted(LilyConfig(target_modules=["q_proj"], r=4)), ["differ"]),
    "adapter for some tokens": (lambda: adapted(LoraConfig(
        target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")),
        ["aLoRA", "prefix_sharing=False"]),
}  # fmt: skip
for name, (make, words) in MODELS.items():
    expect(name, words, enable_prefix_sharing, make())
for name, words in {
    "positions from the mask": ["OPTForCausalLM", "differ", "per_device_train_batch_size"],
    "length-dependent rotary": ["dynamic", "per_device_train_batch_size"],
    **dict.fromkeys(("no attention interface", "linear attention", "state space"), ()),  # rows that share nothing can
}.items():
    expect(f"whole rows, {name}", words, check_whole_rows, MODELS[name][0]())

UNSHARED = dict(prefix_sharing=False, tokens_per_forward=64)
SETTINGS = (
    (dict(tokens_per_forward=4), ()),
    (dict(per_device_train_batch_size=2, gradient_accumulation_steps=2), ()),
    (dict(per_device_train_batch_size=2, steps_per_generation=2),
     ["(2)", "gradient_accumulation_steps (1)", "num_generations (4)"]),
    (dict(UNSHARED, gradient_checkpointing_kwargs={"debug": False}),
     ["`tokens_per_forward`", "'use_reentrant': False"]),
    (dict(generation_kwargs={"guidance_scale": 1.5}), ["guidance_scale=1.5"]),
)  # fmt: skip
ZERO3 = SimpleNamespace(zero_stage=3)
BACKENDS = {  # what accelerate says, and what is said; tests/test_distributed.py trains with those that are taken
    "FSDP1": ((DistributedType.FSDP, False, None), ["FSDP1", "FSDP2", "DeepSpeed"]),
    "FSDP2": ((DistributedType.FSDP, True, None), ()),
    "ZeRO-3": ((DistributedType.DEEPSPEED, False, ZERO3), ()),
}
for make in (RLOOConfig, GRPOConfig):
    trainer, folder = make.__name__[:4], tempfile.mkdtemp()
    defaults = dict(per_device_train_batch_size=8, num_generations=4, prefix_sharing=True, use_cpu=True, bf16=False)
    for options, words in SETTINGS:
        expect(f"{trainer}, {options}", words, make, folder, **{**defaults, **options})
    args = make(folder, tokens_per_forward=9, report_to="none", use_cpu=True)
    expect(
        f"{trainer}, images in whole rows", ["tokens_per_forward=9", "only with `prefix_sharing=True`"],
        shared_trainer.TrainerPasses, args, Accelerator(cpu=True), None, takes_images=True,
    )  # fmt: skip
    tiny.build_model().save_pretrained(folder)
    for backend, ((kind, is_fsdp2, deepspeed), words) in BACKENDS.items():
        seen = SimpleNamespace(distributed_type=kind, is_fsdp2=is_fsdp2, device=torch.device("cpu"), num_processes=2)
        seen.state = SimpleNamespace(deepspeed_plugin=deepspeed)
        for options in (dict(prefix_sharing=True), dict(tokens_per_forward=16)):
            args = make(folder, use_cpu=True, bf16=False, report_to="none", **options)
            arguments = (shared_trainer.TrainerPasses, args, seen, tiny.build_model())
            expect(f"{trainer}, {backend}, {options}", words, *arguments)
    for prompts in (["w50 w51", ""], ["", ""]):
        with mock.patch.object(tiny, "PROMPTS", prompts):
            run = tiny.build_trainer(trainer, folder, prefix_sharing=True, per_device_train_batch_size=8)
        expect(f"{trainer}, {prompts}", ["row 0", "empty", "dataset"], run.train)

print(json.dumps({"cases": number, "otherwise": otherwise}))

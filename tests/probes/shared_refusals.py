"""Bad input to prefix sharing and to passes, each with words that its error must have: all of them, or no error where
there are none. Prints how many cases there are, and the errors of those that went otherwise, by name."""

import json
import logging
import tempfile
from types import SimpleNamespace

import tiny
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from architectures import SHAPE
from peft import LilyConfig, PromptTuningConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rloo_memory.prefix_sharing import trainer as shared_trainer
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.token_budget import check_whole_rows
from rloo_memory.settings.trl_parser import GRPOConfig, RLOOConfig

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


def model(model_type, **extra):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SHAPE, **extra}))


def adapted(config):
    return get_peft_model(model("llama"), config)


MODELS = {
    "no attention interface": (lambda: model("stablelm"), ["StableLmForCausalLM", "AttentionInterface"]),
    "positions from the mask": (lambda: model("opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
                                ["OPTForCausalLM", "differ"]),
    # Stock fails on it, too: what TRL takes for its backbone is the whole model
    "chunked attention": (lambda: model("llama4_text", num_local_experts=2, intermediate_size_mlp=48),
                          ["Llama4ForCausalLM", "chunked_attention", "prefix_sharing=False"]),
    "dropout": (lambda: model("llama", attention_dropout=0.1), ["self_attn` is 0.1", "disable_dropout=True"]),
    "embedding dropout": (lambda: model("gpt2", embd_pdrop=0.1, attn_pdrop=0.0, resid_pdrop=0.0),
                          ["transformer.drop", "0.1"]),
    # Noise that is no dropout layer's
    "residual dropout": (lambda: model("starcoder2", residual_dropout=0.1),
                         ["self_attn` is 0.1", "disable_dropout=True"]),
    "router jitter": (lambda: model("mixtral", num_local_experts=4, router_jitter_noise=0.1),
                      ["MixtralForCausalLM", "differ", "noise"]),
    "length-dependent rotary": (lambda: model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
                                ["dynamic", "prefix_sharing=False"]),
    "prompt learning": (lambda: adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
                        ["PROMPT_TUNING"]),
    # Its experts are mixed by a mean over all tokens of a call, which a start at zero hides
    "adapter that mixes tokens": (lambda: adapted(LilyConfig(target_modules=["q_proj"], r=4)), ["differ"]),
}  # fmt: skip
for name, (make, words) in MODELS.items():
    expect(name, words, enable_prefix_sharing, make())
for name, words in {
    "positions from the mask": ["OPTForCausalLM", "differ", "per_device_train_batch_size"],
    "length-dependent rotary": ["dynamic", "per_device_train_batch_size"],
    "no attention interface": (),  # rows that share nothing can
}.items():
    expect(f"whole rows, {name}", words, check_whole_rows, MODELS[name][0]())

FSDP1 = SimpleNamespace(
    distributed_type=DistributedType.FSDP, is_fsdp2=False, device=torch.device("cpu"), num_processes=2,
    state=SimpleNamespace(deepspeed_plugin=None),
)  # fmt: skip
for make in (RLOOConfig, GRPOConfig):
    trainer, folder = make.__name__[:4], tempfile.mkdtemp()
    defaults = dict(report_to="none", use_cpu=True, bf16=False)
    args = make(folder, tokens_per_forward=9, **defaults)
    expect(
        f"{trainer}, images in whole rows", ["tokens_per_forward=9", "only with `prefix_sharing=True`"],
        shared_trainer.TrainerPasses, args, Accelerator(cpu=True), None, takes_images=True,
    )  # fmt: skip
    for options in (dict(prefix_sharing=True), dict(tokens_per_forward=16)):
        arguments = (shared_trainer.TrainerPasses, make(folder, **defaults, **options), FSDP1, tiny.build_model())
        expect(f"{trainer}, FSDP1, {options}", ["FSDP1", "FSDP2", "DeepSpeed"], *arguments)

print(json.dumps({"cases": number, "otherwise": otherwise}))

"""Whole training runs with and without prefix sharing, same seed: what is logged, and the trained parameters.

Everything computes in float64 (see experiments.checks.float64), so that both runs sample the same tokens and differ by
rounding alone. The rows of a generation batch are shuffled by whole groups in both, or they would train in another
order. Prints for each scenario the largest difference of a logged value and the relative difference of the parameters.

With --released DIR the trainers are those of the TRL in DIR.
"""

import contextlib
import copy
import functools
import itertools
import json
import logging
import math
import sys
import tempfile
from unittest import mock

import released  # noqa: F401
import tiny
import torch
from cpu_offloading import get_act_offloading_ctx_manager
from datasets import Dataset
from image_rows import CONFIGS
from peft import LoraConfig, get_peft_model
from tools import lookup, parsed
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config, Qwen3MoeConfig
from trl.trainer import grpo_trainer, rloo_trainer

from experiments.checks.float64 import pure_float64
from experiments.checks.tiny_families import PLAIN_TOKENS, TOKEN, tiny_config
from rloo_memory import models
from rloo_memory.prefix_sharing import tree
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses
from rloo_memory.prefix_sharing.trainer import shuffle_groups
from rloo_memory.prefix_sharing.tree import Tree
from trl import GRPOTrainer, RLOOTrainer

WORDS = "apple stone river cloud seven tiger green paper light money".split()
# Prompts of unequal length; two are equal, and one is a single token
PROMPTS = [" ".join(WORDS[i % 10] for i in range(n, n + 3 * n)) for n in (5, 2, 7)]
PROMPTS[2:2] = ["e", PROMPTS[0]]
COMMON = " ".join(WORDS * 13) + " "  # in front of all, where they begin alike
tree.MIN_SAVED_TOKENS = 100
SHORT = ["e", "a", "e", "r", "t"]  # a token or two: rows go whole
TOKENIZER = models.build_tokenizer([" ".join(WORDS)] * 4, 300)
OF_TOKENIZER = dict(vocab_size=300, pad_token_id=0, eos_token_id=3)
SHAPE = OF_TOKENIZER | dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=256,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def reward(completions, **kwargs):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [len(set(text)) / 10 + text.count("e") for text in texts]


PARTS = dict(batch=2, gradient_accumulation_steps=2)  # of the groups of 4
SCENARIOS = {
    "rloo": dict(),
    "rloo beta=0": dict(beta=0.0),
    "rloo passes of 9 tokens": dict(batch=8, tokens=9),
    "rloo whole rows, passes of 40 tokens": dict(batch=8, tokens=40, whole=True),
    "rloo two iterations": dict(num_iterations=2, gradient_accumulation_steps=2),
    "rloo two batches a generation": dict(steps_per_generation=2),
    "rloo no checkpointing": dict(gradient_checkpointing=False, tokens=2 * 7),
    "rloo activations offloaded, no checkpointing": dict(activation_offloading=True, gradient_checkpointing=False),
    "rloo lora, activations offloaded": dict(activation_offloading=True, lora="config", tokens=1),
    "rloo truncated masked": dict(mask_truncated_completions=True),
    "rloo all truncated": dict(mask_truncated_completions=True, ends=1),
    "rloo one-token completions": dict(max_completion_length=1),
    "rloo evaluation, other k": dict(per_device_eval_batch_size=6, num_generations_eval=3, evaluate=True),
    "rloo temperature, normalized": dict(temperature=0.7, top_k=20, repetition_penalty=1.1, normalize_advantages=True,
                                         reward_clip_range=(0.1, 0.9)),
    "rloo experts": dict(experts=True, tokens=2 * 7),
    "rloo lora": dict(lora="config", tokens=2 * 7),
    "rloo lora, trained before": dict(lora="model"),
    "rloo gemma4 class": dict(nested="gemma4", learning_rate=1e-3),
    "rloo qwen3_5 class": dict(nested="qwen3_5", tokens=2 * 7),
    "rloo lfm2, no checkpointing": dict(states="lfm2", gradient_checkpointing=False, tokens=3 * 7),
    "rloo kimi_linear, one-token completions": dict(states="kimi_linear", experts=True, max_completion_length=1),
    "rloo bamba, lora": dict(states="bamba", lora="config", tokens=2 * 7),
    "rloo one of 4 a micro-batch": dict(batch=1, gradient_accumulation_steps=4),
    "rloo two of 4 a micro-batch, two prompts an update": dict(batch=2, gradient_accumulation_steps=4),
    "rloo two of 4 a micro-batch, iterations": dict(PARTS, num_iterations=2, steps_per_generation=4),
    "rloo two of 4 a micro-batch, 9 tokens a pass": dict(PARTS, tokens=9),
    "rloo two of 4 a micro-batch, no checkpointing": dict(PARTS, gradient_checkpointing=False),
    "rloo two of 4 a micro-batch, lora": dict(PARTS, lora="config"),
    "rloo two of 4 a micro-batch, experts": dict(PARTS, experts=True),
    "rloo two of 4 a micro-batch, qwen3_5 class": dict(PARTS, nested="qwen3_5"),
    "rloo two of 4 a micro-batch, experts, offloaded": dict(PARTS, experts=True, activation_offloading=True),
    **{f"{trainer} alike, {name}": dict(trainer=trainer, alike=True, **options) for trainer, name, options in [
        ("rloo", "one prompt an update", dict()),
        ("rloo", "two prompts a batch", dict(batch=8, evaluate=True)),
        ("rloo", "accumulation, 9 tokens a pass", dict(gradient_accumulation_steps=3, tokens=9)),
        ("rloo", "two of 4 a micro-batch, experts", dict(batch=2, gradient_accumulation_steps=4, experts=True)),
        ("rloo", "one of 4 a micro-batch, iterations", dict(batch=1, gradient_accumulation_steps=8, num_iterations=2)),
        ("rloo", "offloaded", dict(PARTS, gradient_accumulation_steps=4, activation_offloading=True)),
        ("rloo", "qwen3_5 class", dict(batch=2, gradient_accumulation_steps=4, nested="qwen3_5")),
        ("grpo", "two prompts a batch", dict(batch=8, beta=0.05, gradient_checkpointing=False)),
        ("grpo", "two of 4 a micro-batch, lora", dict(batch=2, gradient_accumulation_steps=4, lora="config")),
        ("grpo", "updates across rollouts", dict(gradient_accumulation_steps=3, steps_per_generation=2)),
        ("grpo", "gemma3 class", dict(batch=8, nested="gemma3", beta=0.05)),
        ("grpo", "tools", dict(tools=True, batch=8)),
    ]},
    "rloo short, together": dict(short=True, ends=1, evaluate=True),
    "rloo short, one of 4 a micro-batch": dict(short=True, batch=1, gradient_accumulation_steps=8, experts=True),
    "grpo short, passes of 9 tokens": dict(trainer="grpo", short=True, batch=8, beta=0.05, tokens=9),
    "grpo": dict(trainer="grpo"),
    "grpo passes of 9 tokens": dict(trainer="grpo", batch=8, beta=0.05, tokens=9),
    "grpo whole rows, passes of 40 tokens": dict(trainer="grpo", batch=8, evaluate=True, tokens=40, whole=True),
    "grpo lora, whole rows": dict(trainer="grpo", lora="config", tokens=20, whole=True),
    "grpo activations offloaded": dict(trainer="grpo", activation_offloading=True, batch=8, tokens=9),
    "grpo experts, activations offloaded, whole rows": dict(trainer="grpo", activation_offloading=True, experts=True,
                                                            batch=8, tokens=40, whole=True),
    "grpo lora beta": dict(trainer="grpo", lora="config", beta=0.05),
    "grpo experts": dict(trainer="grpo", experts=True),
    "grpo falcon_h1": dict(trainer="grpo", states="falcon_h1", beta=0.05, tokens=2 * 7),
    "grpo olmo_hybrid": dict(trainer="grpo", states="olmo_hybrid", num_iterations=2, gradient_accumulation_steps=2),
    "grpo qwen3_next, lora": dict(trainer="grpo", states="qwen3_next", experts=True, lora="config", tokens=3 * 7),
    "grpo qwen3_5_moe_text": dict(trainer="grpo", states="qwen3_5_moe_text", experts=True, batch=8),
    "grpo tools": dict(trainer="grpo", tools=True, batch=8, tokens=2 * 31),
    "grpo tools, two of 4 a micro-batch": dict(PARTS, trainer="grpo", tools=True),
    "grpo sequence level": dict(trainer="grpo", importance_sampling_level="sequence", num_iterations=2,
                                steps_per_generation=2),
    # Not 0.25 to 0.4: there the threshold falls on the first tokens, whose entropies are equal up to rounding
    "grpo entropy": dict(trainer="grpo", top_entropy_quantile=0.7, entropy_coef=0.01),
    "grpo off-policy mask": dict(trainer="grpo", off_policy_mask_threshold=0.5, num_iterations=2),
    # The others, and DAPO, the default, sum over the same log-probabilities
    **{f"grpo {loss}": dict(trainer="grpo", loss_type=loss, num_iterations=2, tokens=2 * 7)
       for loss in ("cispo", "vespo")},
    "grpo two of 4 a micro-batch, bnpo": dict(PARTS, trainer="grpo", loss_type="bnpo", num_iterations=2),
}  # fmt: skip


def config_of(experts, nested, states):
    if nested:
        ids = itertools.count(len(TOKENIZER))  # which are never sampled
        return multimodal_config(nested, lambda name: next(ids), len(TOKENIZER) + 10)
    if states:
        return tiny_config(CONFIG_MAPPING[states], **OF_TOKENIZER)
    return Qwen3MoeConfig(**SHAPE, **EXPERTS) if experts else Qwen3Config(**SHAPE)


def multimodal_config(model_type, id_of, vocab_size):
    """`id_of(name)` is the id of the token that the config has by this name: one that means an image, or where it
    begins or ends."""
    config_class, fields = CONFIG_MAPPING[model_type], copy.deepcopy(CONFIGS[model_type])
    usual = config_class()
    names = (name for name in vars(usual) if TOKEN.search(name) and name.strip("_") not in PLAIN_TOKENS)
    tokens = {name: id_of(name) for name in names if isinstance(getattr(usual, name), int)}
    text = {
        name: vocab_size for name in ("vocab_size", "vocab_size_per_layer_input") if hasattr(usual.text_config, name)
    }
    return tiny_config(config_class, text_config={**OF_TOKENIZER, **text}, **fields, **tokens)


@contextlib.contextmanager
def whole_groups():
    """The rows of a batch are shuffled by groups of 4 in stock too, or it would train in another order."""
    with contextlib.ExitStack() as patched:
        for module in (rloo_trainer, grpo_trainer):
            by_group = functools.partial(shuffle_groups, group_size=4)
            patched.enter_context(mock.patch.object(module, "shuffle_sequence_dict", by_group))
        yield


def save_policy(folder, model, ends=60):
    """Larger weights than at initialisation, so that attention matters. Many tokens end a completion, so that they
    differ in length."""
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.generation_config.eos_token_id = list(range(3, 3 + ends))
    model.to(torch.float64).save_pretrained(folder)


CHAT = (
    "{% for message in messages %}{{ message.role }} {{ message.content }}"
    "{% if message.tool_calls %} {{ message.tool_calls[0].function }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def build_trainer(trainer, folder, model, rows, evaluate, given, **options):
    if evaluate:
        given["eval_dataset"] = rows
        options = dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4) | options
    steps = 3 if {"num_iterations", "steps_per_generation"} & options.keys() else 2
    given = {"train_dataset": rows, "reward_funcs": reward, "processing_class": copy.deepcopy(TOKENIZER), **given}
    trainer_class = RLOOTrainer if trainer == "rloo" else GRPOTrainer
    return tiny.build_trainer(trainer_class, folder, model, given=given, **{"max_steps": steps, **options})


def train_counting(run):
    """How often what prompts begin with went through a model by itself, and how often rows were whole and shared."""

    def watched(kind, name):
        return mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name))

    with (
        watched(Tree, "keep") as used,
        watched(TokenBudgetPasses, "forward") as whole,
        watched(SharedPrefixPasses, "forward") as shared,
    ):
        run.train()
    kept = (call.args for call in used.call_args_list)
    starts = sum(branch not in owner.branch_of.values() for owner, branch, *_ in kept)
    return {"starts": starts, "whole": whole.call_count, "shared": shared.call_count}


def outcome(run, skipped=("time", "runtime", "per_second", "num_input_tokens", "prefix_sharing/"), after=-1):
    """What was logged after a step, without what is skipped, and the parameters."""
    logs = [log for log in run.state.log_history if log["step"] > after]
    logs = [{name: x for name, x in log.items() if not any(s in name for s in skipped)} for log in logs]
    return logs, torch.cat([p.detach().flatten() for p in run.model.parameters()])


def train(
    folder,
    shared,
    trainer="rloo",
    batch=4,
    ends=60,
    evaluate=False,
    experts=False,
    nested=None,
    states=None,
    lora=None,
    tokens=None,
    whole=False,
    tools=False,
    alike=False,
    short=False,
    **options,
):
    prompts = SHORT if short else [COMMON + prompt for prompt in PROMPTS] if alike else PROMPTS
    rows, given = Dataset.from_dict({"prompt": prompts}), {}
    if tools:
        rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in prompts]})
        tokenizer = copy.deepcopy(TOKENIZER)
        tokenizer.chat_template, tokenizer.response_template = CHAT, "so that TRL does not look for one"
        given = dict(tools=[lookup], processing_class=tokenizer)
        options |= dict(max_completion_length=30, max_tool_calling_iterations=1)
    torch.manual_seed(0)
    config = config_of(experts, nested, states)
    if nested:
        never = list(range(len(TOKENIZER), config.text_config.vocab_size))
        options["generation_kwargs"] = {"suppress_tokens": never}
    make_model = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    model = make_model.from_config(config)
    save_policy(folder, model, ends)
    model = make_model.from_pretrained(folder, dtype=torch.float64)
    if experts:
        model.set_experts_implementation("eager")
    trained = "all-linear" if states else ["q_proj", "v_proj", "down_proj"]  # those of mixers, too
    lora_config = LoraConfig(r=4, target_modules=trained, init_lora_weights=False)
    if lora == "model":
        torch.manual_seed(1)
        model = get_peft_model(model, lora_config)
    run = build_trainer(
        trainer,
        folder,
        model,
        rows,
        evaluate,
        given | dict(peft_config=lora_config if lora == "config" else None),
        per_device_train_batch_size=batch,
        model_init_kwargs={"experts_implementation": "eager"} if experts else None,  # for the reference model
        prefix_sharing=shared and not whole,
        tokens_per_forward=tokens if shared else None,
        **options,
    )
    counts = train_counting(run)
    return *outcome(run), counts


def difference(stock_logs, logs):
    """The largest of what was logged, relative to what is larger than 1."""
    worst = 0.0
    for left, right in zip(stock_logs, logs, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if isinstance(value, float) and not (math.isnan(value) and math.isnan(right[name])):
                worst = max(worst, abs(value - right[name]) / max(1.0, abs(value)))
            elif value != right[name] and not isinstance(value, float):
                worst = math.inf
    return worst


def compare(train=train, **scenario):
    with (
        tempfile.TemporaryDirectory() as folder,
        pure_float64(),
        whole_groups(),
        mock.patch.object(grpo_trainer, "parse_response", parsed),
        mock.patch("trl.models.get_act_offloading_ctx_manager", get_act_offloading_ctx_manager),
    ):
        stock_logs, stock, before = train(folder, False, **scenario)
        logs, shared, counts = train(folder, True, **scenario)
    moved = (stock - shared).norm() / stock.norm()
    norms = [log["grad_norm"] for log in logs if "loss" in log and "grad_norm" in log]
    counts["encoded"] = counts["pixels"] / before["pixels"] if before.get("pixels") else None
    return {"logs": difference(stock_logs, logs), "parameters": moved.item(), "grad_norms": norms, **counts}


def compare_all(scenarios, compare):
    """By name, of the scenarios whose names begin as the command line says."""
    result = {}
    for name in [name for name in scenarios if name.startswith(tuple(sys.argv[1:]) or "")]:
        try:
            result[name] = compare(**scenarios[name])
        except Exception as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"}
    return result


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(compare_all(SCENARIOS, compare)))

"""The planner's `Setup` from settings as TRL's parser and the launcher read them, and back: what changed.

Settings are a dictionary by name, as a profile has them. What the planner does not know stays as it is: a changed
setup gives the settings that changed, and nothing else.
"""

import functools
from dataclasses import fields, replace

from rloo_memory.installed_trl import need_trl
from rloo_memory.models import is_model
from rloo_memory.plan.checkpoint import quantized
from rloo_memory.plan.setups import SAME_NAME, Setup

# Fields of `Setup` that are called differently in settings, or stand for several
WEIGHT_BITS = {
    4: {"load_in_4bit": True, "load_in_8bit": None, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True},
    8: {"load_in_8bit": True, "load_in_4bit": None},
    16: {"load_in_8bit": None, "load_in_4bit": None},
}
# What arguments of a loader and of generation hold of what the planner knows; they win over settings of these names
IN_KWARGS = {"model_init_kwargs": ("dtype", "attn_implementation"), "generation_kwargs": ("top_k", "top_p", "min_p")}
# The settings of each trainer, by the name of their class
ALGORITHMS = {"RLOOConfig": "rloo", "GRPOConfig": "grpo"}


def config_class(config) -> type | None:
    """TRL's or the launcher's class of a trainer's settings, also where a user's own is derived from it; None for
    settings of another trainer."""
    return next((cls for cls in type(config).__mro__ if cls.__name__ in ALGORITHMS), None)


@functools.cache
def defaults(algorithm: str) -> dict:
    """TRL's own and the launcher's, by name, for "rloo" or "grpo"."""
    need_trl()
    from rloo_memory.settings.arguments import LaunchArguments
    from rloo_memory.settings.trl_parser import TRAINERS
    from trl import ModelConfig

    classes = (LaunchArguments, ModelConfig, TRAINERS.get(algorithm, TRAINERS["rloo"]))
    return {field.name: field.default for cls in classes for field in fields(cls)}


def from_settings(prompt_tokens: int, settings: dict, hf_config=None, **where) -> Setup:
    """The setup that settings ask for. What is missing is as TRL's parser has it; `where` are the fields of `Setup`
    that are no settings, such as `device`. The settings are of the kinds that `rloo_memory.settings.trl_parser` says.

    With `hf_config`, its model decides the rest: the dtype that is "auto", whether an update depends on its
    micro-batches, and the bits of weights that are already quantized. Raises `ConfigError` for those without a
    formula."""
    algorithm = settings.get("algorithm") or "rloo"
    given = defaults(algorithm) | {name: value for name, value in settings.items() if value is not None}
    values = {name: given[name] for name in SAME_NAME}
    if given["disable_dropout"]:  # that of adapters, too
        values["lora_dropout"] = 0.0
    values |= in_kwargs(given)
    if given.get("use_transformers_paged"):  # its older name
        values["use_transformers_continuous_batching"] = True
    if values["dtype"] == "auto" and hf_config:
        own = getattr(hf_config.get_text_config(), "dtype", None)
        values["dtype"] = str(own or "float32").removeprefix("torch.")
    if given["bf16"] is None:  # as TRL's configs
        values["bf16"] = not given["fp16"]
    if given["steps_per_generation"] is None:  # as TRL's configs
        rows = given["per_device_train_batch_size"] * where.get("num_devices", 1)
        batch = given.get("generation_batch_size")
        values["steps_per_generation"] = max(1, batch // rows) if batch else given["gradient_accumulation_steps"]
    modules = given["lora_target_modules"]
    modules = tuple(map(str, modules)) if isinstance(modules, (list, tuple)) else modules
    reward = given.get("reward_model_name_or_path")
    setup = Setup(
        **{
            **values,
            "prompt_tokens": prompt_tokens,
            "lora_rank": given["lora_r"] if given["use_peft"] else 0,
            "lora_target_modules": "all-linear" if modules == ("all-linear",) else modules,
            "weight_bits": 4 if given["load_in_4bit"] else 8 if given["load_in_8bit"] else 16,
            "nested_scales": bool(given["use_bnb_nested_quant"]),
            "reward_model": reward if isinstance(reward, str) and is_model(reward) else None,
            "scaled_by_rollout": algorithm == "grpo" or bool(given.get("normalize_advantages")),
            "rescores_older": algorithm == "grpo"
            and not (given["use_vllm"] and given["vllm_importance_sampling_correction"]),
            "scaled_by_batch": bool(by_batch(given) or by_batch(settings, hf_config)),
            **where,
        }
    )
    found = quantized(hf_config, setup.device) if hf_config and setup.weight_bits == 16 else None
    return replace(setup, weight_bits=found.bits, nested_scales=found.nested_scales) if found else setup


def in_kwargs(settings: dict) -> dict:
    """The values of `IN_KWARGS` that settings have, with words for torch's dtypes."""
    found = {}
    for name, known in IN_KWARGS.items():
        kwargs = settings.get(name)
        if isinstance(kwargs, dict):
            found |= {each: kwargs[each] for each in known if kwargs.get(each) is not None}
    return {name: x if isinstance(x, int | float) else str(x).removeprefix("torch.") for name, x in found.items()}


def by_batch(settings: dict, hf_config=None) -> list[str]:
    """The settings for which an update depends on which completions share a micro-batch, as `name: value`: means,
    thresholds and sums over its tokens, in untouched TRL too. `hf_config` says whether there are experts, whose
    auxiliary loss is one, with a coefficient of the model's own unless the settings have one."""
    given = lambda name, default: default if settings.get(name) is None else settings[name]  # noqa: E731
    found = {
        "loss_type": given("loss_type", "") == "bnpo",
        "top_entropy_quantile": given("top_entropy_quantile", 1) < 1,
        "entropy_coef": given("entropy_coef", 0) != 0,
        "use_adaptive_entropy": given("use_adaptive_entropy", False),
    }
    reasons = [f"{name}: {settings[name]}" for name, depends in found.items() if depends]
    text_config = hf_config and hf_config.get_text_config()
    if hasattr(text_config, "output_router_logits"):
        own = getattr(text_config, "router_aux_loss_coef", 0.0)
        if coefficient := given("router_aux_loss_coef", own):
            reasons.append(f"router_aux_loss_coef: {coefficient}")
    return reasons


def changes(before: Setup, after: Setup) -> dict:
    """The settings that make `after` of `before`. None takes a setting away."""
    changed = {name for name in vars(before) if getattr(before, name) != getattr(after, name)}
    settings = {}
    if "weight_bits" in changed:
        settings |= WEIGHT_BITS[after.weight_bits]
    if "lora_rank" in changed:
        settings |= {"use_peft": True, "lora_r": after.lora_rank}
    if "lora_target_modules" in changed:
        modules = after.lora_target_modules
        settings["lora_target_modules"] = list(modules) if isinstance(modules, tuple) else modules
    settings |= {name: getattr(after, name) for name in SAME_NAME if name in changed}
    if "steps_per_generation" in changed or "per_device_train_batch_size" in changed:
        settings["generation_batch_size"] = None  # TRL takes one of the two
        settings["steps_per_generation"] = after.steps_per_generation
    return settings


def with_changes(settings: dict, changed: dict) -> dict:
    """`settings` with those of `changes`: the user's own order and values, what is new after them."""
    result = {**settings, **changed}
    init = settings.get("model_init_kwargs")
    if "dtype" in changed and isinstance(init, dict) and "dtype" in init:  # it would win
        result["model_init_kwargs"] = {name: value for name, value in init.items() if name != "dtype"}
    return {name: value for name, value in result.items() if value is not None or settings.get(name, 0) is None}

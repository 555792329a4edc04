"""Prefix sharing beside whole rows on one tiny model, in float64: tokens, gradients, greedy generation.

Whole rows are TRL's own pass of the same model, before prefix sharing is enabled.
"""

import math
import re
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from experiments.checks.float64 import pure_float64
from experiments.checks.tiny_families import FIRST_TOKEN, LAST_TOKEN, WINDOW, Family, build

PROMPT, COMPLETION = 70, 7  # linear attention computes in chunks of 64 tokens
LEFT_PADDING, LENGTHS = 5, (7, 3, 1, 5, 0, 2)
NEW_TOKENS = WINDOW + 2
ORDER = (0, 3, 1, 4, 5, 2)  # of rows that decode, in which the prompts are mixed
TOLERANCE = 1e-10  # relative, and 1e5 times what float64 rounds off

SHARED, REFUSED, WRONG, FAILS, UNTRIED, OTHER = "shared", "refused", "WRONG", "FAILS", "not tried", "other"


@dataclass(frozen=True)
class Result:
    """What the check of a family found. Errors are relative: the largest of all ways to divide completions."""

    verdict: str
    reason: str = ""
    tokens: float | None = None  # of log-probabilities and entropies
    gradient: float | None = None  # of all parameters
    generation: str = ""  # "same", or what differs


def check(family: Family) -> Result:
    """Try prefix sharing on a family."""
    try:
        if kind := other_kind(family):
            return Result(OTHER, kind)
        model = build(family).train()
    except Exception as error:
        package = re.search(r"requires the (\w+) library|No module named '(\w+)'", str(error))
        return Result(
            UNTRIED, f"needs {package[1] or package[2]}" if package else f"cannot be built here: {said(error)}"
        )
    try:
        if sees_later_tokens(model):
            return Result(OTHER, "attention to later tokens")
    except Exception as error:
        return Result(UNTRIED, f"TRL without sharing fails: {said(error)}")
    with in_float64():
        return compare(model)


@contextmanager
def in_float64():
    """What is made in here is in float64, too."""
    torch.set_default_dtype(torch.float64)
    try:
        with pure_float64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def prepared(model, dtype):
    """The model as it is compared, before prefix sharing is enabled."""
    from experiments.fused_head import add_fused_lm_head

    model.train().set_experts_implementation("eager")  # the others do not know float64
    add_fused_lm_head(model.to(dtype), temperature=0.9, outputs=("log_probs", "entropy"))
    return model


def errors_beside_float64(family: Family, dtype, autocast=None, device: str = "cpu", seeds=(7,), place=None) -> dict:
    """Errors of whole rows and of the ways to share, of tokens and gradient in each batch, and of decoded logits,
    beside those of the same weights in float64 on the host. `place` puts a model on devices, in place of `device`."""
    from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing

    model = prepared(build(family), dtype)
    with in_float64():
        exact = prepared(build(family), torch.float64)
        exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()}, strict=False)
        truths, decoded = [run(exact, batch(seed)) for seed in seeds], generate(exact, forced=True)
    precision = nullcontext() if autocast is None else torch.autocast(device, autocast)
    errors, logits = {}, {}
    model = model.to(device) if place is None else place(model)
    for shared in (False, True):
        if shared:
            enable_prefix_sharing(model)
        for seed, truth in zip(seeds, truths, strict=True):
            with precision:
                found = {"whole rows": run(model, batch(seed))}
                if shared:
                    found = {**ways(model, {}, batch(seed)), "micro-batches": run_micro_batches(model, batch(seed))}
            for way, got in found.items():
                errors.setdefault(way, []).append(error_of(got, truth))
        with precision:
            logits["shared" if shared else "whole rows"] = generate(model, shared, forced=True)
    for found in (decoded, *logits.values()):
        if isinstance(found, str):
            raise RuntimeError(found)
    return {
        "errors": errors,
        "decoded": {way: error(found, decoded) for way, found in logits.items()},
        "decoded beside whole rows": error(logits["shared"], logits["whole rows"]),
    }


def compare(model) -> Result:
    """Prefix sharing on a model, and TRL's own pass."""
    from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
    from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses

    try:
        prepared(model, torch.float64)
        settings = router_settings(model)
        truth, again = run(model, **settings), run(model, **settings)
    except Exception as error:
        return Result(UNTRIED, f"TRL without sharing fails: {said(error)}")
    if not all(torch.isfinite(x).all() and torch.equal(x, y) for x, y in zip(truth, again, strict=True)):
        return Result(UNTRIED, "TRL without sharing computes no numbers, or others each time")
    whole_rows = generate(model)
    try:
        enable_prefix_sharing(model)
    except Exception as error:
        return Result(REFUSED, refusal(error))
    try:
        two = TokenBudgetPasses(PROMPT, 2 * (PROMPT + COMPLETION))  # whole rows
        results = ways(model, settings) | {"two at a time": run(model, passes=two, **settings)}
        results["not shared"] = run(model, **settings)
        errors = [error_of(found, truth) for found in results.values()]
        # In micro-batches the router's loss is another one, with TRL's own as well: they are compared without it
        errors.append(error_of(run_micro_batches(model), run(model)))
    except Exception as error:
        return Result(FAILS, said(error))
    tokens, gradient = (max(values) for values in zip(*errors, strict=True))
    verdict = SHARED if max(tokens, gradient) <= TOLERANCE else WRONG
    return Result(verdict, "", tokens, gradient, compare_generation(model, whole_rows))


def other_kind(family: Family) -> str:
    """Why RLOO and GRPO do not train such models on text, where the class says so."""
    import transformers
    from transformers import CONFIG_MAPPING, GenerationMixin

    model_class = getattr(transformers, family.class_name)
    if CONFIG_MAPPING[family.config_type].is_encoder_decoder:
        return "encoder and decoder"
    if not model_class.can_generate() or not issubclass(model_class, GenerationMixin):
        return "no generation token by token"
    if "text" not in model_class.output_modalities:
        return "no text comes out"
    if model_class.main_input_name != "input_ids":
        return "text is not the main input"
    if family.config_type.endswith("_assistant"):
        return "drafts from another model's states"
    return ""


def said(error: Exception, length: int = 120) -> str:
    """An exception in a cell of a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return text if len(text) <= length else f"{text[: length - 3]}..."


def refusal(error: Exception) -> str:
    """The reason that prefix sharing gives, without class and advice, or the exception that its trial ended in."""
    text = " ".join(str(error).split()).replace("|", "/")
    if "`prefix_sharing=" not in text:
        return f"by an exception without advice: {said(error)}"
    text = re.sub(r"^`prefix_sharing=True` does not support \S+ \(\S+\): | by [\d.]+%", "", text)
    return re.sub(r"(, so [^.]*)?\. (Set|Load) .*$", "", text)


def router_settings(model) -> dict:
    """The experts' load-balancing loss, too, where TRL can compute it."""
    settings = {"output_router_logits": True}
    try:
        run(model, **settings)
    except Exception:  # no experts, or their config lacks a name that TRL reads
        return {}
    return settings


def ways(model, settings: dict, inputs: dict | None = None) -> dict:
    """What `run` gives for all completions together, for one at a time, and for two with gradient checkpointing."""
    from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

    def found(**bounds):
        return run(model, inputs, passes=SharedPrefixPasses(PROMPT, **bounds), **settings)

    results = {"together": found(), "one at a time": found(tokens_per_forward=1)}
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
        results["two, checkpointed"] = found(completions_per_forward=2)
        model.gradient_checkpointing_disable()
    return results


def run_micro_batches(model, inputs: dict | None = None, in_one_backward: bool = False):
    """What `run` gives, of one completion a micro-batch and without the router's loss."""
    from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
    from rloo_memory.prefix_sharing.tree import Prompts, Tree

    model.zero_grad()
    inputs = batch() if inputs is None else inputs
    prompts = Prompts.of(*(inputs[name][:, :PROMPT] for name in ("input_ids", "attention_mask")))
    tree, tokens = Tree.of(prompts, rows_per_backward=1, in_one_backward=in_one_backward), []
    for row in range(len(LENGTHS)):
        passes = SharedPrefixPasses(PROMPT, tree=tree, rows=[row])
        own, loss = scored(model, inputs, PROMPT, slice(row, row + 1), passes=passes)
        loss.backward()
        tree.leave(row + 1)
        tokens.append(own)
    assert not tree.nodes
    return torch.cat(tokens, dim=1), gradient_of(model)


def batch(seed: int = 7) -> dict:
    """Two prompts, one behind padding, with three completions each, one of which has no token."""
    torch.manual_seed(seed)
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN + 1, (6, PROMPT + COMPLETION))
    ids[:3, :PROMPT], ids[3:, :PROMPT] = ids[0, :PROMPT], ids[3, :PROMPT]
    mask = torch.ones_like(ids)
    mask[3:, :LEFT_PADDING] = 0
    for row, length in enumerate(LENGTHS):
        mask[row, PROMPT + length :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def sees_later_tokens(model) -> bool:
    """Whether the last token of a sequence changes the hidden states before it."""
    ids = batch()["input_ids"][:1]
    other = ids.clone()
    other[0, -1] = FIRST_TOKEN if ids[0, -1] != FIRST_TOKEN else LAST_TOKEN
    with torch.no_grad():
        states = [model.base_model(input_ids=x, use_cache=False).last_hidden_state[0, :-1] for x in (ids, other)]
    return bool((states[0] - states[1]).norm() > 1e-3 * states[0].norm())


def run(model, inputs: dict | None = None, prompt: int = PROMPT, **settings):
    """(log-probabilities and entropies, gradient of all parameters) of a pass of the batch, or of other inputs that
    have so many columns of prompts."""
    model.zero_grad()
    tokens, loss = scored(model, batch() if inputs is None else inputs, prompt, **settings)
    loss.backward()
    return tokens, gradient_of(model)


def scored(model, inputs: dict, prompt: int, rows: slice = slice(None), **settings):
    """(log-probabilities and entropies, their weighted sum with the router's loss) of some rows of the inputs."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    columns = ids.shape[1] - prompt
    weights = torch.linspace(-1, 1, len(ids) * columns).view(1, -1, columns)
    weights = (weights * torch.tensor([1.0, 0.1]).view(2, 1, 1)).to(model.device)
    inputs = {name: x[rows].to(model.device) for name, x in {**inputs, "labels": labels}.items()}
    out = model(**inputs, fused_lm_head=True, **settings)
    tokens = torch.stack([out.log_probs[:, -columns:], out.entropy[:, -columns:]])
    return tokens.detach(), (tokens * weights[:, rows]).sum() + (0 if out.aux_loss is None else out.aux_loss)


def gradient_of(model):
    grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    return torch.cat([grad.flatten().to(model.device) for grad in grads])


def error(got, truth) -> float:
    """Relative. What is not a number is infinitely wrong: `max` may pass over it."""
    got, truth = got.double().cpu(), truth.double().cpu()
    return ((got - truth).norm() / truth.norm()).nan_to_num(nan=math.inf).item()


def error_of(got, truth) -> list[float]:
    """Relative errors of the tokens and of the gradient."""
    return [error(x, y) for x, y in zip(got, truth, strict=True)]


def generate(model, shared: bool = False, use_cache: bool = True, forced: bool = False):
    """Logits of the steps of decoding behind both prompts, or why it fails: greedily, or of tokens that are `forced`,
    and differ between rows."""
    from transformers import GenerationConfig

    from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix

    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=1,
        disable_compile=True, use_cache=use_cache, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    inputs = {name: x[list(ORDER), :PROMPT].to(model.device) for name, x in batch().items()}
    if forced:
        model.generate = partial(model.generate, prefix_allowed_tokens_fn=forced_token)
    model.eval()
    try:
        with torch.no_grad():
            function = partial(generate_with_shared_prefix, model) if shared else model.generate
            output = function(**inputs, generation_config=config)
    except Exception as problem:
        return said(problem)
    finally:
        model.train()
        if forced:
            del model.generate
    return torch.stack(output.logits)


def forced_token(row: int, tokens) -> list[int]:
    return [FIRST_TOKEN + (5 * row + len(tokens)) % 50]


def compare_generation(model, cached) -> str:
    """Whether sharing decodes as `generate` does, or else as that does without a cache."""
    shared = generate(model, shared=True)
    if isinstance(shared, str):
        return f"FAILS: {shared}"
    if isinstance(cached, str):
        return f"without sharing {cached}"
    if error(shared, cached) <= TOLERANCE:
        return "same"
    uncached = generate(model, use_cache=False)
    is_same = not isinstance(uncached, str) and error(shared, uncached) <= TOLERANCE
    return "as without a cache" if is_same else "DIFFERS"

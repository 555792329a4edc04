"""What each tree of TRL can do: its options, and which patches keep their promise there.

    series.py TREES

TREES is a JSON dictionary of folders and the promises to try there. Prints a dictionary for each: "options" of the two
trainers' configs, and "kept", the names of promises.
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

import tiny
import torch
from cpu_offloading import get_act_offloading_ctx_manager
from dispatched import operations_of_a_layer
from transformers import GenerationConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3_5TextConfig
from trees import on_each_tree

NAMES = ("RLOO", "GRPO")
promises = {}


def promise(function):
    promises[function.__name__.replace("_", "-")] = function


def trainer_module(name):
    return importlib.import_module(f"trl.trainer.{name.lower()}_trainer")


def log_probs_and_gradient(model, **options):
    ids, mask, columns = tiny.build_batch()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :columns] = -100
    model.zero_grad()
    log_probs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **options).log_probs
    log_probs = log_probs[:, columns - ids.shape[1] :]
    (log_probs * torch.linspace(-1, 2, log_probs.numel()).view_as(log_probs)).sum().backward()
    return torch.cat([log_probs.flatten(), *[p.grad.flatten() for p in model.parameters()]]).detach()


def build_with_head(config=None):
    from trl.trainer.utils import add_fused_lm_head

    model = tiny.build_model(config)
    add_fused_lm_head(model)
    return model


def close(got, expected):
    return ((got - expected).norm() / expected.norm()).item() < 1e-5


def refusal(name, folder, **options):
    """What a trainer is refused for, or nothing."""
    try:
        tiny.build_trainer(name, folder, **options)
    except ValueError as error:
        return str(error)
    return ""


@promise
def prefix_sharing(folder):
    """Shared prompts give the log-probabilities, gradients and completions of whole rows."""
    return shares_as_whole_rows(build_with_head())


def shares_as_whole_rows(model):
    from trl.generation.shared_prefix import generate_with_shared_prefix
    from trl.models.prefix_sharing import SharedPrefixPasses
    from trl.models.prefix_sharing_enabling import enable_prefix_sharing

    ids, mask, columns = tiny.build_batch()
    prompts = dict(input_ids=ids[:, :columns], attention_mask=mask[:, :columns])
    prompts["generation_config"] = GenerationConfig(max_new_tokens=4, do_sample=False, disable_compile=True)
    expected, expected_ids = log_probs_and_gradient(model), model.generate(**prompts)
    enable_prefix_sharing(model)
    got = log_probs_and_gradient(model, passes=SharedPrefixPasses(columns, tokens_per_forward=8))
    return close(got, expected) and torch.equal(generate_with_shared_prefix(model, **prompts), expected_ids)


@promise
def activation_offloading(folder):
    """Every update of both trainers saves what its backward needs in the offloading context, and nothing else does."""
    for name in NAMES:
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: s.append(1) or x, lambda x: x)
        with mock.patch.object(trainer_module(name), "get_act_offloading_ctx_manager", lambda model, h=hooks: h):
            trainer = tiny.build_trainer(name, folder, max_steps=2, activation_offloading=True)
        step, counts = trainer.training_step, []

        def counted(*args, step=step, counts=counts, saved=saved, **kwargs):
            counts.append(len(saved))
            output = step(*args, **kwargs)
            counts.append(len(saved))
            return output

        trainer.training_step = counted
        trainer.train()
        first, after_first, second, after_second = counts
        if not (first == 0 < after_first == second < after_second == len(saved)):
            return False
    return True


@promise
def activation_offloading_exit(folder):
    """What offloading tracks does not outlive it. What is not on its accelerator it tracks as it is."""
    from trl.models import activation_offloading

    with mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("meta")):
        with mock.patch.object(torch, "get_device_module", lambda _: mock.MagicMock()):
            context = activation_offloading.OffloadActivations(use_pin_memory=False, use_streams=False)
            with context:
                torch.ones(1, requires_grad=True).exp()
    return not context.tracker


@promise
def checkpointing_arguments(folder):
    """Behind a generation, every second layer is still computed once."""
    options = dict(gradient_checkpointing_kwargs={"every_n_layers": 2, "use_reentrant": False}, max_steps=1)
    return all(runs_of_a_layer(tiny.build_trainer(name, folder, **options), layer=1) == 1 for name in NAMES)


@promise
def nothing_to_train(folder):
    """A model without a trainable parameter is refused."""
    models = {name: tiny.build_model().requires_grad_(False) for name in NAMES}
    return all("nothing would be trained" in refusal(name, folder, model=models[name], beta=0.0) for name in NAMES)


@promise
def compact_lm_head(folder):
    """On a CPU the fused LM head gets the positions that are scored, no more."""
    from trl.trainer import utils

    model, rows, function = build_with_head(), [], utils._ChunkedLogProbFunction

    class Counted(function):
        @staticmethod
        def forward(ctx, hidden, *args):
            rows.append(len(hidden))
            return function.forward(ctx, hidden, *args)

    with mock.patch.object(utils, "_ChunkedLogProbFunction", Counted):
        log_probs_and_gradient(model)
    _, mask, columns = tiny.build_batch()
    return rows == [int(mask[:, columns:].sum())]


@promise
def token_budget(folder):
    """Passes of some tokens give the log-probabilities and gradients of whole rows, prompts shared or not."""
    from trl.models.prefix_sharing import SharedPrefixPasses
    from trl.models.prefix_sharing_enabling import enable_prefix_sharing
    from trl.models.token_budget import TokenBudgetPasses

    model = build_with_head()
    expected = log_probs_and_gradient(model)
    enable_prefix_sharing(model)
    return all(
        close(log_probs_and_gradient(model, passes=passes(tiny.build_batch()[2], tokens_per_forward=20)), expected)
        for passes in (TokenBudgetPasses, SharedPrefixPasses)
    )


def rewards_in_passes(folder, *expected_sizes):
    """Whether a reward model scores as many texts at a time, keeps no keys and values, and gives the same rewards."""
    prompts, completions = ["w50 w51"] * 4, [" w9" * n for n in range(1, 5)]
    model, tokenizer = tiny.build_reward_model(), tiny.build_tokenizer()
    texts = [p + c for p, c in zip(prompts, completions, strict=True)]
    with torch.no_grad():
        rows = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", return_token_type_ids=False)
        model.config.pad_token_id = 0
        expected = model(**rows).logits
    assert expected.unique().numel() == 4
    for name in NAMES:
        for options, sizes in expected_sizes:
            outputs, reward_model = [], tiny.build_reward_model()
            trainer = tiny.build_trainer(name, folder, reward_funcs=reward_model, **options)
            trainer.reward_funcs[0].register_forward_hook(lambda module, args, output, o=outputs: o.append(output))
            rewards = trainer._calculate_rewards([{"prompt": p} for p in prompts], prompts, completions, [[1]] * 4)
            kept = any(output.past_key_values is not None for output in outputs)
            if kept or [len(output.logits) for output in outputs] != sizes:
                return False
            torch.testing.assert_close(rewards, expected)
    return True


@promise
def reward_model_cache(folder):
    return rewards_in_passes(folder, ({}, [4]))


@promise
def reward_model_passes(folder):
    return rewards_in_passes(folder, (dict(tokens_per_forward=13), [2, 2]))


def refusal_of_backend(name, folder, zero3, version, **options):
    """What a trainer says of a backend, or nothing."""
    backend = SimpleNamespace(is_zero3=zero3, fsdp_version=version, is_fsdp=version is not None)
    with mock.patch("trl.trainer.passes.DistributedBackend", lambda _: backend):
        return refusal(name, folder, **options)


@promise
def prefix_sharing_fsdp2(folder):
    """FSDP2 is taken, FSDP1 is refused. (tests/test_distributed.py trains with FSDP2.)"""
    return all(
        not refusal_of_backend(name, folder, False, 2, prefix_sharing=True)
        and "FSDP1" in refusal_of_backend(name, folder, False, 1, prefix_sharing=True)
        for name in NAMES
    )


@promise
def prefix_sharing_states(folder):
    """Prompts leave their states, too."""
    import trl.models.prefix_sharing_states  # noqa: F401

    config = Qwen3_5TextConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    return shares_as_whole_rows(build_with_head(config))


@promise
def prefix_sharing_images(folder):
    """A prompt's image goes through the vision tower once, with the log-probabilities and gradients of whole rows."""
    from trl.models.prefix_sharing import SharedPrefixPasses
    from trl.models.prefix_sharing_enabling import enable_prefix_sharing
    from trl.trainer.utils import add_fused_lm_head

    vision = dict(model_type="clip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                  num_attention_heads=2, image_size=8, patch_size=4)  # fmt: skip
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=tiny.build_config(), image_token_index=tiny.VOCABULARY - 1)
    model = LlavaForConditionalGeneration(config)
    add_fused_lm_head(model)
    encoded = []
    model.base_model.vision_tower.register_forward_pre_hook(lambda module, args: encoded.append(len(args[0])))
    ids, mask, columns = tiny.build_batch()
    ids[ids == config.image_token_id] = 0
    ids[:, columns - 5 : columns - 1] = config.image_token_id
    images = torch.rand(1, 3, 8, 8).repeat(len(ids), 1, 1, 1)

    def look_at(**options):
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :columns] = -100
        model.zero_grad()
        inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=images, labels=labels, fused_lm_head=True)
        log_probs = model(**inputs, **options).log_probs[:, columns - ids.shape[1] :]
        log_probs.sum().backward()
        return torch.cat([log_probs.flatten(), *[p.grad.flatten() for p in model.parameters() if p.grad is not None]])

    expected = look_at()
    enable_prefix_sharing(model)
    got = look_at(passes=SharedPrefixPasses(columns, num_images=[1] * len(ids)))
    return close(got, expected) and encoded == [len(ids), 1, 1]  # two prompts


@promise
def disable_attention_dropout(folder):
    """`disable_dropout=True` leaves no dropout in attention that has a probability in place of a layer."""
    options = {"model_init_kwargs": {"attention_dropout": 0.1}}
    for name in NAMES:
        for disable in (False, True):
            model = tiny.build_trainer(name, folder, disable_dropout=disable, **options).model.train()
            ids, mask, _ = tiny.build_batch()
            first, second = (model(input_ids=ids, attention_mask=mask).logits for _ in range(2))
            if torch.equal(first, second) is not disable:
                return False
    return True


@promise
def prefix_sharing_zero3(folder):
    """ZeRO-3 is taken. (tests/test_distributed.py trains with it, where deepspeed is.)"""
    return not any(refusal_of_backend(name, folder, True, None, prefix_sharing=True) for name in NAMES)


@promise
def token_budget_sharding(folder):
    """ZeRO-3 is taken, FSDP1 is refused."""
    options = dict(tokens_per_forward=16)
    return all(
        not refusal_of_backend(name, folder, True, None, **options)
        and "FSDP1" in refusal_of_backend(name, folder, False, 1, **options)
        for name in NAMES
    )


@promise
def prefix_sharing_kernels(folder):
    """No layer of a plain causal model takes a mask to share a prompt."""
    from trl.models.prefix_sharing import SharedPrefixPasses
    from trl.models.prefix_sharing_contexts import ReadPrefix
    from trl.models.prefix_sharing_enabling import enable_prefix_sharing

    model = build_with_head()
    enable_prefix_sharing(model)
    ids, mask, columns = tiny.build_batch()
    with mock.patch.object(ReadPrefix, "allowed", autospec=True) as made:
        SharedPrefixPasses(columns, tokens_per_forward=8).forward(model.model, ids, mask)
    return not made.called


@promise
def prefix_sharing_decoding(folder):
    """A decoded token takes at most a quarter more operations a layer than in stock, however the prompts differ."""
    stock = operations_of_a_layer((20,) * 4, shared=False)
    return all(operations_of_a_layer(x, shared=True) <= 1.25 * stock for x in ((20,) * 4, (20, 17, 12, 5)))


@promise
def prefix_sharing_recomputation(folder):
    """Two prompts go through the layers once, and so do their completions; in passes that were asked for, twice."""
    from trl.models.prefix_sharing import SharedPrefixPasses
    from trl.models.prefix_sharing_enabling import enable_prefix_sharing

    model = build_with_head()
    enable_prefix_sharing(model)
    ids, _, columns = tiny.build_batch()
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: calls.append(1))

    def count(**options):
        calls.clear()
        log_probs_and_gradient(model, passes=SharedPrefixPasses(columns, **options))
        return len(calls)

    prompts = len({tuple(row) for row in ids[:, :columns].tolist()})
    return prompts > 1 and count() == 2 * prompts and count(tokens_per_forward=10**6) == 3 * prompts - 1


@promise
def prefix_sharing_gradients(folder):
    """No gradient of keys and values is in float32 any longer when the backward enters the first prompt."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from trl.models.prefix_sharing import SharedPrefixPasses
    from trl.models.prefix_sharing_enabling import enable_prefix_sharing

    model = build_with_head().bfloat16()
    enable_prefix_sharing(model)
    columns, lengths = 21, (20, 17)
    ids = torch.randint(3, tiny.VOCABULARY, (2, columns + 3)).repeat_interleave(2, dim=0)
    mask = torch.ones_like(ids)
    mask[2:, : lengths[0] - lengths[1]] = 0
    converted, entered = [], []

    def of_prompts():
        return [shape for shape in converted if shape in [(1, 2, length, 8) for length in lengths]]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            output = operation(*args, **(kwargs or {}))
            if operation is torch.ops.aten._to_copy.default and args[0].dtype is torch.float32:
                converted.append(tuple(args[0].shape))
            return output

    def watch(module, args, output):
        if output.shape[1] in lengths and output.requires_grad:
            output.register_hook(lambda grad: entered.append(len(of_prompts())))

    model.model.layers[-2].register_forward_hook(watch)
    with Watch():
        SharedPrefixPasses(columns, tokens_per_forward=1).forward(
            model.model, ids, mask
        ).last_hidden_state.sum().backward()
    number = 2 * model.config.num_hidden_layers * len(lengths)  # keys and values
    return len(of_prompts()) == entered[0] == number


def runs_of_a_layer(trainer, layer=0):
    """How often a layer runs with gradients in a training."""
    calls = []
    # A norm: the hooks of a layer that is checkpointed do not run again with it
    trainer.model.model.layers[layer].input_layernorm.register_forward_pre_hook(
        lambda module, args: calls.append(1) if torch.is_grad_enabled() else None
    )
    trainer.train()
    return len(calls)


def runs_follow_offloading(folder, prompts, passes, **options):
    """Whether layers run three times for all passes but the last that a trainer was asked for, twice if it offloads
    what is saved, and computes layers again. Where layers are not, passes are."""

    def runs(name, **options):
        """In one training step of four completions."""
        with mock.patch.object(trainer_module(name), "get_act_offloading_ctx_manager", get_act_offloading_ctx_manager):
            trainer = tiny.build_trainer(name, folder, max_steps=1, **options)
        return runs_of_a_layer(trainer)

    return all(
        runs(name, **options) == 2 * (prompts + passes) + passes - 1
        and runs(name, **options, activation_offloading=True) == 2 * (prompts + passes)
        and runs(name, **options, activation_offloading=True, gradient_checkpointing=False)
        == prompts + passes + passes - 1
        for name in NAMES
    )


@promise
def prefix_sharing_offloading(folder):
    return runs_follow_offloading(folder, prompts=1, passes=4, prefix_sharing=True, tokens_per_forward=1)


@promise
def token_budget_offloading(folder):
    return runs_follow_offloading(folder, prompts=0, passes=4, tokens_per_forward=1)


@promise
def prefix_sharing_micro_batches(folder):
    """A prompt and each of its four completions, one a micro-batch, go through the layers once, and again by layer."""
    options = dict(prefix_sharing=True, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1)
    try:
        trainers = [tiny.build_trainer(name, folder, **options) for name in NAMES]
    except ValueError:  # a batch was whole groups
        return False
    return all(runs_of_a_layer(trainer) == 2 * (1 + 4) for trainer in trainers)


@promise
def prefix_sharing_checks(folder):
    """Checkpointing that is reentrant because nobody said otherwise is refused."""
    options = dict(prefix_sharing=True, gradient_checkpointing_kwargs={"preserve_rng_state": False})
    return all("use_reentrant" in refusal(name, folder, **options) for name in NAMES)


@promise
def prefix_sharing_faithful(folder):
    """A model that shares prompts names the attention that it came with."""
    model = build_with_head()
    importlib.import_module("trl.models.prefix_sharing_enabling").enable_prefix_sharing(model)
    return model.config._attn_implementation == "sdpa"


@promise
def prefix_sharing_trainers(folder):
    """A reward model scores all that was generated together, also where a batch is a part of a group."""
    options = dict(prefix_sharing=True, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1)
    sizes = []
    for name in NAMES:
        model = tiny.build_reward_model()
        model.register_forward_hook(lambda module, args, output: sizes.append(len(output.logits)))
        try:
            tiny.build_trainer(name, folder, reward_funcs=model, **options).train()
        except ValueError:  # a batch was whole groups
            return False
    return sizes == [4, 4]


def look(tree, names):
    import trl

    configs = [getattr(trl, f"{name}Config") for name in NAMES]
    assert all(getattr(trl, f"{name}Trainer") for name in NAMES)
    fields = [{field.name for field in dataclasses.fields(config)} for config in configs]
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        tiny.build_model().save_pretrained(folder)
        for name in names:
            with contextlib.suppress(ImportError, TypeError, AttributeError):  # what the patch adds is not there
                if promises[name](folder):
                    kept.append(name)
    return {"options": dict(zip(NAMES, map(sorted, fields), strict=True)), "kept": kept}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asked = json.loads(sys.argv[1])
    print(json.dumps(on_each_tree(lambda tree: look(tree, asked[tree]), asked)))

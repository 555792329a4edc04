"""What a tree of TRL can do: its options, and the promises that it keeps.

    series.py TREE PROMISE ...

Prints a dictionary: "options" of the two trainers' configs, and "kept", the names of promises.
"""

import contextlib
import dataclasses
import json
import logging
import sys
import tempfile

import tiny
import torch

NAMES = ("RLOO", "GRPO")
promises = {}


def promise(function):
    promises[function.__name__.replace("_", "-")] = function


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
def reward_model_cache(folder):
    """A reward model keeps no keys and values, and gives to the bit the rewards that it gives with them."""
    ids = torch.randint(3, tiny.VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0))
    ids[1, 5:] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    for name in NAMES:
        model = tiny.build_reward_model()
        expected = model(**batch)
        assert expected.past_key_values is not None and expected.logits.unique().numel() == 4
        trainer = tiny.build_trainer(name, folder, reward_funcs=model)
        scored = trainer.reward_funcs[0](**batch)
        if scored.past_key_values is not None or not torch.equal(scored.logits, expected.logits):
            return False
    return True


@promise
def checkpointing_arguments(folder):
    """Behind a generation, every second layer is still computed once."""
    calls = []
    for name in NAMES:
        options = dict(gradient_checkpointing_kwargs={"every_n_layers": 2, "use_reentrant": False}, max_steps=1)
        trainer = tiny.build_trainer(name, folder, **options)
        # A norm: the hooks of a layer that is checkpointed do not run again with it
        trainer.model.model.layers[1].input_layernorm.register_forward_pre_hook(
            lambda module, args: calls.append(1) if torch.is_grad_enabled() else None
        )
        trainer.train()
    return len(calls) == len(NAMES)


@promise
def nothing_to_train(folder):
    """A model without a trainable parameter is refused."""
    for name in NAMES:
        try:
            tiny.build_trainer(name, folder, model=tiny.build_model().requires_grad_(False), beta=0.0)
        except ValueError as error:
            if "nothing would be trained" in str(error):
                continue
        return False
    return True


def sharing_model(dtype=torch.float32):
    from trl.prefix_sharing.enabling import enable_prefix_sharing

    model = tiny.build_model().to(dtype)
    enable_prefix_sharing(model)
    return model


@promise
def prefix_sharing_recomputation(folder):
    """Two prompts go through the layers once, and so do their completions; in passes that were asked for, twice."""
    from trl.prefix_sharing.shared_passes import SharedPrefixPasses

    model = sharing_model()
    ids, mask, columns = tiny.build_batch()
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: calls.append(1))

    def count(**options):
        calls.clear()
        passes = SharedPrefixPasses(columns, **options)
        passes.forward(model.model, ids, mask).last_hidden_state.sum().backward()
        return len(calls)

    prompts = len({tuple(row) for row in ids[:, :columns].tolist()})
    return prompts > 1 and count() == 2 * prompts and count(tokens_per_forward=10**6) == 3 * prompts - 1


@promise
def prefix_sharing_gradients(folder):
    """No gradient of keys and values is in float32 any longer when the backward enters the first prompt."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from trl.prefix_sharing.shared_passes import SharedPrefixPasses

    model = sharing_model(torch.bfloat16)
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
    passes = SharedPrefixPasses(columns, tokens_per_forward=1)
    with Watch():
        passes.forward(model.model, ids, mask).last_hidden_state.sum().backward()
    number = 2 * model.config.num_hidden_layers * len(lengths)  # keys and values
    return len(of_prompts()) == entered[0] == number


@promise
def prefix_sharing_rewards(folder):
    """A reward model scores all that was generated together, also where a batch is a part of a group."""
    options = dict(prefix_sharing=True, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1)
    sizes = []
    for name in NAMES:
        model = tiny.build_reward_model()
        model.register_forward_hook(lambda module, args, output: sizes.append(len(output.logits)))
        tiny.build_trainer(name, folder, reward_funcs=model, **options).train()
    return sizes == [4, 4]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    tree, *names = sys.argv[1:]
    sys.path.insert(0, tree)
    import trl

    assert trl.__file__.startswith(tree), trl.__file__
    fields = {name: dataclasses.fields(getattr(trl, f"{name}Config")) for name in NAMES}
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        tiny.build_model().save_pretrained(folder)
        for name in names:
            with contextlib.suppress(ImportError, TypeError, AttributeError):  # what the patch adds is not there
                if promises[name](folder):
                    kept.append(name)
    options = {name: sorted(field.name for field in fields[name]) for name in NAMES}
    print(json.dumps({"options": options, "kept": kept}))

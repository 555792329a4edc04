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
from torch.utils._python_dispatch import TorchDispatchMode

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
def prefix_sharing_gradients(folder):
    """No gradient of keys and values is in float32 any longer when the backward enters the first prompt."""
    from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
    from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

    model = tiny.build_model().bfloat16()
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
    passes = SharedPrefixPasses(columns, tokens_per_forward=1)
    with Watch():
        passes.forward(model.model, ids, mask).last_hidden_state.sum().backward()
    number = 2 * model.config.num_hidden_layers * len(lengths)  # keys and values
    return len(of_prompts()) == entered[0] == number


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

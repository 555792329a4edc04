"""What PyTorch is asked to do while a model decodes a token. Imports no TRL: that is chosen by who uses it."""

import functools
from collections import Counter

import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, Qwen3Config

PROMPT, ROWS = 20, 3  # of each prompt


class Dispatched(TorchDispatchMode):
    """Counts the operations that are not views, the bytes of the keys and values that attention reads, and the bytes
    that concatenations write."""

    def __init__(self):
        super().__init__()
        self.operations, self.read, self.concatenated = Counter(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        aliases = [argument.alias_info for argument in function._schema.arguments if argument.alias_info is not None]
        if aliases and not any(alias.is_write for alias in aliases):
            return output
        self.operations[function.name()] += 1
        if "scaled_dot_product" in function.name():
            self.read += sum(x.numel() * x.element_size() for x in args[1:3])
        if function is torch.ops.aten.cat.default:
            self.concatenated += output.numel() * output.element_size()
        return output


def last_step(layers: int, lengths: tuple[int, ...], steps: int, shared: bool) -> Dispatched:
    """The last of some decoded tokens behind prompts of these lengths, without the LM head."""
    config = tiny.build_config().to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    model = tiny.build_model(Qwen3Config(**config)).eval()
    generate = model.generate
    if shared:
        from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
        from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix

        enable_prefix_sharing(model)
        generate = functools.partial(generate_with_shared_prefix, model)
    torch.manual_seed(0)
    ids = torch.randint(50, tiny.VOCABULARY, (len(lengths), PROMPT)).repeat_interleave(ROWS, dim=0)
    columns = torch.arange(PROMPT)
    mask = torch.stack([(columns >= PROMPT - length).long() for length in lengths]).repeat_interleave(ROWS, dim=0)
    seen, backbone = [], model.base_model.forward

    def forward(*args, **kwargs):
        with Dispatched() as mode:
            output = backbone(*args, **kwargs)
        seen.append(mode)
        return output

    model.base_model.forward = forward
    options = GenerationConfig(
        max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0, disable_compile=True
    )
    with torch.no_grad():
        generate(input_ids=ids, attention_mask=mask, generation_config=options)
    return seen[-1]


def operations_of_a_layer(lengths: tuple[int, ...], shared: bool) -> int:
    """Operations that one more layer takes for a token."""
    two, three = (last_step(layers, lengths, 6, shared).operations.total() for layers in (2, 3))
    return three - two

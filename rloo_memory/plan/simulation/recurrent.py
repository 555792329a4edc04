"""Layers with a state (Gated DeltaNet, Mamba-2, short convolutions ...) in a simulation: PyTorch's own code for them.

transformers takes the kernels of other packages where these are installed. They cannot run on tensors without values,
and what they hold is known to them alone. So the code in PyTorch is what is planned, for every machine.
"""

import functools
import inspect
import sys
from importlib.util import find_spec
from unittest import mock

STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # of `layer_types` in a config
# What transformers asks for, and the distribution that has it
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}


def kernels_here() -> str:
    """The packages with kernels that are installed, in words; empty if there are none."""
    return ", ".join(name for package, name in KERNELS.items() if find_spec(package) is not None)


def note(hf_config, device: str) -> str | None:
    """What a prediction for "cuda" or "cpu" says of layers with a state; None where there are none, and for a CPU, for
    which there are no kernels."""
    layers = getattr(hf_config.get_text_config(), "layer_types", None) or ()
    if device == "cpu" or STATE_TYPES.isdisjoint(layers):
        return None
    return (
        "layers with a state are predicted as transformers' own code in PyTorch computes them; with the kernels of "
        f"{', '.join(KERNELS.values())} they hold other sizes, which were never compared"
    )


def operators_in_torch(model, shapes) -> list:
    """Patches, to be entered: layers with a state call transformers' own code, and get a mask where rows are padded.
    `shapes`, a `simulation.shapes_only.ShapesOnly`, makes the tensors."""
    from rloo_memory.prefix_sharing.states import find_mixers

    patches = []
    for name in {type(mixer).__module__ for mixer in find_mixers(model)}:
        module = sys.modules[name]
        for function_name, function in vars(module).items():
            own = getattr(function, "__wrapped__", None)  # what transformers' decorator keeps of its own code
            if inspect.isfunction(own) and own.__module__ == name:
                patches.append(mock.patch.object(module, function_name, _with_known_arguments(own)))
        if hasattr(module, "create_recurrent_attention_mask"):
            made = functools.partial(_recurrent_mask, module.create_recurrent_attention_mask, shapes)
            patches.append(mock.patch.object(module, "create_recurrent_attention_mask", made))
    return patches


def _with_known_arguments(function):
    """Without those that only kernels take, as transformers calls it."""
    known = inspect.signature(function).parameters

    def called(*args, **kwargs):
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return called


def _recurrent_mask(original, shapes, config, inputs_embeds, attention_mask, **kwargs):
    """A simulation says by a mask of four dimensions that rows are padded. These layers then take the padding of each
    token, but not in decoding."""
    if attention_mask is None or attention_mask.ndim != 4:
        return original(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)
    import torch

    if inputs_embeds.shape[1] == 1:
        return None
    with shapes.new():
        return torch.ones(inputs_embeds.shape[:2], dtype=torch.long)

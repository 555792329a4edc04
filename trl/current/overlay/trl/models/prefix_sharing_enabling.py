# Copyright 2020-2026 The HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

"""Prefix sharing: which models can share a prompt, and what is done to them and undone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from .passes import rope_parameters
from .passes_probe import PROBE_PREFIX_LENGTH, error_of_passes
from .prefix_memory import SharedPrefix
from .prefix_sharing import SharedPrefixPasses
from .prefix_sharing_contexts import BASE_IMPLEMENTATIONS, IMPLEMENTATION_PREFIX
from .prefix_sharing_states import SUPPORTED_LAYER_TYPES, find_mixers, ignores_state, layers_by_kind, share_states


# A layer's probability, and those that attention and blocks have in place of a layer
_DROPOUTS = ("p", "attention_dropout", "attn_dropout", "residual_dropout", "embedding_dropout")


class _Route:
    """
    Where the attention of a model goes while it is called with a shared prefix: to the function that can attend to it.
    The rest of the time its configs name the model's own implementation, which models and engines ask for.

    Hooks do so at the backbone, and at each attention: the backward computes layers again, behind the backbone's back.

    Args:
        configs (`list[PretrainedConfig]`):
            Configs of the text part.
    """

    def __init__(self, configs: list[PretrainedConfig]):
        self.configs = configs
        self.handles: list[RemovableHandle] = []
        self._running: set = set()  # what has not ended yet
        self._before: list[str] = []

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_Route":
        # Of a multimodal model, that of the text part: towers keep theirs
        text_config = model.config.get_text_config()
        implementation = IMPLEMENTATION_PREFIX + text_config._attn_implementation
        parts = {
            name: implementation for name in model.config.sub_configs if getattr(model.config, name) is text_config
        }
        configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
        for config in configs:  # which grows
            parts_of_config = (getattr(config, name) for name in config.sub_configs)
            configs.extend(part for part in parts_of_config if part is not None)
        before = {id(config): (config, config._attn_implementation) for config in configs}
        model.set_attn_implementation({"": implementation, **parts})
        routed = [config for config, _ in before.values() if config._attn_implementation == implementation]
        for config in routed:
            config._attn_implementation_internal = before[id(config)][1]
        return cls(routed)

    def install(self, backbone: nn.Module) -> None:
        attention = [module for module in backbone.modules() if getattr(module, "layer_idx", None) is not None]
        for module in [backbone, *attention]:
            self.handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self._end(*self._running)

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Go there whatever the model is called with."""
        self._begin(self)
        try:
            yield
        finally:
            self._end(self)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if kwargs.get("shared_prefix") is not None:
            self._begin(module)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output) -> None:
        self._end(module)

    def _begin(self, what) -> None:
        if not self._running:
            self._before = [config._attn_implementation for config in self.configs]
            for config, own in zip(self.configs, self._before, strict=True):
                config._attn_implementation_internal = IMPLEMENTATION_PREFIX + own.removeprefix(IMPLEMENTATION_PREFIX)
        self._running.add(what)

    def _end(self, *what) -> None:
        if self._running and not (self._running - set(what)):
            for config, own in zip(self.configs, self._before, strict=True):
                config._attn_implementation_internal = own
        self._running.difference_update(what)


def enable_prefix_sharing(model: PreTrainedModel) -> None:
    """
    Let `model` attend to a shared prefix: a call with one goes to a function that can, any other to the attention that
    the model was loaded with. What was enabled before is checked again. [`disable_prefix_sharing`] undoes it.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model.

    Raises:
        ValueError: If the model or its attention implementation cannot share a prefix exactly.
    """

    def refuse(reason: str):
        raise ValueError(
            f"`prefix_sharing=True` does not support {type(model).__name__} ({model.config.model_type}): {reason}"
        )

    if is_peft_model(model):
        if model.active_peft_config.is_prompt_learning:
            refuse(
                f"{model.active_peft_config.peft_type} puts learned tokens in front of each sequence. Set "
                "`prefix_sharing=False`."
            )
        adapter = vars(model.active_peft_config)
        if adapter.get("alora_invocation_tokens") is not None:
            refuse("aLoRA looks for its tokens in whole sequences. Set `prefix_sharing=False`.")
        # Dropout that has layers is asked for there: `disable_dropout` may have switched it off
        parts_of_names = {part for name, _ in model.named_modules() for part in name.split(".")}
        for name, p in adapter.items():
            if "dropout" in name and isinstance(p, float) and p > 0 and name not in parts_of_names:
                refuse(f"the completions of a prompt would share the adapter's dropout. Set its `{name}` ({p}) to 0.")
        model = model.get_base_model()
    disable_prefix_sharing(model)
    text_config = model.config.get_text_config()
    implementation = text_config._attn_implementation

    if model.config.is_encoder_decoder or getattr(text_config, "cross_attention_layers", None):
        refuse("only decoders without cross-attention can share a prompt. Set `prefix_sharing=False`.")
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    mixers = find_mixers(model)
    attending, with_state = layers_by_kind(text_config)
    if layer_types - SUPPORTED_LAYER_TYPES or not attending or {mixer.layer_idx for mixer in mixers} != with_state:
        unsupported = sorted(layer_types - {"full_attention", "sliding_attention"})
        refuse(f"it has layers of type {unsupported}, whose state cannot be shared. Set `prefix_sharing=False`.")
    # transformers does not say so of models with a state. The comparison below finds attention that does not.
    if not (model._supports_attention_backend or mixers):
        refuse("its attention does not go through `transformers.AttentionInterface`. Set `prefix_sharing=False`.")
    if implementation not in BASE_IMPLEMENTATIONS:
        refuse(
            f"its attention implementation is {implementation!r}, which does not take the mask that a shared prefix "
            "needs. Load the model with `attn_implementation='sdpa'`."
        )
    if any("dynamic" in x.get("rope_type", "") for x in rope_parameters(text_config)):
        refuse(
            "its rotary embedding (dynamic) depends on the length of the whole sequence, and on earlier ones, so the "
            "prompt alone does not have the keys of the full sequence. Set `prefix_sharing=False`."
        )
    for name, module in model.named_modules():
        # Attention that goes through the interface has a probability in place of a layer
        for p in (getattr(module, attribute, None) for attribute in _DROPOUTS):
            if isinstance(p, float) and p > 0:
                refuse(
                    f"the completions of a prompt would share its dropout (that of `{name}` is {p}). Set "
                    "`disable_dropout=True`, or for adapters `lora_dropout=0.0`."
                )
    route = _Route.of(model)
    route.install(model.base_model)
    route.handles.extend(share_states(mixers))
    model._prefix_sharing = route
    try:
        _compare(model, mixers, refuse)
    except BaseException:
        disable_prefix_sharing(model)
        raise


def _compare(model: PreTrainedModel, mixers: list[nn.Module], refuse: Callable[[str], None]) -> None:
    """Try a shared prefix on a few tokens."""
    try:
        error = error_of_passes(model, SharedPrefixPasses(PROBE_PREFIX_LENGTH), training=True)
    except Exception as exception:
        if isinstance(exception, torch.OutOfMemoryError) or "CUDA error" in str(exception):
            raise  # the device's fault, not the model's
        refuse(f"a shared prompt fails in it ({type(exception).__name__}: {exception}). Set `prefix_sharing=False`.")
    if error > 0:
        refuse(
            f"hidden states behind a shared prompt differ from those of whole sequences by {error:.1%} (in training, "
            "where noise counts, too). Set `prefix_sharing=False`."
        )
    hidden_size = model.config.get_text_config().hidden_size
    for mixer in {type(mixer): mixer for mixer in mixers}.values():
        if ignores_state(mixer, SharedPrefix(torch.arange(2)), hidden_size):
            refuse(f"{type(mixer).__name__} does not start from the state of a prompt. Set `prefix_sharing=False`.")


def disable_prefix_sharing(model: PreTrainedModel) -> None:
    """
    Take back what [`enable_prefix_sharing`] did, if it did.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model.
    """
    if is_peft_model(model):
        model = model.get_base_model()
    route = vars(model).pop("_prefix_sharing", None)
    if route is not None:
        route.remove()

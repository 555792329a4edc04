"""Prefix sharing: which models can share a prompt, and what is done to them and undone."""

import logging
from types import SimpleNamespace
from weakref import WeakSet

import torch
import transformers
from accelerate.utils import is_peft_model
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from .hooks import hooks_of
from .lm_head import causal_lm_of
from .nodes import Node
from .passes import PassesOutput, rope_parameters, text_configs
from .probe import (
    PROBE_COMMON_LENGTH,
    PROBE_PREFIX_LENGTH,
    WholeRowsError,
    attends_to_later_tokens,
    can_be_tried,
    counts_positions,
    error_of_passes,
    gathered,
)
from .routing import MARK, is_softmax_attention
from .shared_passes import SharedPrefixPasses
from .states import SUPPORTED_LAYER_TYPES, find_mixers, ignores_state, layers_by_kind, share_states, unshare_states
from .tree import Prompts, Tree

logger = logging.getLogger(__name__)

# Since then, mixers ask a cache for their states, and all of Gemma's layers look up their embeddings alike
_VERSION_OF_STATES = "5.22.0"

# A layer's probability, and those that attention and blocks have in place of a layer
_DROPOUTS = ("p", "attention_dropout", "attn_dropout", "residual_dropout", "embedding_dropout")


class _Route:
    """What of a model attends to a shared prefix."""

    def __init__(self, model: PreTrainedModel):
        self.configs = text_configs(model)  # see [`~prefix_sharing.routing.running`]
        self.in_training = True  # what it is tried for
        # Also between prompts, of what they begin with; None where it could not be tried
        self.shares_starts: bool | None = False
        self.hooks: frozenset[int] = frozenset()  # the user's, with which the model was tried
        self.holders: WeakSet = WeakSet()  # trainers' passes, each of which needs it until it is removed

    def __reduce__(self):
        return type(None), ()  # a copy of a model, on disk or in another process, shares nothing

    def install(self, backbone: nn.Module, mixers: list[nn.Module]) -> None:
        self.hooks = hooks_of(backbone)
        share_states(mixers)
        for module in set(backbone.modules()).difference(mixers):
            config = getattr(module, "config", None)
            if getattr(module, "layer_idx", None) is not None and any(config is x for x in self.configs):
                setattr(module, MARK, True)

    def remove(self, backbone: nn.Module) -> None:
        for module in backbone.modules():
            vars(module).pop(MARK, None)
            unshare_states(module)


def enable_prefix_sharing(
    model: PreTrainedModel, shares_dropout: bool = False, holder=None, in_training: bool = True
) -> None:
    """
    Let `model` attend to a shared prefix: a call with one goes to a function that can, any other to the attention that
    the model was loaded with. What was enabled before is checked again. [`disable_prefix_sharing`] undoes it, once
    each `holder` of it has called that. Raises a [`CannotShare`] if the model cannot share a prefix exactly, be it for
    noise that there is `in_training` only.
    """
    check_adapter(model)
    model = causal_lm_of(model)
    before = vars(model.base_model).get("_prefix_sharing")
    disable_prefix_sharing(model)
    mixers = find_mixers(model)
    try:
        _check_layers(model, mixers)
        if in_training:
            check_dropout(model, shares_dropout)
        route = _Route(model)
        route.in_training = in_training
        route.install(model.base_model, mixers)
        model.base_model._prefix_sharing = route
        _compare(model, mixers, in_training)
        route.shares_starts = _shares_starts(model)
    except BaseException:
        disable_prefix_sharing(model)
        if before is not None and before.holders:
            before.install(model.base_model, mixers)
            model.base_model._prefix_sharing = before
        raise
    route.holders.update([] if before is None else before.holders)
    if holder is not None:
        route.holders.add(holder)


class CannotShare(ValueError):
    """A model cannot share prompts exactly, for a `reason` that is a sentence, and what else can be done."""

    def __init__(self, model: PreTrainedModel, reason: str, remedy: str = " Set `prefix_sharing=False`."):
        name = f"{type(model).__name__} ({model.config.model_type})"
        self.reason = f"{name} cannot share prompts: {reason}"
        super().__init__(f"`prefix_sharing=True` does not support {name}: {reason}{remedy}")


def check_adapter(model) -> None:
    """Raise a [`CannotShare`] if a PEFT model's adapter depends on more than single tokens."""
    if not is_peft_model(model):
        return
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise CannotShare(model, f"{config.peft_type} puts learned tokens in front of each sequence.")
    if getattr(config, "alora_invocation_tokens", None) is not None:
        raise CannotShare(model, "aLoRA looks for its tokens in whole sequences.")
    if config.peft_type == "XLORA":
        raise CannotShare(model, "X-LoRA scales its adapters by what the model makes of whole sequences.")
    # Dropout that has layers is asked for there: `disable_dropout` may have switched it off
    active = {name: p for name, p in vars(config).items() if "dropout" in name and isinstance(p, float) and p > 0}
    for name, p in active.items():
        if not any(name in path.split(".") for path, _ in model.named_modules()):
            reason = f"the completions of a prompt would share the adapter's dropout. Set its `{name}` ({p}) to 0."
            raise CannotShare(model, reason, remedy="")


def _check_layers(model: PreTrainedModel, mixers: list[nn.Module]) -> None:
    text_config = model.config.get_text_config()
    implementation = text_config._attn_implementation

    if model.config.is_encoder_decoder or getattr(text_config, "cross_attention_layers", None):
        raise CannotShare(model, "only decoders without cross-attention can share a prompt.")
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    attending, with_state = layers_by_kind(text_config)
    if layer_types - SUPPORTED_LAYER_TYPES or not attending or {mixer.layer_idx for mixer in mixers} != with_state:
        if with_state:
            _check_version(model)
        with_state_types = sorted(layer_types - {"full_attention", "sliding_attention"})
        raise CannotShare(model, f"it has layers of type {with_state_types}, whose state cannot be shared.")
    # transformers does not say so of models with a state. The comparison below finds attention that does not.
    if not (model._supports_attention_backend or mixers):
        raise CannotShare(model, "its attention does not go through `transformers.AttentionInterface`.")
    if not is_softmax_attention(implementation):
        raise CannotShare(
            model,
            f"its attention implementation is {implementation!r}, which is not transformers' own, and need not be a "
            "softmax of scores. Load the model with `attn_implementation='sdpa'`.",
            remedy="",
        )
    if any("dynamic" in x.get("rope_type", "") for x in rope_parameters(text_config)):
        raise CannotShare(
            model,
            "its rotary embedding (dynamic) depends on the length of the whole sequence, and on earlier ones, so the "
            "prompt alone does not have the keys of the full sequence.",
        )
    if name := attends_to_later_tokens(model):
        raise CannotShare(model, f"{name} attends to later tokens, so a prompt depends on its completion.")


def _check_version(model: PreTrainedModel) -> None:
    if Version(transformers.__version__) < Version(_VERSION_OF_STATES):
        raise CannotShare(
            model,
            f"layers with a state, and Gemma 4, need transformers {_VERSION_OF_STATES} or higher, but "
            f"{transformers.__version__} is installed. Upgrade it.",
        )


def check_dropout(model: PreTrainedModel, shares_dropout: bool) -> None:
    """Raise a [`CannotShare`] if completions would share dropout, and may not."""
    causal_lm = causal_lm_of(model)
    for name, module in model.named_modules():
        # Attention that goes through the interface has a probability in place of a layer
        for attribute, p in ((attribute, getattr(module, attribute, None)) for attribute in _DROPOUTS):
            if not isinstance(p, float) or p == 0:
                continue
            shared = f"The completions of a prompt would share its dropout (that of `{name}` is {p})."
            if not isinstance(module, nn.Dropout):
                reason = f"load it with `{attribute}=0.0`, which `disable_dropout=True` does not do. {shared}"
                raise CannotShare(causal_lm, reason, remedy="")
            if not shares_dropout:
                reason = (
                    f"set `disable_dropout=True`, or for adapters `lora_dropout=0.0`. {shared} To have them do so, "
                    "which is exact in the mean only, pass `shares_dropout=True`."
                )
                raise CannotShare(causal_lm, reason, remedy="")


def _compare(model: PreTrainedModel, mixers: list[nn.Module], in_training: bool) -> None:
    """Try a shared prefix on a few tokens, with weights that are here."""
    error = 0.0
    try:
        if can_be_tried(model):
            error = error_of_passes(model, SharedPrefixPasses(PROBE_PREFIX_LENGTH), in_training)
    except Exception as exception:
        if isinstance(exception, WholeRowsError | torch.OutOfMemoryError) or "CUDA error" in str(exception):
            raise  # the fault of the model, or of the device, and not of the shared prompt
        text_config = model.config.get_text_config()
        if mixers or getattr(text_config, "hidden_size_per_layer_input", None):
            _check_version(model)
        reason = f"a shared prompt fails in it ({type(exception).__name__}: {exception})."
        raise CannotShare(model, reason) from exception
    if error != 0:  # not a number, too
        by = f"{100 * error:.3g}%" + (" (in training, where noise counts, too)" if in_training else "")
        reason = f"hidden states behind a shared prompt differ from those of whole sequences by {by}."
        raise CannotShare(model, reason)
    hidden_size = model.config.get_text_config().hidden_size
    for mixer in {type(mixer): mixer for mixer in mixers}.values():
        with gathered(mixer.parameters()):
            if ignores_state(mixer, Node(torch.arange(2)), hidden_size):
                raise CannotShare(model, f"{type(mixer).__name__} does not start from the state of a prompt.")


def _shares_starts(model: PreTrainedModel) -> bool | None:
    """
    Whether prompts can go on behind what they begin with, wherever their padding ends: not where a model adds learned
    vectors for the columns, or scales by them. None where it cannot be tried.
    """
    if not can_be_tried(model):
        return None

    def forward(backbone: nn.Module, *rows: torch.Tensor) -> PassesOutput:
        prompts = Prompts.of(*(x[:, :PROBE_PREFIX_LENGTH].cpu() for x in rows))
        tree = Tree.of_groups(prompts, group_size=1, common_length=PROBE_COMMON_LENGTH)
        return SharedPrefixPasses(PROBE_PREFIX_LENGTH, tree=tree).forward(backbone, *rows)

    try:
        error = error_of_passes(model, SimpleNamespace(forward=forward), prompts_alike=False)
        return error == 0 and not counts_positions(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as exception:
        logger.info(f"What prompts begin with is not shared between them: {type(exception).__name__}: {exception}")
        return False


def shares_starts(model: PreTrainedModel) -> bool | None:
    """Whether a model that [`enable_prefix_sharing`] has prepared shares what different prompts begin with, too; None
    if it could not be tried, and then it does not."""
    return causal_lm_of(model).base_model._prefix_sharing.shares_starts


def disable_prefix_sharing(model: PreTrainedModel, holder=None) -> None:
    """Take back what [`enable_prefix_sharing`] did, if it did. Other holders than this one may still need it."""
    model = causal_lm_of(model)
    route = vars(model.base_model).get("_prefix_sharing")
    if route is None:
        return
    if holder is not None:
        route.holders.discard(holder)
    if holder is None or not route.holders:
        del model.base_model._prefix_sharing
        route.remove(model.base_model)

"""Log-probabilities of completions behind prompts, for loops of one's own: each prompt goes through the model once.

lp = log_probs(model, prompt, completions)  # (N, C), with gradients

with shared_prompts(model, prompts) as shared:  # in parts, each with a backward of its own
    for rows, part in parts:
        loss_of(shared.log_probs(part, rows)).backward()
# here the prompts have had theirs: gradients are complete
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from threading import RLock
from typing import TypeAlias

import torch
from accelerate.state import is_initialized
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rloo_memory.prefix_sharing.config import check_tokens_per_forward
from rloo_memory.prefix_sharing.enabling import CannotShare, check_adapter, enable_prefix_sharing
from rloo_memory.prefix_sharing.fsdp2 import FSDPModule
from rloo_memory.prefix_sharing.hooks import has_parameter_hooks, versions_of, weights_of
from rloo_memory.prefix_sharing.images import MultimodalInputs
from rloo_memory.prefix_sharing.lm_head import causal_lm_of, logits_of
from rloo_memory.prefix_sharing.passes import position_shift
from rloo_memory.prefix_sharing.probe import dropouts, without_dropout
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses, prompts_of
from rloo_memory.prefix_sharing.tree import OpenTree, Prompts, Tree

TOKENS_OF_LOGITS = 1024  # whose logits exist at a time

Ids: TypeAlias = torch.Tensor | Sequence[int]

_lock = RLock()


def log_probs(
    model: PreTrainedModel,
    prompts: Ids | Sequence[Ids],
    completions: Sequence[Ids],
    tokens_per_forward: int | None = None,
    temperature: float = 1.0,
    shares_dropout: bool = False,
) -> torch.Tensor:
    """
    Log-probability of each token of completions. Equal prompts go through the model once, and so does what prompts
    that differ begin with, if it is long enough to save time: a system prompt, examples, or earlier turns.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model. The first call tries it on a few tokens.
        prompts (`torch.Tensor` of shape `(P,)`, or a sequence of N of them):
            Token ids of the prompt of all completions, or of each. Lists and arrays of numbers will do as well.
        completions (sequence of N `torch.Tensor` of shape `(C_i,)`):
            Token ids.
        tokens_per_forward (`int`, *optional*):
            Tokens of completions that go through the model together. Each part but the last is computed again in the
            backward, so memory does not grow with N.
        temperature (`float`, *optional*, defaults to `1.0`):
            What logits are divided by.
        shares_dropout (`bool`, *optional*, defaults to `False`):
            Whether the completions of a prompt may share the dropout of its tokens.

    Returns:
        `torch.Tensor` of shape `(N, C)`: Log-probabilities, in float32 at least, 0 behind the end of a completion.

    Raises:
        ValueError: If the model cannot share prompts exactly, or an argument is not as it must be.
    """
    check_tokens_per_forward(tokens_per_forward)
    prepare(model, temperature, shares_dropout)
    completion_ids = ids_of(completions, "completions")
    rows = _Rows(model, ids_of(prompts, "prompts", len(completion_ids)), completion_ids)
    tree = Tree.of(rows.prompts, positions_from_zero=True)
    return rows.score(SharedPrefixPasses(rows.width, tokens_per_forward=tokens_per_forward, tree=tree), temperature)


class shared_prompts:
    """
    Prompts whose completions are scored in parts of any size, each with a backward of its own. The backward of the
    prompts, which is done once, runs where the `with` block ends. Weights must stay as they are inside of it.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model.
        prompts (`torch.Tensor` of shape `(P,)`, or a sequence of them):
            Token ids of one prompt, or of several.
        temperature (`float`, *optional*, defaults to `1.0`), shares_dropout (`bool`, *optional*, defaults to `False`):
            As for [`log_probs`].

    Raises:
        ValueError: As [`log_probs`].
    """

    def __init__(self, model, prompts: Ids | Sequence[Ids], temperature: float = 1.0, shares_dropout: bool = False):
        prepare(model, temperature, shares_dropout)
        self.model, self.temperature = model, temperature
        self.prompt_ids = ids_of(prompts, "prompts")
        self.width = max(map(len, self.prompt_ids))
        prompts = _Rows(model, self.prompt_ids, self.prompt_ids).prompts
        # With other adapters, in other precision, and with `longrope` in long rows, a prompt has other keys
        self.trees: defaultdict[tuple, Tree] = defaultdict(
            lambda: OpenTree.of(prompts, every_prompt=True, positions_from_zero=True)
        )
        self.state: tuple | None = None  # of the model where the block began

    def __enter__(self) -> "shared_prompts":
        self.state = self._state()
        return self

    def _state(self) -> tuple:
        in_training = tuple(module.training for module in (self.model, *dropouts(self.model)))
        return tuple(versions_of(self.model)), weights_of(self.model), in_training

    def log_probs(self, completions: Sequence[Ids], rows: Sequence[int] | None = None) -> torch.Tensor:
        """
        Log-probability of each token of some completions. Those of a reference, with other adapters or none, are
        scored without gradients.

        Args:
            completions (sequence of N `torch.Tensor` of shape `(C_i,)`):
                Token ids.
            rows (sequence of N `int`, *optional*):
                Which of the prompts each of them has. If `None`, the first.

        Returns:
            `torch.Tensor` of shape `(N, C)`: Log-probabilities, in float32 at least, 0 behind the end of a completion.
        """
        state = self._check(torch.is_grad_enabled())
        if torch.is_grad_enabled() and has_parameter_hooks(self.model):
            raise RuntimeError(
                "A hook takes the gradient of a parameter behind each part, and there it lacks that of prompts. Ask "
                "`log_probs` in place of `shared_prompts`, or remove the hook."
            )
        rows = [0] * len(completions) if rows is None else [int(row) for row in rows]
        if len(rows) != len(completions) or not all(0 <= row < len(self.prompt_ids) for row in rows):
            raise ValueError(
                f"`rows` must be {len(completions)} numbers from 0 to {len(self.prompt_ids) - 1}, one for each "
                f"completion, and is {rows}."
            )
        batch = _Rows(
            self.model, [self.prompt_ids[row] for row in rows], ids_of(completions, "completions"), self.width
        )
        device = batch.ids.device.type
        precision = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        tree = self.trees[state, precision, position_shift(self.model.config, batch.ids.shape[1])]
        return batch.score(SharedPrefixPasses(self.width, tree=tree, rows=rows), self.temperature)

    def _check(self, with_gradients: bool) -> tuple:
        """The state of the model, which is that of the block where there are gradients."""
        if self.state is None:
            raise RuntimeError(
                "`log_probs` is for the `with` block of `shared_prompts`, where prompts have their backward."
            )
        state = self._state()
        if with_gradients and state != self.state:
            raise RuntimeError(
                "Weights, adapters, dropout or what is trained are no longer as they were where the block of "
                "`shared_prompts` began, and prompts went through the model once. Change them behind the block. "
                "Inside, a reference is scored without gradients (`torch.no_grad`)."
            )
        return state

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self._check(with_gradients=True)
                for tree in self.trees.values():
                    tree.backward()
        finally:
            self.trees.clear()
            self.state = None


def prepare(model: PreTrainedModel, temperature: float, shares_dropout: bool) -> None:
    """Try a model if it was not, and raise a `ValueError` if it cannot share prompts."""
    if not temperature > 0:
        raise ValueError(f"`temperature` is {temperature}, and logits are divided by it: it must be above 0.")
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    if isinstance(model, DistributedDataParallel) or any(isinstance(module, FSDPModule) for module in modules):
        raise ValueError(
            f"{type(model).__name__} needs as many calls on every process, and here they depend on its prompts. With "
            "DDP, pass `model.module` and reduce gradients behind the backward; with FSDP, use `share_prompts`."
        )
    if not modules or not hasattr(causal_lm_of(model), "base_model"):
        raise ValueError(
            f"`model` is of type {type(model).__name__}, and must be a causal language model of transformers or PEFT. "
            "Of a wrapper, pass the one inside."
        )
    causal_lm, in_training = causal_lm_of(model), any(module.training for module in modules)
    drops = not shares_dropout and any(module.training for module in dropouts(model))
    try:
        with _lock:  # while a model is tried, another thread would read the weights of the trial
            check_adapter(model)  # which may be newer than the model's trial
            route = vars(causal_lm.base_model).get("_prefix_sharing")
            if drops or route is None or in_training and not route.in_training:
                enable_prefix_sharing(model, shares_dropout=not drops, in_training=in_training)
            if not getattr(causal_lm, "_makes_logits_of_states", False):
                check_head(model)
    except CannotShare as refusal:
        raise ValueError(refusal.reason) from None


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise a `ValueError` if logits are made of more than the last hidden state and the id of each token."""
    causal_lm, states, why = causal_lm_of(model), [], "."
    ids = _Rows(model, [torch.arange(4, device="cpu")], [torch.arange(4, 8, device="cpu")]).ids
    hook = causal_lm.base_model.register_forward_hook(lambda *given: states.append(given[2].last_hidden_state))
    try:
        with hook, without_dropout(model):
            logits = model(input_ids=ids, use_cache=False).logits
            apart = (logits_of(model, states[0].flip(1), ids.flip(1)).flip(1) - logits).abs()
        most = torch.finfo(causal_lm.dtype).eps ** 0.5 * logits.abs().nanmedian()
        causal_lm._makes_logits_of_states = bool(apart.where(logits.isfinite(), 0).max() <= most)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why = f" ({type(error).__name__}: {error}). Load it with `AutoModelForCausalLM`."
    if not getattr(causal_lm, "_makes_logits_of_states", False):
        raise ValueError(f"{type(causal_lm).__name__} does not make logits of a token's last state and id alone{why}")


def check_weights(model: PreTrainedModel, before: tuple, grad: torch.Tensor) -> None:
    """Raise a `RuntimeError` in a backward whose forward had other weights."""
    if weights_of(model) != before:
        raise RuntimeError(
            "Weights, adapters or what is trained have changed since the forward of these log-probabilities, whose "
            "backward computes logits again. Call it before."
        )


def ids_of(given, name: str, number: int | None = None) -> list[torch.Tensor]:
    """One-dimensional tensors of token ids on the host. Where texts are `number`, the ids of one stand for all."""
    try:
        is_one_text = len(given) > 0 and torch.as_tensor(given[0], device="cpu").ndim == 0
        texts = [given] * (number or 1) if is_one_text else list(given)
        texts = [torch.as_tensor(text, device="cpu") for text in texts]
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise ValueError(f"`{name}` must be token ids, as a tokenizer's `input_ids`, not {given!r:.80}.") from None
    if not texts:
        raise ValueError(f"`{name}` is empty.")
    if number is not None and len(texts) != number:
        raise ValueError(f"`{name}` has {len(texts)} texts, and there are {number} completions.")
    for i, text in enumerate(texts):
        if text.ndim != 1 or len(text) > 0 and text.is_floating_point() or len(text) == 0 and name == "prompts":
            raise ValueError(f"`{name}[{i}]` must be token ids, of shape (at least 1,), and has {tuple(text.shape)}.")
    return [text.long() for text in texts]


class _Rows:
    """Left-padded prompts followed by right-padded completions, of shape `(N, P + C)`."""

    def __init__(self, model, prompts: list[torch.Tensor], completions: list[torch.Tensor], width: int = 0):
        size = model.get_input_embeddings().weight.shape[0]
        tokens = torch.cat([*prompts, *completions])
        if len(wrong := tokens[(tokens < 0) | (tokens >= size)]) > 0:
            raise ValueError(f"A token id is {int(wrong[0])}, and the model has embeddings of {size} tokens.")
        self.model, self.width = model, max(width, *map(len, prompts))  # P
        parts = [
            torch.stack([torch.nn.functional.pad(x, (self.width - len(x), 0), value=-1) for x in prompts]),
            pad_sequence(completions, batch_first=True, padding_value=-1),
        ]
        # Where weights are offloaded, their own device is none that anything is computed on
        hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        ids = torch.cat(parts, dim=1).to(model.device if device is None else device)
        self.ids, self.mask = ids.clamp(min=0), (ids >= 0).long()

    @property
    def prompts(self) -> Prompts:
        ids, mask = (x[:, : self.width].cpu() for x in (self.ids, self.mask))
        return prompts_of(causal_lm_of(self.model).base_model, ids, mask, MultimodalInputs.of({}, len(ids)))

    def score(self, passes: SharedPrefixPasses, temperature: float) -> torch.Tensor:
        def of(states: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = logits_of(self.model, states, ids) / temperature
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return wide.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

        places = self.mask[:, self.width :].nonzero(as_tuple=True)
        tokens = self.ids[:, self.width - 1 : -1][places], self.ids[:, self.width :][places]
        # The autocast in which accelerate has put the forward of a model that it has prepared
        is_prepared = is_initialized() and hasattr(self.model, "_original_forward")
        with get_mixed_precision_context_manager(True) if is_prepared else nullcontext():
            output = passes.forward(causal_lm_of(self.model).base_model, self.ids, self.mask)
            states = output.last_hidden_state[:, :-1]
            chunks = zip(*(x.split(TOKENS_OF_LOGITS) for x in (states[places], *tokens)), strict=True)
            # Logits are computed again in the backward, so those of one chunk exist at a time
            values = torch.cat([checkpoint(of, *chunk, use_reentrant=False) for chunk in chunks])
        if values.requires_grad:
            values.register_hook(partial(check_weights, self.model, weights_of(self.model)))
        return values.new_zeros(states.shape[:2]).index_put(places, values)

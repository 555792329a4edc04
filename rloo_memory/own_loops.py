"""Log-probabilities of completions behind prompts, for loops of one's own: each prompt goes through the model once.

lp = log_probs(model, prompt, completions)  # (N, C), with gradients

with shared_prompts(model, prompts) as shared:  # in parts, each with a backward of its own
    for rows, part in parts:
        loss_of(shared.log_probs(part, rows)).backward()
# here the prompts have had theirs: gradients are complete
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rloo_memory.prefix_sharing.config import check_tokens_per_forward
from rloo_memory.prefix_sharing.enabling import CannotShare, enable_prefix_sharing
from rloo_memory.prefix_sharing.fsdp2 import FSDPModule
from rloo_memory.prefix_sharing.hooks import state_of
from rloo_memory.prefix_sharing.images import MultimodalInputs
from rloo_memory.prefix_sharing.lm_head import causal_lm_of, logits_of
from rloo_memory.prefix_sharing.probe import dropouts
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses, prompts_of
from rloo_memory.prefix_sharing.tree import OpenTree, Prompts, Tree

TOKENS_OF_LOGITS = 1024  # whose logits exist at a time

Ids: TypeAlias = torch.Tensor | Sequence[int]


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
            Token ids of the prompt of all completions, or of each. Lists of numbers will do as well.
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
    prepare(model, shares_dropout)
    rows = _Rows.of(model, ids_of(prompts, "prompts", len(completions)), ids_of(completions, "completions"))
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
        prepare(model, shares_dropout)
        self.model, self.temperature = model, temperature
        self.prompt_ids = ids_of(prompts, "prompts", 1 if is_one(prompts) else len(prompts))
        self.width = max(map(len, self.prompt_ids))
        prompts = _Rows.of(model, self.prompt_ids, self.prompt_ids).prompts
        self.tree, self.state = OpenTree.of(prompts, every_prompt=True, positions_from_zero=True), state_of(model)

    def __enter__(self) -> "shared_prompts":
        return self

    def log_probs(self, completions: Sequence[Ids], rows: Sequence[int] | None = None) -> torch.Tensor:
        """
        Log-probability of each token of some completions.

        Args:
            completions (sequence of N `torch.Tensor` of shape `(C_i,)`):
                Token ids.
            rows (sequence of N `int`, *optional*):
                Which of the prompts each of them has. If `None`, the first.

        Returns:
            `torch.Tensor` of shape `(N, C)`: Log-probabilities, in float32 at least, 0 behind the end of a completion.
        """
        rows = [0] * len(completions) if rows is None else [int(row) for row in rows]
        if len(rows) != len(completions) or not all(0 <= row < len(self.prompt_ids) for row in rows):
            raise ValueError(
                f"`rows` must be {len(completions)} numbers from 0 to {len(self.prompt_ids) - 1}, one for each "
                f"completion, and is {rows}."
            )
        batch = _Rows.of(
            self.model, [self.prompt_ids[row] for row in rows], ids_of(completions, "completions"), self.width
        )
        tree = self.tree
        if state_of(self.model) != self.state:  # a reference, say: its rows share among themselves
            tree, rows = Tree.of(batch.prompts, positions_from_zero=True), None
        return batch.score(SharedPrefixPasses(self.width, tree=tree, rows=rows), self.temperature)

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.tree.backward()
        self.tree.close()


def prepare(model: PreTrainedModel, shares_dropout: bool) -> None:
    """Try a model if it was not, and raise a `ValueError` if it cannot share prompts."""
    if isinstance(model, DistributedDataParallel) or any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} needs as many calls on every process, and here they depend on its prompts. With "
            "DDP, pass `model.module` and reduce gradients behind the backward; with FSDP, use `share_prompts`."
        )
    causal_lm = causal_lm_of(model)
    drops = model.training and not shares_dropout and dropouts(model)
    if drops or vars(causal_lm.base_model).get("_prefix_sharing") is None:
        try:
            enable_prefix_sharing(model, shares_dropout)
        except CannotShare as refusal:
            raise ValueError(refusal.reason) from None


def is_one(ids) -> bool:
    """Whether these are the ids of one text, and not those of several."""
    return ids.ndim == 1 if isinstance(ids, torch.Tensor) else len(ids) > 0 and isinstance(ids[0], int)


def ids_of(given, name: str, number: int | None = None) -> list[torch.Tensor]:
    """One-dimensional tensors of token ids on the host. The ids of one text stand for `number` of them."""
    texts = [given] * number if number is not None and is_one(given) else list(given)
    if number is not None and len(texts) != number:
        raise ValueError(f"`{name}` has {len(texts)} texts, and there are {number} completions.")
    texts = [torch.as_tensor(text).cpu() for text in texts]
    for i, text in enumerate(texts):
        if text.ndim != 1 or len(text) == 0 or text.is_floating_point():
            raise ValueError(f"`{name}[{i}]` must be token ids, of shape (at least 1,), and has {tuple(text.shape)}.")
    return [text.long() for text in texts]


@dataclass(frozen=True)
class _Rows:
    """Left-padded prompts followed by right-padded completions, of shape `(N, P + C)`."""

    model: PreTrainedModel
    ids: torch.Tensor
    mask: torch.Tensor
    width: int  # P

    @classmethod
    def of(cls, model, prompts: list[torch.Tensor], completions: list[torch.Tensor], width: int = 0) -> "_Rows":
        if not completions:
            raise ValueError("`completions` is empty.")
        size, most = model.get_input_embeddings().weight.shape[0], max(int(x.max()) for x in (*prompts, *completions))
        if most >= size:
            raise ValueError(f"A token id is {most}, and the model has embeddings of {size} tokens.")
        width = max(width, *map(len, prompts))
        parts = [
            torch.stack([torch.nn.functional.pad(x, (width - len(x), 0), value=-1) for x in prompts]),
            pad_sequence(completions, batch_first=True, padding_value=-1),
        ]
        ids = torch.cat(parts, dim=1).to(model.device)
        return cls(model, ids.clamp(min=0), (ids >= 0).long(), width)

    @property
    def causal_lm(self) -> PreTrainedModel:
        return causal_lm_of(self.model)

    @property
    def prompts(self) -> Prompts:
        ids, mask = (x[:, : self.width].cpu() for x in (self.ids, self.mask))
        return prompts_of(self.causal_lm.base_model, ids, mask, MultimodalInputs.of({}, len(ids)))

    def score(self, passes: SharedPrefixPasses, temperature: float) -> torch.Tensor:
        states = passes.forward(self.causal_lm.base_model, self.ids, self.mask).last_hidden_state[:, :-1]
        places = self.mask[:, self.width :].nonzero(as_tuple=True)
        targets = self.ids[:, self.width :][places]
        chunks = zip(states[places].split(TOKENS_OF_LOGITS), targets.split(TOKENS_OF_LOGITS), strict=True)

        def of(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = logits_of(self.causal_lm, states) / temperature
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return wide.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

        # Logits are computed again in the backward, so those of one chunk exist at a time
        values = torch.cat([checkpoint(of, *chunk, use_reentrant=False) for chunk in chunks])
        return values.new_zeros(states.shape[:2]).index_put(places, values)

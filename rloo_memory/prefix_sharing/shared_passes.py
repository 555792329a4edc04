"""
Prefix sharing: the completions of a prompt attend to keys and values that are computed once for all of them.

The shared prefix is the prompt without its last token, and every completion is preceded by that last token. So the
prompt pass only has to leave keys and values behind, and the first completion token is scored like any other. What all
prompts begin with goes through the model before them, and they continue it.

Shape suffixes: B rows, P prompt columns, C completion columns, S prefix tokens, T tokens of a packed pass, N rows that
share a prompt, H hidden size, D head size, L tokens that all prompts begin with.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .common_start import CommonStart, first_columns, first_tokens
from .routing import ReadPrefix, RecordPrefix, running
from .fsdp2 import unshard_in_backward
from .images import MultimodalInputs, rope_position_ids
from .memory import SharedPrefix
from .micro_batches import OpenPrefix
from .passes import (
    PassesOutput,
    check_mask,
    completion_states,
    load_balancing_loss,
    pass_inputs,
    position_shift,
    router_sums,
    run_passes,
    same_number_everywhere,
    split_by_tokens,
    to_device,
)


def group_rows(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, group_size: int | None, multimodal: MultimodalInputs
) -> list[torch.Tensor]:
    """
    Indices of the rows that share a prompt and its images, one tensor a prompt, in the order in which the prompts
    appear. Rows share only within a block of `group_size` rows, so that two equal prompts stay two groups, as on the
    other processes.

    Raises:
        ValueError: If a prompt has no token.
    """
    empty = (prompt_mask.sum(1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"The prompt of row {empty[0]} of the batch is empty, and a completion needs a token to follow. Remove "
            "empty prompts from the dataset."
        )
    masked_ids = prompt_ids.masked_fill(prompt_mask == 0, -1)
    blocks = torch.arange(len(prompt_ids), device=prompt_ids.device) // (group_size or len(prompt_ids))
    _, group_of_row = torch.unique(torch.cat([blocks[:, None], masked_ids], dim=1), dim=0, return_inverse=True)
    with_text = {}
    for row, text in enumerate(group_of_row.tolist()):
        with_text.setdefault(text, []).append(row)
    groups = [rows for rows_with_text in with_text.values() for rows in multimodal.with_same_images(rows_with_text)]
    return [torch.tensor(rows, device=prompt_ids.device) for rows in sorted(groups)]


def at_least_one(ids: torch.Tensor) -> torch.Tensor:
    # A prompt of one token has no prefix, but it takes a pass all the same, with any token. Processes that shard the
    # weights gather them together in every pass, so the number of passes must not depend on the data.
    return ids if len(ids) > 0 else ids.new_zeros(1)


def _window(backbone: nn.Module) -> int | None:
    """Number of tokens that layers with a window see, if a model has any."""
    return getattr(backbone.config.get_text_config(), "sliding_window", None)


def prompt_pass(
    forward: Callable,
    inputs: dict[str, torch.Tensor],
    positions: torch.Tensor,
    backbone: nn.Module,
    read_once: bool = False,
    parent: SharedPrefix | None = None,
    **kwargs,
):
    """
    Run a prompt without its last token through a model, or what of it continues `parent`. Returns the prefix that it
    leaves, and the output.
    """
    position_ids = rope_position_ids(backbone, inputs)
    prefix = SharedPrefix(positions, read_once=read_once, parent=parent)
    if position_ids is None:
        position_ids = at_least_one(positions)[None]
    else:
        position_ids = position_ids + (0 if parent is None else parent.size)
        prefix.offset = int(position_ids.max() - positions[-1])
    context = record = RecordPrefix(prefix)
    masks = nullcontext()
    if parent is not None:
        places = torch.arange(len(positions), device=positions.device)
        row = torch.zeros_like(places)
        context = ReadPrefix.of(parent, positions, row, places, [len(places)], _window(backbone), record)
        masks = running(context, backbone._prefix_sharing.configs)
        inputs = {**inputs, "attention_mask": torch.ones_like(places)[None]}
    try:
        with masks:
            outputs = forward(**inputs, position_ids=position_ids, use_cache=False, shared_prefix=context, **kwargs)
    finally:
        record.close()
    return prefix, outputs


def _look_up(
    backbone: nn.Module,
    ids_of_prompts: list[torch.Tensor],
    ids_of_passes: list[torch.Tensor],
    have_images: list[bool],
    together: bool,
    keep_saved: AbstractContextManager,
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Tokens of each prompt and of each pass as the model takes them, from one lookup, or from one for each kind."""
    # The model itself looks for the places of images among the tokens
    text_ids = [ids for ids, has_images in zip(ids_of_prompts, have_images, strict=True) if not has_images]
    if together:
        inputs = iter(pass_inputs(backbone, text_ids + ids_of_passes))
    else:
        with keep_saved:
            of_text = pass_inputs(backbone, text_ids) if text_ids else []
        inputs = iter(of_text + pass_inputs(backbone, ids_of_passes))
    prompts = [
        {"input_ids": ids} if has_images else next(inputs)
        for ids, has_images in zip(ids_of_prompts, have_images, strict=True)
    ]
    return prompts, list(inputs)


def _run_prompt(
    backbone: nn.Module, inputs: dict[str, torch.Tensor], positions: torch.Tensor, **kwargs
) -> SharedPrefix:
    """The prefix that a prompt leaves, complete, with what its router chose where that is asked for."""
    prefix, outputs = prompt_pass(backbone, inputs, positions, backbone, **kwargs)
    if missing := prefix.missing_layers(backbone.config.get_text_config()):
        raise ValueError(
            f"Layers {missing} of {type(backbone).__name__} did not pass their keys and values to "
            "`transformers.AttentionInterface`, or their states to the cache that they were called with, so its prompts "
            "cannot be shared. Set `prefix_sharing=False`."
        )
    unshard_in_backward(backbone, prefix.layers())
    if "output_router_logits" in kwargs and len(positions) > 0:
        prefix.write_router(router_sums(backbone, outputs.router_logits))
    return prefix


def _run_completions(backbone: nn.Module, context: ReadPrefix, inputs: dict[str, torch.Tensor], **kwargs) -> tuple:
    """Hidden states of a pass of completions, of shape `(T, H)`, and what its router chose where that is asked for."""
    with running(context, backbone._prefix_sharing.configs):
        outputs = backbone(
            **inputs,
            # Without a mask, restarting positions would be taken for a padding-free batch
            attention_mask=torch.ones_like(context.positions)[None],
            position_ids=context.positions[None] + context.prefix.offset,
            use_cache=False,
            shared_prefix=context,
            **kwargs,
        )
    sums = router_sums(backbone, outputs.router_logits) if "output_router_logits" in kwargs else None
    return outputs.last_hidden_state[0], sums


@dataclass(frozen=True)
class SharedPrefixPasses:
    """
    Each distinct prompt goes through the model once, then its completions in passes, packed without padding.

    The backward adds up the gradient of the prompt's keys and values before it goes through the prompt, once. With
    `tokens_per_forward`, each pass but the last is checkpointed as a whole, so the activations of one pass are alive at
    a time. Without, the passes keep what the same completions keep in whole rows. So they do on the CPU with
    `activation_offloading` and gradient checkpointing.

    Args:
        prefix_length (`int`):
            Number of prompt columns, P.
        tokens_per_forward (`int`, *optional*):
            Tokens of completions of a prompt that go through the model together, with the last prompt token in front of
            each completion. A completion that is longer goes by itself. If `None`, their number is not bounded.
        completions_per_forward (`int`, *optional*):
            Completions of a prompt that go through the model together without `tokens_per_forward`. If `None`, all.
        group_size (`int`, *optional*):
            Number of consecutive rows with the same prompt. It fixes the number of prompts, which must be the same on
            all processes if they shard the weights. If `None`, all rows with the same prompt share it.
        num_images (`list[int]`, *optional*):
            Number of images of each row, if there are any.
        num_tiles (`list[int]`, *optional*):
            Number of tiles of each row, for models whose pixel values are indexed by tile.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Whether saved activations are offloaded to the CPU.
        open_prefix (`OpenPrefix`, *optional*):
            Prefix of the prompt of all rows, if its completions are spread over several micro-batches. Ignored without
            gradients and outside of a micro-batch.
        common_start (`CommonStart`, *optional*):
            What all prompts begin with. Ignored where they do not.
    """

    prefix_length: int
    tokens_per_forward: int | None = None
    completions_per_forward: int | None = None
    group_size: int | None = None
    num_images: list[int] | None = None
    num_tiles: list[int] | None = None
    activation_offloading: bool = False
    open_prefix: OpenPrefix | None = None
    common_start: CommonStart | None = None

    def forward(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        output_router_logits: bool = False,
        **multimodal_inputs: torch.Tensor,
    ) -> PassesOutput:
        """
        Hidden states of completions.

        Args:
            backbone ([`~transformers.PreTrainedModel`]):
                Model without its LM head, prepared by [`enable_prefix_sharing`].
            input_ids (`torch.Tensor` of shape `(B, P + C)`):
                Left-padded prompts followed by right-padded completions.
            attention_mask (`torch.Tensor` of shape `(B, P + C)`):
                1 for tokens, 0 for padding.
            output_router_logits (`bool`, *optional*, defaults to `False`):
                Whether to compute the load-balancing loss of a Mixture-of-Experts model.
            **multimodal_inputs (`torch.Tensor`):
                Images of the prompts, and what the model takes for each token beside its id.

        Returns:
            [`PassesOutput`]: Hidden states, and the load-balancing loss.
        """
        # Passes are put together on the host, from one copy of the batch: whatever is read from a device waits for
        # all that it still has to compute
        host_ids, host_mask = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu()
        multimodal = MultimodalInputs.of(multimodal_inputs, len(input_ids), self.num_images, self.num_tiles)
        multimodal.check(backbone, host_ids, host_mask, self.prefix_length)
        check_mask(host_mask)
        prompt_ids, prompt_mask = host_ids[:, : self.prefix_length], host_mask[:, : self.prefix_length]
        groups = group_rows(prompt_ids, prompt_mask, self.group_size, multimodal)
        open_prefix = self.open_prefix if torch.is_grad_enabled() else None
        if open_prefix is not None and not open_prefix.is_entered:  # rows that are no part of a training step
            open_prefix = None
        if open_prefix is not None:
            open_prefix.check_prompt(prompt_ids.masked_fill(prompt_mask == 0, -1), len(groups))

        # What later rows read must outlive the backward of these, and an offloading that ends with it
        keeping = nullcontext()
        if self.activation_offloading:
            keeping = saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)
        shift = position_shift(backbone.config, input_ids.shape[1], self.prefix_length)
        kwargs = {"output_router_logits": True} if output_router_logits else {}
        start = None
        may_share = self.common_start is not None and shift == 0 and multimodal.take_common_start(backbone)
        if may_share and self.common_start.is_shared_by(prompt_ids, prompt_mask, len(groups)):
            start = self._run_start(backbone, input_ids, prompt_ids, prompt_mask, multimodal, keeping, **kwargs)

        # A prompt that went through the model with an earlier micro-batch does not go again
        new_groups = [] if open_prefix is not None and open_prefix.has_prefix else groups
        has_token = host_mask[:, self.prefix_length - 1 :] != 0  # (B, C + 1)
        has_token[:, 0] = True  # the last prompt token
        passes = self.divide(groups, has_token, input_ids.device)
        # Columns are positions: those that a left-padded row has when it goes through the model by itself. Behind what
        # rows of any padding begin with, they count from there.
        start_size = 0 if start is None else start.size
        shifts = torch.full((len(host_ids),), shift) if start is None else -first_columns(prompt_mask)
        tokens = [self._prompt_tokens(prompt_mask[rows[0]], rows[0], start_size, shifts) for rows in new_groups]
        tokens += [self._completion_tokens(has_token[rows], rows, shifts) for _, rows in passes]
        tokens = to_device(torch.cat(tokens, dim=1), input_ids.device).split([x.shape[1] for x in tokens], dim=1)
        of_prompts, of_passes = tokens[: len(new_groups)], tokens[len(new_groups) :]

        keep_saved = nullcontext() if open_prefix is None else keeping
        ids = [input_ids[row, column][None] for row, column, *_ in tokens]
        have_images = [bool(multimodal.images[rows[0]]) for rows in new_groups]
        ids_of_prompts, ids_of_passes = ids[: len(new_groups)], ids[len(new_groups) :]
        prompts, completions = _look_up(
            backbone, ids_of_prompts, ids_of_passes, have_images, open_prefix is None, keep_saved
        )
        prefixes = []
        for group, (rows, prompt, tokens) in enumerate(zip(new_groups, prompts, of_prompts, strict=True)):
            _, columns, positions, _, _ = tokens
            prompt |= multimodal.of_prefix(int(rows[0]), columns)
            positions = positions[: int(prompt_mask[rows[0], :-1].sum()) - start_size]
            read_once = open_prefix is None and sum(group == group_of_pass for group_of_pass, _ in passes) == 1
            with keep_saved, nullcontext() if start is None else self.common_start.read_by_prompts(start):
                prefix = _run_prompt(backbone, prompt, positions, read_once=read_once, parent=start, **kwargs)
            prefixes.append(prefix)
        if open_prefix is not None:
            prefixes = [open_prefix.go_on(*prefixes)]
        else:
            for prefix in prefixes:
                prefix.lead_on()

        window = _window(backbone)
        contexts = [
            ReadPrefix.of(prefixes[group], positions, completion, place, has_token[rows].sum(1).tolist(), window)
            for (group, rows), (_, _, positions, completion, place) in zip(passes, of_passes, strict=True)
        ]
        outputs = run_passes(
            backbone,
            functools.partial(_run_completions, backbone, **kwargs),
            list(zip(contexts, completions, strict=True)),
            recompute=self.tokens_per_forward is not None,
            activation_offloading=self.activation_offloading,
        )
        rows, columns = [x[0] for x in of_passes], [x[1] - self.prefix_length + 1 for x in of_passes]
        last_hidden_state = completion_states([x for x, _ in outputs], rows, columns, has_token.shape)
        aux_loss = None
        if output_router_logits:
            # A prompt counts once for each of its rows
            sums = [
                [len(rows) * x for x in router]
                for rows, of_group in zip(groups, prefixes, strict=True)
                for prefix in of_group.path
                if (router := prefix.read_router()) is not None
            ]
            aux_loss = load_balancing_loss(sums + [pass_sums for _, pass_sums in outputs])
        return PassesOutput(last_hidden_state, aux_loss)

    def _run_start(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        multimodal: MultimodalInputs,
        keeping: AbstractContextManager,
        **kwargs,
    ) -> SharedPrefix:
        """What the prompts begin with, which goes through the model unless it did with earlier rows."""
        start, prefix = self.common_start, None
        ids = first_tokens(prompt_ids[:1], prompt_mask[:1], start.length)
        if not start.has_prefix:
            positions = to_device(torch.arange(start.length), input_ids.device)
            with keeping if start.is_open else nullcontext():
                (inputs,) = pass_inputs(backbone, [to_device(ids, input_ids.device)])
                inputs |= multimodal.of_tokens(0, positions + int(first_columns(prompt_mask[:1])))
                prefix = _run_prompt(backbone, inputs, positions, **kwargs)
        return start.go_on(ids[0], prefix)

    # Of each token of a prompt or pass: its row and column in the batch, its position, its completion in the pass and its
    # place there

    def _prompt_tokens(
        self, prompt_mask: torch.Tensor, row: torch.Tensor, start_size: int, shifts: torch.Tensor
    ) -> torch.Tensor:
        columns = at_least_one(prompt_mask[:-1].nonzero().squeeze(1)[start_size:])
        return torch.stack([row.expand_as(columns), columns, columns + shifts[row], columns, columns])

    def _completion_tokens(self, has_token: torch.Tensor, rows: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        completion, column = has_token.nonzero(as_tuple=True)
        place = has_token.cumsum(1)[completion, column] - 1
        column = column + self.prefix_length - 1
        return torch.stack([rows[completion], column, column + shifts[rows][completion], completion, place])

    def divide(
        self, groups: list[torch.Tensor], has_token: torch.Tensor, device: torch.device
    ) -> list[tuple[int, torch.Tensor]]:
        """
        Group and rows of each pass of completions, on the host. `has_token` of shape `(B, C + 1)` begins with the last
        prompt token.
        """
        passes = []
        for group, rows in enumerate(groups):
            if self.tokens_per_forward is None:
                chunks = rows.split(self.completions_per_forward or len(rows))
            else:
                lengths = has_token[rows].sum(1).tolist()
                chunks = [rows[chunk] for chunk in split_by_tokens(lengths, self.tokens_per_forward, packed=True)]
            passes.extend((group, chunk) for chunk in chunks)
        return passes if self.tokens_per_forward is None else same_number_everywhere(passes, device)

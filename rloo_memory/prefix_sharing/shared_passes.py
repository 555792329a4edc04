"""
Prefix sharing: the completions of a prompt attend to keys and values that are computed once for all of them.

The shared prefix is the prompt without its last token, and every completion is preceded by that last token. So the
prompt pass only has to leave keys and values behind, and the first completion token is scored like any other. What
prompts begin with goes through the model before them, and they continue it: they are branches of a tree.

Shape suffixes: B rows, P prompt columns, C completion columns, T tokens of a packed pass, H hidden size.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .fsdp2 import unshard_in_backward
from .hooks import watched
from .images import MultimodalInputs, rope_position_ids
from .nodes import Node, Path, watch_backward
from .passes import (
    PassesOutput,
    TokenCount,
    check_mask,
    completion_states,
    has_several_processes,
    load_balancing_loss,
    on_any_that_gathers,
    pass_inputs,
    position_shift,
    router_sums,
    run_passes,
    same_number_everywhere,
    split_by_tokens,
    to_device,
)
from .routing import ReadPrefix, RecordPrefix, running
from .tree import Branch, Prompts, Tree


def at_least_one(ids: torch.Tensor) -> torch.Tensor:
    # A branch of no token takes a pass all the same, with any token. Processes that shard the weights gather them
    # together in every pass, so the number of passes must not depend on the data.
    return ids if len(ids) > 0 else ids.new_zeros(1)


def _window(backbone: nn.Module) -> int | None:
    """Number of tokens that layers with a window see, if a model has any."""
    return getattr(backbone.config.get_text_config(), "sliding_window", None)


def prompts_of(
    backbone: nn.Module,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    multimodal: MultimodalInputs,
    begin_alike: bool = True,
) -> Prompts:
    """
    Left-padded prompts of shape `(B, P)`, on the host, as `backbone` can share them: only equal ones, if those that
    differ do not `begin_alike` for it.
    """
    route = getattr(backbone, "_prefix_sharing", None)  # None: taken back
    begin_alike = begin_alike and route is not None and route.shares_starts and multimodal.take_common_start(backbone)
    image_token_id = getattr(backbone.config, "image_token_id", None)
    return Prompts.of(prompt_ids, prompt_mask, multimodal, begin_alike, image_token_id)


def prompt_pass(
    forward: Callable,
    inputs: dict[str, torch.Tensor],
    positions: torch.Tensor,
    backbone: nn.Module,
    parent: Path | None = None,
    **kwargs,
):
    """The node that the tokens of a branch leave in a model, which continue `parent`, and the model's output."""
    position_ids = rope_position_ids(backbone, inputs)
    node = Node(positions)
    if position_ids is None:
        position_ids = at_least_one(positions)[None]
    else:
        position_ids = position_ids + (0 if parent is None else positions[0])
        node.offset = int(position_ids.max() - positions[-1])
    record = RecordPrefix(node)
    context: RecordPrefix | ReadPrefix = record
    if parent is not None:
        places = torch.arange(len(positions), device=positions.device)
        row = torch.zeros_like(places)
        context = ReadPrefix(parent, positions, row, places, [len(places)], _window(backbone), record)
        inputs = {**inputs, "attention_mask": torch.ones_like(places)[None]}
    route = getattr(backbone, "_prefix_sharing", None)  # None: taken back, and found out by what layers leave
    try:
        with running(context, [] if route is None else route.configs):
            outputs = forward(**inputs, position_ids=position_ids, use_cache=False, shared_prefix=context, **kwargs)
    finally:
        record.close()
    return node, outputs


class _Tokens:
    """Tokens of a branch, or of the rows of a pass, one after another."""

    def __init__(self, lengths: list[int], numbers: torch.Tensor, scored: torch.Tensor | None = None):
        self.lengths = lengths  # of each row
        # Row of the batch, column, position, row of the pass, and place in that row, (T,) each
        self.numbers = numbers
        self.row, self.column, self.position, self.of_pass, self.place = numbers
        self.scored = scored  # which of them are, None: all

    @classmethod
    def of(cls, rows: list[int], starts: list[int], ends: list[int], shifts: list[int]) -> "_Tokens":
        """Those of each row from one column to another, at positions that are a shift ahead of columns."""
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        with torch.device("cpu"):  # whatever the default is
            repeats = torch.tensor(lengths)
            row, start, shift = (torch.tensor(x).repeat_interleave(repeats) for x in (rows, starts, shifts))
            of_pass = torch.arange(len(rows)).repeat_interleave(repeats)
            place = torch.cat([torch.arange(length) for length in lengths])
        return cls(lengths, torch.stack([row, start + place, start + place + shift, of_pass, place]))

    @staticmethod
    def to(device: torch.device, tokens: "list[_Tokens]") -> "list[_Tokens]":
        """All of them on a device, in one copy."""
        numbers = to_device(torch.cat([x.numbers for x in tokens], dim=1), device)
        split = numbers.split([len(x.place) for x in tokens], dim=1)
        return [_Tokens(x.lengths, each, x.scored) for x, each in zip(tokens, split, strict=True)]

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of those that are scored."""
        return (self.row, self.column) if self.scored is None else (self.row[self.scored], self.column[self.scored])


def _run_pass(
    backbone: nn.Module, context: ReadPrefix, inputs: dict[str, torch.Tensor], scored: torch.Tensor | None, **kwargs
) -> tuple:
    """Hidden states of those tokens of a pass that are `scored`, of shape `(T, H)`, and what its router chose."""
    with running(context, backbone._prefix_sharing.configs):
        outputs = backbone(
            **inputs,
            # Without a mask, restarting positions would be taken for a padding-free batch
            attention_mask=torch.ones_like(context.positions)[None],
            position_ids=context.positions[None] + context.prefix.last.offset,
            use_cache=False,
            shared_prefix=context,
            **kwargs,
        )
    sums = router_sums(backbone, outputs.router_logits) if "output_router_logits" in kwargs else None
    states = outputs.last_hidden_state[0].to(context.positions.device)  # the last layers may be on another one
    return states if scored is None else states[scored], sums


class _Forward:
    """Rows on their way through a backbone: some of those of a tree, with this mask on the host."""

    def __init__(self, settings: "SharedPrefixPasses", backbone, input_ids, host_mask, multimodal, tree: Tree, rows):
        self.settings, self.backbone, self.input_ids, self.multimodal = settings, backbone, input_ids, multimodal
        self.tree, self.rows = tree, rows
        # Columns of the first token of each row, and behind the last
        self.starts = (settings.prefix_length - tree.prompts.lengths[list(rows)]).tolist()
        self.ends = (settings.prefix_length + host_mask[:, settings.prefix_length :].sum(1)).tolist()
        self.shift = position_shift(backbone.config, input_ids.shape[1])
        self.nodes = dict(tree.nodes)
        self.num_readers: Counter[Branch] = Counter()  # passes

    def run(self, **kwargs) -> PassesOutput:
        """What rows begin with, parents first; then their completions in passes; then all states in their places."""
        branches, passes = self.tree.new_branches(self.rows), self._divide()
        tokens = [self._tokens_of(branch) for branch in branches] + [self._tokens_behind(*each) for each in passes]
        tokens = _Tokens.to(self.input_ids.device, tokens)
        if self.settings.count is not None:
            self.settings.count.add(sum(max(1, sum(x.lengths)) for x in tokens), self.input_ids.numel())
        inputs = self._look_up(branches, tokens)
        readers = [branch.parent for branch in branches if branch.parent] + [branch for branch, _ in passes]
        self.num_readers.update(branch for reader in readers for branch in reader.path)
        for each in zip(branches, tokens, inputs, strict=False):
            self._run_branch(*each, **kwargs)
        tokens, window = tokens[len(branches) :], _window(self.backbone)
        contexts = [
            ReadPrefix(self._path(branch, self.rows[0]), x.position, x.of_pass, x.place, x.lengths, window)
            for (branch, _), x in zip(passes, tokens, strict=True)
        ]
        outputs = run_passes(
            self.backbone,
            functools.partial(_run_pass, self.backbone, **kwargs),
            list(zip(contexts, inputs[len(branches) :], [x.scored for x in tokens], strict=True)),
            recompute=self.settings.tokens_per_forward is not None,
            activation_offloading=self.settings.activation_offloading,
        )
        if not torch.is_grad_enabled():
            self.tree.leave(self.rows[-1] + 1)  # in training, behind the backward
        rows, columns = map(list, zip(*(x.places for x in tokens), strict=True))
        columns = [x - (self.settings.prefix_length - 1) for x in columns]
        shape = (len(self.rows), self.input_ids.shape[1] - self.settings.prefix_length + 1)
        states = completion_states([x for x, _ in outputs], rows, columns, shape)
        watch_backward(states, [context.prefix for context in contexts])
        return PassesOutput(states, self._aux_loss([sums for _, sums in outputs]) if kwargs else None)

    def _divide(self) -> list[tuple[Branch, torch.Tensor]]:
        """Rows of the batch that go through the model together, and the branch that they continue."""
        settings = self.settings
        passes: list[tuple[Branch, torch.Tensor]] = []
        rows_of: dict[Branch, list[int]] = {}
        for row, of_tree in enumerate(self.rows):
            rows_of.setdefault(self.tree.branch_of[of_tree], []).append(row)
        for branch, rows in rows_of.items():
            if settings.tokens_per_forward is None:
                chunks = torch.tensor(rows, device="cpu").split(settings.completions_per_forward or len(rows))
            else:
                lengths = self._tokens_behind(branch, torch.tensor(rows, device="cpu")).lengths
                chunks = split_by_tokens(lengths, settings.tokens_per_forward, packed=True)
                chunks = [torch.tensor([rows[i] for i in chunk], device="cpu") for chunk in chunks]
            passes.extend((branch, chunk) for chunk in chunks)
        if settings.tokens_per_forward is None:
            return passes
        return same_number_everywhere(passes, self.backbone, self.input_ids.device)

    def _first_row(self, branch: Branch) -> int:
        return next(row for row, of_tree in enumerate(self.rows) if of_tree in branch.rows)

    def _shift_of(self, branch: Branch, row: int) -> int:
        """What positions in a row are ahead of columns: columns are those of the first row of all that begin alike."""
        return self.tree.first_column(branch) - self.starts[row] + self.shift

    def _tokens_of(self, branch: Branch) -> _Tokens:
        row = self._first_row(branch)
        start = self.starts[row]
        return _Tokens.of([row], [start + branch.start], [start + branch.end], [self._shift_of(branch, row)])

    def _tokens_behind(self, branch: Branch, rows: torch.Tensor) -> _Tokens:
        """Of what prompts have behind a branch, their last tokens at least, and of their completions."""
        rows = rows.tolist()
        starts, ends = [self.starts[row] + branch.end for row in rows], [self.ends[row] for row in rows]
        tokens = _Tokens.of(rows, starts, ends, [self._shift_of(branch, row) for row in rows])
        is_scored = tokens.column >= self.settings.prefix_length - 1
        if not is_scored.all():
            tokens.scored = to_device(is_scored.nonzero().squeeze(1), self.input_ids.device)
        return tokens

    def _images_of(self, branch: Branch) -> dict[str, torch.Tensor]:
        row = self._first_row(branch)
        return self.multimodal.images[row] if self.tree.branch_of[self.rows[row]] is branch else {}

    def _look_up(self, branches: list[Branch], tokens: list[_Tokens]) -> list[dict[str, torch.Tensor]]:
        """Tokens as the model takes them, but ids of those that have another backward, or images among them."""
        ids = [at_least_one(self.input_ids[x.row, x.column])[None] for x in tokens]
        apart = {i for i, branch in enumerate(branches) if self.tree.outlives(branch) or self._images_of(branch)}
        together = iter(pass_inputs(self.backbone, [x for i, x in enumerate(ids) if i not in apart]))
        return [{"input_ids": x} if i in apart else next(together) for i, x in enumerate(ids)]

    def _run_branch(self, branch: Branch, tokens: _Tokens, inputs: dict[str, torch.Tensor], **kwargs) -> None:
        images, outlives = self._images_of(branch), self.tree.outlives(branch)
        parent = None if branch.parent is None else self._path(branch.parent, branch.rows[-1])
        # What later rows read must outlive the backward of these, and an offloading that ends with it
        keeping = saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)
        with keeping if outlives and self.settings.activation_offloading else nullcontext():
            if outlives and not images:
                (inputs,) = pass_inputs(self.backbone, [inputs["input_ids"]])
            of_tokens = self.multimodal.of_tokens(self._first_row(branch), at_least_one(tokens.column))
            inputs = {**inputs, **images, **of_tokens}
            node, outputs = prompt_pass(self.backbone, inputs, tokens.position, self.backbone, parent, **kwargs)
            if kwargs and len(tokens.position) > 0:
                node.write_router(router_sums(self.backbone, outputs.router_logits))
        if missing := node.missing_layers(self.backbone.config.get_text_config()):
            raise ValueError(
                f"Layers {missing} of {type(self.backbone).__name__} did not pass their keys and values to "
                "`transformers.AttentionInterface`, or their states to the cache that they were called with, so its "
                "prompts cannot be shared."
            )
        unshard_in_backward(self.backbone, node.slots)
        self.nodes[branch] = node
        self.tree.keep(branch, node, self.rows[-1] + 1)

    def _path(self, branch: Branch, row: int) -> Path:
        """What a pass continues whose backward waits for this row of the tree."""
        gradients = [self.tree.gradient(x, row, is_alone=self.num_readers[x] == 1) for x in branch.path]
        return Path(tuple(self.nodes[x] for x in branch.path), tuple(gradients))

    def _aux_loss(self, sums: list[tuple[torch.Tensor, torch.Tensor, int]]) -> torch.Tensor:
        """With what the routers chose in passes. A prompt counts once for each of its rows."""
        times = Counter(branch for row in self.rows for branch in self.tree.branch_of[row].path)
        for branch, number in times.items():
            router = self.nodes[branch].read_router(self.tree.gradient(branch, self.rows[0], is_alone=False))
            if router is not None:
                chosen, probs, count = router
                sums.append((number * chosen, number * probs, number * count))
        return load_balancing_loss(sums)


@dataclass(frozen=True)
class SharedPrefixPasses:
    """
    What prompts begin with goes through the model once, then the completions in passes, packed without padding.

    The backward adds up the gradient of the keys and values of a node before it goes through it, once. With
    `tokens_per_forward`, each pass but the last is checkpointed as a whole, so that activations of one pass are alive
    at a time. Without, the passes keep what the same completions keep in whole rows. So they do on the CPU with
    `activation_offloading` and gradient checkpointing.
    """

    prefix_length: int  # number of prompt columns, P
    # Tokens of completions that go through the model together, with what its prompt has of its own in front of each,
    # the last token at least; a completion that is longer goes by itself. None: no bound
    tokens_per_forward: int | None = None
    completions_per_forward: int | None = None  # where there is no bound. None: all that continue the same node
    num_images: list[int] | None = None  # of each row
    num_tiles: list[int] | None = None  # of each row, for models whose pixel values are indexed by tile
    activation_offloading: bool = False
    tree: Tree | None = None  # of these and other rows. If it is None or not theirs, they share among themselves
    rows: Sequence[int] | None = None  # which row of the tree each row is. None: all of them, in this order
    group_size: int = 1  # without a tree, consecutive rows that share on each of several processes
    count: TokenCount | None = None

    def forward(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        output_router_logits: bool = False,
        **multimodal_inputs: torch.Tensor,
    ) -> PassesOutput:
        """
        Hidden states of completions. Ids and mask, 1 for tokens, have shape `(B, P + C)`: left-padded prompts followed
        by right-padded completions. With `output_router_logits`, there is the load-balancing loss of experts, too. The
        inputs beside these are images of the prompts, and what the model takes for each token beside its id.
        """
        # Passes are put together on the host, from one copy of the batch: whatever is read from a device waits for
        # all that it still has to compute
        host_ids, host_mask = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu()
        multimodal = MultimodalInputs.of(multimodal_inputs, len(input_ids), self.num_images, self.num_tiles)
        multimodal.check(backbone, host_ids, host_mask, self.prefix_length)
        check_mask(host_mask)
        prompt_ids, prompt_mask = (x[:, : self.prefix_length] for x in (host_ids, host_mask))
        prompts = prompts_of(backbone, prompt_ids, prompt_mask, multimodal)
        tree, rows = self._tree_of(prompts, backbone, input_ids.device)
        kwargs = {"output_router_logits": True} if output_router_logits else {}
        try:
            route = getattr(backbone, "_prefix_sharing", None)  # None: taken back, and found out by what layers leave
            with watched(backbone, frozenset() if route is None else route.hooks):
                return _Forward(self, backbone, input_ids, host_mask, multimodal, tree, rows).run(**kwargs)
        except BaseException:
            if not torch.is_grad_enabled():  # in training, who fails may try again, with what other rows left
                tree.close()
            raise

    def _tree_of(self, prompts: Prompts, backbone: nn.Module, device: torch.device) -> tuple[Tree, Sequence[int]]:
        """The tree of these prompts, and which of its rows they are."""
        all_rows = range(len(prompts))
        rows = all_rows if self.rows is None else self.rows
        # A subclass may have put the rows of one process alone in another order
        is_other = self.tree is None or not self.tree.has(prompts, rows)
        if not on_any_that_gathers(is_other, backbone, device) and self.tree is not None:
            return self.tree, rows
        # Processes that shard the weights must call the model equally often, and do not know each other's rows here
        tree = Tree.of_groups(prompts, self.group_size) if has_several_processes() else Tree.of(prompts)
        return tree, all_rows

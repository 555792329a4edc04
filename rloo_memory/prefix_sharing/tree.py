"""
Prefix sharing: the prompts of an update, or of a batch that is scored or generated, as a tree. What at least two begin
with goes through the model once: a system prompt, a task, earlier turns of a rollout, the prompt of a group.

A branch of the tree is a run of tokens; a node is what it left in the model. One that later micro-batches read, too,
has its backward when the last of them has. There is one rule for gradients: a read goes through a node if both have
their backward together; else it ends there and adds up.

Where processes reduce gradients, they do so in the last backward of an update, which has to have all of them: there
the backward of a node is part of that of the last micro-batch that reads it. That takes more memory: autograd holds
what a weight gets from the reads until it has what the weight gets from the node.

Shape suffixes: B rows, P prompt columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .images import MultimodalInputs
from .nodes import Gradient, Node
from .passes import GoesWhole

# Tokens that a node has to save: its length, for each that continues it but one. On a CPU, a node took as long as 600
# tokens of an update or a scoring, and as 800 of a generation. With 900 saved tokens, phases are 1.00 to 1.14 times as
# fast ("Prompts that begin alike" in docs/worth.md); with 384 they were 0.83 times as fast
MIN_SAVED_TOKENS = 768

# What prompts have behind a node, beside their last token, which goes with the completions: with a single token and a
# state, mixers take a path for decoding that writes in place
MIN_OWN_TOKENS = 2


@dataclass(frozen=True)
class Prompts:
    """The prompts of some rows, on the host. The last token of each goes with its completion."""

    ids: torch.Tensor  # (B, P), from the first token on, -1 behind the last
    lengths: torch.Tensor  # (B,)
    # (B, P), what says whether prompts are alike, up to the last token: tokens, and, from the first image on, a number
    # that only equal prompts have; from the first token on where prompts that differ share nothing
    keys: torch.Tensor
    is_whole: torch.Tensor  # (B,), whether all of a prompt goes through the model ahead of its completions

    @classmethod
    def of(
        cls,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        multimodal: MultimodalInputs | None = None,
        shares_starts: bool = True,
        image_token_id: int | None = None,
    ) -> "Prompts":
        """Of left-padded prompts of shape `(B, P)`, on the host. Raises a [`GoesWhole`] if one has no token."""
        lengths, place = (prompt_mask != 0).sum(1), torch.arange(prompt_ids.shape[1], device="cpu")
        if (empty := (lengths == 0).nonzero().flatten()).numel():
            raise GoesWhole(
                f"The prompt of row {empty[0]} of the batch is empty, and a completion needs a token to follow. "
                "Remove empty prompts from the dataset."
            )
        column = len(place) - lengths[:, None] + place
        ids = prompt_ids.gather(1, column.clamp(max=len(place) - 1)).masked_fill(column >= len(place), -1)
        keys = ids.masked_fill(place >= lengths[:, None] - 1, -1)
        has_images = [bool(x) for x in multimodal.images] if multimodal else [False] * len(ids)
        has_images = torch.tensor(has_images, device="cpu")
        is_whole = has_images if shares_starts else torch.ones_like(has_images)
        if is_whole.any():
            text = torch.zeros_like(lengths)  # tokens before the first image
            if shares_starts and image_token_id is not None:
                text = (ids == image_token_id).int().argmax(1)
            number = _number_of_each(keys, multimodal)
            keys = keys.where((place < text[:, None]) | (keys == -1) | ~is_whole[:, None], -2 - number[:, None])
        return cls(ids, lengths, keys, is_whole)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows) -> "Prompts":
        return Prompts(*(getattr(self, x.name)[rows] for x in fields(self)))

    def differ_whole(self, group_size: int) -> bool:
        """Whether prompts that are not divided differ within any `group_size` consecutive ones."""
        groups = zip(self.keys.split(group_size), self.is_whole.split(group_size), strict=True)
        return any(bool(is_whole.any() and (keys != keys[0]).any()) for keys, is_whole in groups)

    def are(self, others: "Prompts") -> bool:
        """Whether the tokens of all prompts are those of others."""
        return torch.equal(self.lengths, others.lengths) and torch.equal(self.ids, others.ids)


def _number_of_each(keys: torch.Tensor, multimodal: MultimodalInputs | None) -> torch.Tensor:
    """A number for each row, the same for those whose prompts and images are."""
    _, number = torch.unique(keys, dim=0, return_inverse=True)
    if multimodal is not None:
        texts = [(number == i).nonzero().flatten().tolist() for i in range(int(number.max()) + 1)]
        groups = [rows for of_text in texts for rows in multimodal.with_same_images(of_text)]
        for i, rows in enumerate(groups):
            number[rows] = i
    return number


@dataclass(frozen=True, eq=False)
class Branch:
    """Tokens `start` to `end` of the prompts of some rows, behind those of `parent`."""

    rows: list[int]
    start: int
    end: int
    parent: "Branch | None" = None

    @property
    def path(self) -> "tuple[Branch, ...]":
        """The branches that it continues, and itself."""
        return (*(() if self.parent is None else self.parent.path), self)


@dataclass(frozen=True)
class _Head:
    """What begins where others do: all of a prompt, or what prompts have in common, with what lies behind it."""

    rows: list[int]
    end: int
    shortest: int  # of its prompts
    behind: "Sequence[_Head]" = ()


class Tree:
    """The branches of all prompts, parents before children, and the nodes that rows read which are still to come."""

    def __init__(
        self,
        prompts: Prompts,
        branches: list[Branch],
        rows_per_backward: int | None = None,  # consecutive ones that have their backward together. None: all
        in_one_backward: bool = False,  # the backward of a node is part of that of the last rows that read it
        positions_from_zero: bool = False,  # those of each row by itself, and not those of columns of the batch
    ):
        self.prompts = prompts
        self.positions_from_zero = positions_from_zero
        self.branches = branches
        self.rows_per_backward = rows_per_backward or len(prompts)
        self.in_one_backward = in_one_backward
        self.branch_of = {row: branch for branch in branches for row in branch.rows}  # the last one
        self.nodes: dict[Branch, Node] = {}

    @classmethod
    def of(cls, prompts: Prompts, every_prompt: bool = False, **kwargs) -> "Tree":
        """
        The branches that are worth it. Prompts of a single row go with its completion, behind what they share with
        others, unless `every_prompt` is to have a branch.
        """
        branches, alone = [], []
        heads: list[tuple[_Head, int, Branch | None]] = [(head, 0, None) for head in _heads(prompts)]
        while heads:
            head, start, parent = heads.pop()
            if not head.behind and len(head.rows) == 1 and not every_prompt and not prompts.is_whole[head.rows[0]]:
                alone += head.rows if parent is None else []
                continue
            branches.append(Branch(head.rows, start, head.end, parent))
            heads += [(behind, head.end, branches[-1]) for behind in head.behind]
        if alone:  # whose passes continue nothing
            branches.append(Branch(sorted(alone), 0, 0))
        return cls(prompts, sorted(branches, key=lambda branch: (branch.rows[0], branch.start)), **kwargs)

    @classmethod
    def of_groups(cls, prompts: Prompts, group_size: int, common_length: int = 0, **kwargs) -> "Tree":
        """
        As many branches on every process, for those that gather weights together: what each `group_size` consecutive
        prompts begin with, all of them behind their first `common_length` tokens, if that is not 0.
        """
        groups = [list(range(len(prompts)))[i : i + group_size] for i in range(0, len(prompts), group_size)]
        common = Branch(list(range(len(prompts))), 0, common_length) if common_length > 0 else None
        branches = [Branch(rows, common_length, length_alike(prompts[rows]), common) for rows in groups]
        return cls(prompts, branches if common is None else [common, *branches], **kwargs)

    def close(self) -> None:
        """Forget all nodes, and what is kept for their backward."""
        self.nodes.clear()

    def has(self, prompts: Prompts, rows: Sequence[int]) -> bool:
        """Whether these are the prompts of these rows."""
        return max(rows) < len(self.prompts) and self.prompts[list(rows)].are(prompts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts, each once where it is shared, the last ones included."""
        own = sum(int(self.prompts.lengths[row]) - branch.end for row, branch in self.branch_of.items())
        return own + sum(branch.end - branch.start for branch in self.branches)

    def first_column(self, branch: Branch) -> int:
        """Column of the first token of the first row of its path, from where positions are counted for all rows."""
        if self.positions_from_zero:
            return 0
        return self.prompts.ids.shape[1] - int(self.prompts.lengths[branch.path[0].rows[0]])

    def new_branches(self, rows: Sequence[int]) -> list[Branch]:
        """Branches of some rows which have not gone through the model with earlier ones, parents before children."""
        wanted = {branch for row in rows for branch in self.branch_of[row].path}
        return [branch for branch in self.branches if branch in wanted and branch not in self.nodes]

    def _backward_of(self, row: int) -> int:
        return row // self.rows_per_backward

    def outlives(self, branch: Branch) -> bool:
        """Whether its node is there for more than one backward."""
        return self._backward_of(branch.rows[0]) != self._backward_of(branch.rows[-1])

    def gradient(self, branch: Branch, row: int, is_alone: bool) -> Gradient:
        """
        Where the gradient goes of what is read of the node of a branch. `row` is the last that the backward of the
        reading pass waits for; `is_alone` says whether no other pass of its forward reads the node.
        """
        outlives, together = self.outlives(branch), self._backward_of(branch.rows[-1]) == self._backward_of(row)
        if not together or (outlives and not self.in_one_backward):
            return Gradient.ENDS
        return Gradient.ALONE if is_alone and not outlives else Gradient.JOINS

    def keep(self, branch: Branch, node: Node, stop: int) -> None:
        """Keep its node if rows from `stop` on read it."""
        if branch.rows[-1] >= stop:
            self.nodes[branch] = node

    def backward(self, stop: int | None = None) -> None:
        """Rows up to `stop`, or all, are done: the nodes that no others read have their backward, if it is theirs,
        children before parents, and go."""
        for branch in reversed(self.branches):
            if branch in self.nodes and (stop is None or branch.rows[-1] < stop):
                self.nodes.pop(branch).backward()

    def leave(self, stop: int) -> None:
        """Rows up to `stop` are done."""
        self.backward(stop)


class OpenTree(Tree):
    """
    Of prompts whose rows come in parts, in any order: each part has a backward of its own, and the prompts have theirs
    behind all of them.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.without_graph: list[Branch] = []

    def new_branches(self, rows: Sequence[int]) -> list[Branch]:
        if torch.is_grad_enabled():
            while self.without_graph:
                self.nodes.pop(self.without_graph.pop(), None)
        return super().new_branches(rows)

    def outlives(self, branch: Branch) -> bool:
        return True

    def gradient(self, branch: Branch, row: int, is_alone: bool) -> Gradient:
        return Gradient.ENDS

    def keep(self, branch: Branch, node: Node, stop: int) -> None:
        self.nodes[branch] = node
        if not torch.is_grad_enabled():
            self.without_graph.append(branch)

    def leave(self, stop: int) -> None:
        """The nodes stay."""


def length_alike(prompts: Prompts) -> int:
    """Number of tokens that prompts begin with, the last one left out."""
    alike = (prompts.keys == prompts.keys[:1]).all(0).int().cumprod(0).sum()
    return min(int(alike), int(prompts.lengths.min()) - 1)


def common_length(prompts: Prompts, group_size: int) -> int:
    """Number of tokens that groups of prompts begin with, for [`Tree.of_groups`], or 0 if it is not worth it."""
    lengths = [length_alike(prompts[start : start + group_size]) for start in range(0, len(prompts), group_size)]
    length = min(length_alike(prompts), min(lengths) - MIN_OWN_TOKENS)
    return length if length > 0 and (len(lengths) - 1) * length >= MIN_SAVED_TOKENS else 0


def _heads(prompts: Prompts) -> list[_Head]:
    """What lies at the root, and behind it. Prompts that are sorted have most in common with the next."""
    keys, number = torch.unique(prompts.keys, dim=0, return_inverse=True)
    rows_of: list[list[int]] = [[] for _ in keys]
    for row, i in enumerate(number.tolist()):
        rows_of[i].append(row)
    alike_with_next = [*(keys[1:] == keys[:-1]).int().cumprod(1).sum(1).tolist(), 0]
    open_heads: list[tuple[int, list[_Head]]] = [(0, [])]  # where they begin, the longest last
    for rows, alike in zip(rows_of, alike_with_next, strict=True):
        length = int(prompts.lengths[rows[0]]) - 1
        heads = [_Head(rows, length, length)]
        while open_heads[-1][0] > alike:
            end, siblings = open_heads.pop()
            heads = _join(siblings + heads, max(alike, open_heads[-1][0]), end)
        if open_heads[-1][0] < alike:
            open_heads.append((alike, heads))
        else:
            open_heads[-1][1].extend(heads)
    return open_heads[0][1]


def _join(heads: list[_Head], start: int, end: int) -> list[_Head]:
    """Heads that are alike from `start` to `end`: as one, with them behind it, if that saves enough."""
    shortest = min(head.shortest for head in heads)
    end = min(end, shortest - MIN_OWN_TOKENS)
    if end - start < MIN_OWN_TOKENS or (len(heads) - 1) * (end - start) < MIN_SAVED_TOKENS:
        return heads
    return [_Head(sorted(row for head in heads for row in head.rows), end, shortest, heads)]

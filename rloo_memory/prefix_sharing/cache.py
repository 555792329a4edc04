"""
The cache for generation with shared prompts: keys and values of a prompt are stored once for all its completions, and
those of what prompts begin with once for these prompts.

Shape suffixes: B rows, S tokens of a node, N rows that share a prompt, R prompts that are stacked, D head size.
"""

import functools

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
from transformers.masking_utils import sdpa_mask

from .attention import beside_sink, is_plain, kernels_take
from .kernels import forward as attention_with_lse
from .nodes import Node, Path
from .routing import Attention, layer_window
from .states import fork_states

# Room for new keys grows by an eighth of what there is, so that copying is cheap, and by no fewer steps than this
MIN_NEW_STEPS = 64

# Masks that are kept for the layers of a step, which share them
_MAX_MASKS = 8


class _Common:
    """
    What the prompts of some groups begin with, of these `rows`, or of all if that is None: keys and values of shape
    `(1, num_key_value_heads, S, D)`.
    """

    def __init__(self, groups: list[int], rows: torch.Tensor | None, states: tuple[torch.Tensor, torch.Tensor]):
        self.groups, self.rows = groups, rows
        self.states = states[0].transpose(0, 1), states[1].transpose(0, 1)  # (num_key_value_heads, 1, S, D)
        if rows is not None:
            heads = torch.arange(states[0].shape[1], device=rows.device)
            self.places = (rows[:, None] * len(heads) + heads).flatten()  # of these rows and their key heads


class _SharedPrefixLayer(CacheLayerMixin):
    """
    Cache layer that holds a prefix once for all rows of its group, and what each row generated.

    Attention to the two is computed apart and merged: with the prefix, all queries of a group (rows, and query heads
    of a key head) are queries of one row; what a row generated it reads alone. With what prefixes begin with, so are
    all queries of their rows. Groups of equally many rows behind prefixes of equal length are stacked, and attend to
    their prefixes in one call. Everything lies in the order in which the calls need it: stack, group, key head, row.
    """

    is_sliding = False  # for its length, it drops no key

    def __init__(
        self,
        prefixes: list[tuple[torch.Tensor, torch.Tensor]],  # of each stack, (R, num_key_value_heads, S, D)
        stacks: list[torch.Tensor],  # rows of the groups of each, (R, N)
        groups_of_stack: list[list[int]],
        prefix_length: int,  # number of columns, padding included
        commons: list[_Common],  # what prefixes continue, parents before children
    ):
        super().__init__()
        self.prefix_length = prefix_length
        self.stacks, self.groups_of_stack = stacks, groups_of_stack
        self.num_heads = prefixes[0][0].shape[1]
        # (R * num_key_value_heads, 1, S, D): each key head is a row of its own
        self.prefixes = [tuple(x.flatten(0, 1).unsqueeze(1) for x in prefix) for prefix in prefixes]
        heads = torch.arange(self.num_heads, device=stacks[0].device)[:, None]
        self.commons = commons
        # Row and key head of each place, as an index of both
        self.order = torch.cat([(rows[:, None] * self.num_heads + heads).flatten() for rows in stacks])
        self.places = self.order.argsort()
        self.sizes = [rows.numel() * self.num_heads for rows in stacks]
        self.own: list[torch.Tensor] = []  # keys, values: (B * num_key_value_heads, 1, >= number of kept steps, D)
        self.num_steps = self.num_kept = 0
        self.window: int | None = None  # number of tokens, itself included, that a token sees, once that is not all
        self.is_merged: bool | None = None  # whether attention to prefix and own keys is: `SharedPrefixCache.attend`
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states):
        pass  # the prefix is there from the start

    def get_seq_length(self) -> int:
        return self.prefix_length + self.num_steps

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def update(self, key_states, value_states, *args, **kwargs):
        # Not kept: it may be the compressed form (multi-head latent attention) of the keys that a prefix consists of
        return key_states, value_states

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if not self.own:
            # Autocast may have computed the prefix in other dtypes than those it attends in
            self.prefixes = [(x.to(key.dtype), y.to(value.dtype)) for x, y in self.prefixes]
            for common in self.commons:
                common.states = common.states[0].to(key.dtype), common.states[1].to(value.dtype)
            self.own = [x.new_empty(len(self.order), 1, 0, x.shape[-1]) for x in (key, value)]
        if self.num_kept == self.own[0].shape[2]:
            self.make_room()
        for own, new in zip(self.own, (key, value), strict=True):
            own.select(2, self.num_kept).index_copy_(0, self.places, new.reshape(len(own), 1, -1))
        self.num_steps += 1
        self.num_kept += 1

    def make_room(self) -> None:
        if self.window is not None:  # what it has left behind goes
            self.num_kept = min(self.num_kept, self.window - 1)
            self.own = [x[:, :, x.shape[2] - self.num_kept :] for x in self.own]
            self.prefixes = [tuple(x.clone() for x in prefix) for prefix in self.read_prefixes()]
        steps = max(MIN_NEW_STEPS, self.num_kept // 8)
        for i, x in enumerate(self.own):
            self.own[i] = torch.cat([x, x.new_empty(len(x), 1, steps, x.shape[3])], dim=2)

    def behind_commons(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Visible keys and values of the prefixes of each stack, behind a copy of what they continue."""
        if not self.commons:
            return self.read_prefixes()

        def whole(i: int, group: int, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([*(common.states[i] for common in self.commons if group in common.groups), x], dim=2)

        return [
            tuple(
                torch.cat([whole(i, *each) for each in zip(groups, x.split(self.num_heads), strict=True)])
                for i, x in enumerate(prefix)
            )
            for groups, prefix in zip(self.groups_of_stack, self.prefixes, strict=True)
        ]

    def see(self, window: int) -> None:
        """From here on, a token sees so many, itself included."""
        self.window = window
        if self.commons:  # what rows see of prefixes of different lengths no longer begins alike
            self.prefixes, self.commons = self.behind_commons(), []
            self.prefixes = [tuple(x.clone() for x in prefix) for prefix in self.read_prefixes()]

    def read_own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Visible keys and values that rows generated, `(B * num_key_value_heads, 1, number of steps, D)` each."""
        start = 0 if self.window is None else max(0, self.num_kept - self.window)
        return tuple(x[:, :, start : self.num_kept] for x in self.own)

    def read_prefixes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Visible keys and values of the prefixes of each stack, `(R * num_key_value_heads, 1, at most S, D)` each."""
        if self.window is None:
            return self.prefixes
        visible = max(0, self.window - self.num_steps)
        return [tuple(x[:, :, max(0, x.shape[2] - visible) :] for x in prefix) for prefix in self.prefixes]

    def attend(self, query: torch.Tensor, scale: float | None, sink: torch.Tensor | None = None) -> torch.Tensor:
        """
        Attention of the last token of each row, of shape `(B, 1, num_heads, D)`, from its queries `(B, num_heads, 1,
        D)`, with the score of each head's sink, `(num_heads,)`.
        """
        head_size = query.shape[-1]
        queries = query.reshape(len(self.order), 1, -1, head_size).index_select(0, self.order)
        output, lse = attention_with_lse(queries, *self.read_own(), None, scale)
        if self.window is None or self.window > self.num_steps:
            prefix_output, prefix_lse = self._attend_to_prefixes(queries, scale)
            output = _merge(output, lse, prefix_output, prefix_lse)
            if self.commons or sink is not None:
                lse = lse.logaddexp(prefix_lse)
        output = output.index_select(0, self.places)
        if self.commons or sink is not None:
            lse = lse.index_select(0, self.places)
        for common in self.commons:
            output, lse = self._with_common(query, output, lse, common, scale)
        if sink is not None:
            output = beside_sink(output, lse, sink.view(self.num_heads, 1, -1).repeat(len(query), 1, 1))
        return output.view(len(query), 1, -1, head_size)

    def _with_common(
        self, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, common: _Common, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp, of shape `(B * num_key_value_heads, 1, ...)`, with attention to one part more."""
        other, other_lse = self._attend_to_common(query, common, scale)
        if common.rows is None:
            return _merge(output, lse, other, other_lse), lse.logaddexp(other_lse)
        before, lse_before = (x.index_select(0, common.places) for x in (output, lse))
        merged = _merge(before, lse_before, other, other_lse), lse_before.logaddexp(other_lse)
        return tuple(x.index_copy(0, common.places, y) for x, y in zip((output, lse), merged, strict=True))

    def _attend_to_common(
        self, query: torch.Tensor, common: _Common, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query = query if common.rows is None else query.index_select(0, common.rows)
        queries = query.reshape(len(query), self.num_heads, -1, query.shape[-1]).transpose(0, 1)  # (heads, rows, ...)
        row_queries = queries.reshape(self.num_heads, 1, -1, query.shape[-1])
        output, lse = attention_with_lse(row_queries, *common.states, None, scale)
        output, lse = output.view(queries.shape).transpose(0, 1), lse.view(queries.shape[:-1]).transpose(0, 1)
        return output.flatten(0, 1).unsqueeze(1), lse.flatten(0, 1).unsqueeze(1)

    def _attend_to_prefixes(self, queries: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, lses = [], []
        for stack_queries, (key, value) in zip(queries.split(self.sizes), self.read_prefixes(), strict=True):
            if key.shape[2] == 0:  # prompts of one token
                outputs.append(torch.zeros_like(stack_queries))
                lses.append(torch.full_like(stack_queries[..., 0], -torch.inf))
                continue
            # Rows, and query heads of a key head, are queries of one row
            row_queries = stack_queries.view(len(key), 1, -1, key.shape[3])
            output, lse = attention_with_lse(row_queries, key, value, None, scale)
            outputs.append(output.reshape(stack_queries.shape))
            lses.append(lse.reshape(stack_queries.shape[:-1]))
        return (outputs[0], lses[0]) if len(outputs) == 1 else (torch.cat(outputs), torch.cat(lses))


def _merge(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Attention to two runs of keys from the output and the log-sum-exp of each."""
    return output.lerp(other, (other_lse - lse).sigmoid().to(output.dtype).unsqueeze(-1))


def _in_one_run(prefix: torch.Tensor, own: torch.Tensor, shape: torch.Size, together: bool) -> torch.Tensor:
    """
    Keys or values of the prefixes of a stack, of rows of `shape` `(R, N)`, in front of what its rows generated: one
    run for each prefix, `(R, num_key_value_heads, S + N * steps, D)`, or, if not `together`, one for each row.
    """
    num_groups, num_rows = shape
    prefix = prefix.squeeze(1).unflatten(0, (num_groups, -1))  # (R, num_key_value_heads, S, D)
    own = own.squeeze(1).unflatten(0, (*prefix.shape[:2], num_rows))  # (R, num_key_value_heads, N, steps, D)
    if together:
        return torch.cat([prefix, own.flatten(2, 3)], dim=2)
    copies = prefix[:, None].expand(-1, num_rows, -1, -1, -1)
    return torch.cat([copies, own.transpose(1, 2)], dim=3).flatten(0, 1)


def _own_alone(num_rows: int, prefix_size: int, num_steps: int, device: torch.device) -> torch.Tensor:
    """Mask of rows that attend together: each sees the prefix and what it has generated itself."""
    is_own = torch.eye(num_rows, dtype=torch.bool, device=device).repeat_interleave(num_steps, dim=1)
    return nn.functional.pad(is_own, (prefix_size, 0), value=True)[None, None]


class _SharedPrefixAndStatesLayer(_SharedPrefixLayer, LinearAttentionAndFullAttentionLayer):
    """Cache layer of a layer that attends and has a state, which is each row's own."""

    def lazy_initialization(self, *args, **kwargs):
        if kwargs:  # a state is there when it is first set
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class SharedPrefixCache(Cache):
    """
    Cache for decoding several completions of a prompt, with the prompt's keys and values stored once: of the prefix of
    each group of rows, whose nodes give their keys and values up. `prefix_length` is in columns, padding included.
    """

    def __init__(self, prefixes: list[Path], groups: list[torch.Tensor], prefix_length: int):
        self.groups = groups
        self.prefix_length = prefix_length
        self.offsets = torch.zeros(sum(map(len, groups)), 1, dtype=torch.long, device=groups[0].device)
        for prefix, rows in zip(prefixes, groups, strict=True):
            self.offsets[rows] = prefix.last.offset
        stacks: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for group, (prefix, rows) in enumerate(zip(prefixes, groups, strict=True)):
            lengths = tuple(len(node.positions) for node in prefix.nodes)
            stacks.setdefault((lengths, len(rows)), []).append(group)
        self._groups_of_stack = list(stacks.values())
        self.stacks = [torch.stack([groups[group] for group in stack]) for stack in self._groups_of_stack]
        self.row_order = torch.cat([rows.flatten() for rows in self.stacks]).argsort()
        self.sources = prefixes[0].last.sources
        self._groups_of_common: dict[Node, list[int]] = {}  # parents before children
        for group, prefix in enumerate(prefixes):
            for node in prefix.nodes[:-1]:
                self._groups_of_common.setdefault(node, []).append(group)
        layers: list[_SharedPrefixLayer | LinearAttentionLayer] = []
        # The layers behind the last that leaves something have no use for a cache
        for layer_idx in range(max(*self.sources, *(slot[0] for slot in prefixes[0].slots)) + 1):
            source = self.sources.get(layer_idx, layer_idx)
            layers.append(self._layer(layer_idx, prefixes) if source == layer_idx else layers[source])
        super().__init__(layers=layers)
        # All layers of a step share the mask, or some do where others slide
        self._own_alone = functools.lru_cache(_MAX_MASKS)(_own_alone)
        self._windows: set[int | None] = set()  # of the causal masks that the model asked for

    def _layer(self, layer_idx: int, prefixes: list[Path]):
        number_of_states = len({state_idx for _, _, state_idx in prefixes[0].last.states_of(layer_idx)})
        if layer_idx in self.sources:
            layer_class = _SharedPrefixAndStatesLayer if number_of_states else _SharedPrefixLayer
            states = [prefix.last.take_attention(layer_idx) for prefix in prefixes]
            stacked = [
                tuple(torch.cat(x) for x in zip(*[states[group] for group in stack], strict=True))
                for stack in self._groups_of_stack
            ]
            # A model may be spread over several devices
            stacks, rows_of = ([x.to(states[0][0].device) for x in each] for each in (self.stacks, self.groups))
            commons = []
            for node, groups in self._groups_of_common.items():
                rows = None if len(groups) == len(prefixes) else torch.cat([rows_of[group] for group in groups])
                commons.append(_Common(groups, rows, node.take_attention(layer_idx)))
            layer = layer_class(stacked, stacks, self._groups_of_stack, self.prefix_length, commons)
        else:
            layer = LinearAttentionLayer(number_of_states)
        if number_of_states:
            fork_states(layer, layer_idx, prefixes, self.groups)
        return layer

    def mask(self, local_size, allow_is_causal_skip, **kwargs) -> torch.Tensor | None:
        """Mask of layers as a model asks for it. None where a token sees all that is behind it, or a window."""
        if not allow_is_causal_skip:
            return sdpa_mask(local_size=local_size, allow_is_causal_skip=False, **kwargs)
        self._windows.add(local_size)
        return None

    def attend(self, own: Attention, module, query, key, value, attention_mask, **kwargs):
        layer = self.layers[module.layer_idx]
        if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
            # As autocast does for attention, here once for each key
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attention_mask is None and layer.window is None:
            window = layer_window(own, module, self._windows, kwargs)
            if window is not None and window <= layer.get_seq_length():
                layer.see(window)
        if self.sources[module.layer_idx] == module.layer_idx:
            layer.append(key, value)
        if layer.is_merged is None:
            alike = all(x.shape[-1] == query.shape[-1] and x.dtype == query.dtype for x in layer.own)
            layer.is_merged = alike and is_plain(kwargs) and kernels_take(*layer.own)
        if layer.is_merged and attention_mask is None:
            return layer.attend(query, kwargs.get("scaling"), kwargs.get("s_aux")), None
        return self._attend_behind_copies(own, module, query, layer, attention_mask, **kwargs), None

    def _attend_behind_copies(self, own: Attention, module, query, layer, attention_mask, **kwargs):
        # Keys of prefix and rows are one run, for attention that cannot be merged. As long as the rows of a group
        # generated less than their prefix is long, they attend together behind one copy of it, and a mask hides what
        # the others generated. Later each row attends behind a copy of its own.
        outputs = []
        own_states = zip(*[x.split(layer.sizes) for x in layer.read_own()], strict=True)
        for rows, prefix, of_rows in zip(layer.stacks, layer.behind_commons(), own_states, strict=True):
            num_groups, num_rows = rows.shape
            prefix_size, num_steps = prefix[0].shape[2], of_rows[0].shape[2]
            together = attention_mask is None and num_rows * num_steps <= prefix_size
            key, value = (_in_one_run(x, y, rows.shape, together) for x, y in zip(prefix, of_rows, strict=True))
            rows = rows.flatten()
            group_query, allowed = query[rows], None  # (R * N, num_heads, 1, D)
            if together:
                group_query = group_query.view(num_groups, num_rows, *query.shape[1::2]).transpose(1, 2)
                allowed = self._own_alone(num_rows, prefix_size, num_steps, query.device)
            elif attention_mask is not None:
                allowed = attention_mask[rows, :, :, -prefix_size - num_steps :]
            output = own.masked(module, group_query, key, value, allowed, **kwargs)
            outputs.append(output.reshape(len(rows), 1, *output.shape[2:]))
        return torch.cat(outputs)[self.row_order.to(query.device)]

"""Other ways to compute one group: the package prefix-grouper, and the short series `trl/first`."""

from functools import cache
from importlib.metadata import distributions
from importlib.util import module_from_spec, spec_from_file_location

from experiments.bench.group import WAYS, Group
from experiments.config import ROOT

PREFIX_GROUPER = "0.0.1.post1"
GROUPER = f"prefix-grouper {PREFIX_GROUPER}"
RIVALS = ("whole", GROUPER, "one-row", "shared", "shared-2")


def lacking() -> str | None:
    """What is not as it must be of the package that is compared."""
    found = next((package.version for package in distributions(name="prefix-grouper")), "not installed")
    if found == PREFIX_GROUPER:
        return None
    return f"prefix-grouper is {found}: pip install prefix-grouper=={PREFIX_GROUPER}"


@cache
def first_series():
    """The module of the series `first`, beside whatever `trl` is loaded."""
    path = ROOT / "trl" / "first" / "overlay" / "trl" / "models" / "group_packing.py"
    spec = spec_from_file_location("group_packing", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rivals(Group):
    """One prompt with k completions, and its log-probabilities computed in each of the `RIVALS`' ways."""

    def log_probs(self, way: str, *micro_batch):
        if way == GROUPER:
            return self.grouped_log_probs()
        self.model.set_attn_implementation("sdpa")
        return super().log_probs(way, *micro_batch) if way in WAYS else self.one_row_log_probs()

    def one_row_log_probs(self):
        """As the series `first` does."""
        mask = self.torch.ones_like(self.ids)
        outputs = first_series().shared_forward(self.model.model, self.ids, mask, self.prompt, use_cache=False)
        return self.head_log_probs(outputs.last_hidden_state[:, :-1])

    def grouped_log_probs(self):
        """As the package's README says: one row holds the prompt and the completions, its attention splits them.

        The package passes padding masks to the attention, which FlashAttention takes and `sdpa` does not. So `sdpa`
        gets causal masks here; nothing is padded. Raises ImportError where it is not installed in this version.
        """
        if problem := lacking():
            raise ImportError(problem)
        from prefix_grouper import PrefixGrouper
        from transformers import AttentionInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        torch, prompt, completion, k = self.torch, self.prompt, self.completion, self.k
        causal = torch.ones(completion, prompt + completion, dtype=torch.bool).tril(prompt)

        def attention(module, query, key, value, attention_mask, prefix_grouper, **kwargs):
            def sdpa(query, key, value, padding_mask):
                mask = None if query.shape[2] == key.shape[2] else causal.expand(k, 1, -1, -1)
                return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)[0]

            return prefix_grouper.forward(sdpa, query, key, value), None

        AttentionInterface.register("prefix_grouper", attention)
        self.model.set_attn_implementation("prefix_grouper")  # also while the backward computes layers again
        prompt_ids, completion_ids = self.ids[:1, :prompt], self.ids[:, prompt:]
        masks = torch.ones_like(prompt_ids), torch.ones_like(completion_ids)
        grouper = PrefixGrouper.from_ungrouped_masks(*masks, group_sizes=k, padding_mode="right")
        ids = grouper.concat_input(prompt_ids, masks[0], completion_ids, masks[1])
        positions = torch.cat([torch.arange(prompt), torch.arange(prompt, prompt + completion).repeat(k)])
        inputs = {"input_ids": ids, "attention_mask": grouper.padding_mask, "position_ids": positions[None]}
        hidden = self.model.model(**inputs, use_cache=False, prefix_grouper=grouper).last_hidden_state
        hidden = grouper.split_output(hidden, include_prefix_last=1)[2][:, :-1]
        return self.head_log_probs(hidden)

    def head_log_probs(self, hidden):
        """Log-probabilities of all completions, from the hidden states that predict their tokens."""
        from trl.kernels import ChunkedLogProbFunction

        from rloo_memory.sharing import CPU_TILE

        labels, weight = self.ids[:, self.prompt :], self.model.lm_head.weight
        settings = None, 1.0, ("log_probs", "entropy")  # no soft cap, no scale
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        log_probs, *_ = ChunkedLogProbFunction.apply(rows, weight, None, targets, 1.0, CPU_TILE, *settings)
        return log_probs.view(labels.shape)

"""Scoring and policy forward/backward of one group, whole rows against ways to share the prompt, alternating.

    python -m experiments.evidence.rivals [--prompt-tokens 3000] [--completion-tokens 100] [--k 8] [--repeats 5]

The same model, gradient checkpointing and compact LM head for every way: what differs is the rows that go through the
layers. `whole` is TRL 1.16.0's own pass, `prefix-grouper` the PyPI package of that name (skipped where it is not
installed), `one-row` the short series `trl/first`, whose packed row holds the prompt and all completions, `shared` and
`shared-2` prefix sharing with all or two completions together. Writes one row a repeat to
results/<machine>/rivals/p<P>_c<C>_k<k>.csv: seconds, peak resident bytes above the level before, and the relative
difference of all parameters' gradients from `whole`. A process measures peaks once, before any time: for times, malloc
keeps what is freed.
"""

import os
import statistics
import sys
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location

from experiments.builds import use_fork
from experiments.config import ROOT, SCALES
from experiments.evidence.common import FACTS, Parser, Table, place, whole, words
from experiments.evidence.group import Group, Sizes, peak_of, timed
from experiments.run_device import keep_freed_memory
from rloo_memory.arms import ARMS
from rloo_memory.errors import ConfigError, exit_code
from rloo_memory.models import shape_config
from rloo_memory.phases import HighWater

COLUMNS = (
    "way", "repeat", "score_seconds", "train_seconds", "score_peak_bytes", "train_peak_bytes", "gradient_difference",
    "prompt_tokens", "completion_tokens", "k", "shape", "prefix_grouper_version", *FACTS,
)  # fmt: skip
WAYS = ("whole", "prefix-grouper", "one-row", "shared", "shared-2")


@cache
def first_series():
    """The module of the series `first`, beside whatever `trl` is loaded."""
    path = ROOT / "trl" / "first" / "overlay" / "trl" / "models" / "group_packing.py"
    spec = spec_from_file_location("group_packing", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rivals(Group):
    """One prompt with k completions, and its log-probabilities computed in each of the `WAYS`."""

    def __init__(self, shape: str, vocab_size: int, sizes: Sizes):
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        super().__init__(AutoModelForCausalLM.from_config(shape_config(shape, vocab_size)), vocab_size, sizes)

    def log_probs(self, way: str):
        if way == "prefix-grouper":
            return self.grouped_log_probs()
        self.model.set_attn_implementation("sdpa")
        return self.one_row_log_probs() if way == "one-row" else super().log_probs(way)

    def one_row_log_probs(self):
        """As the series `first` does."""
        mask = self.torch.ones_like(self.ids)
        outputs = first_series().shared_forward(self.model.model, self.ids, mask, self.sizes.prompt)
        return self.head_log_probs(outputs.last_hidden_state[:, :-1])

    def grouped_log_probs(self):
        """As the package's README says: one row holds the prompt and the completions, its attention splits them.

        The package passes padding masks to the attention, which FlashAttention takes and `sdpa` does not. So `sdpa`
        gets causal masks here; nothing is padded.
        """
        from prefix_grouper import PrefixGrouper
        from transformers import AttentionInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        torch, prompt, completion, k = self.torch, self.sizes.prompt, self.sizes.completion, self.sizes.k
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
        hidden = self.model.model(
            input_ids=ids,
            attention_mask=grouper.padding_mask,
            position_ids=positions[None],
            use_cache=False,
            prefix_grouper=grouper,
        ).last_hidden_state
        hidden = grouper.split_output(hidden, include_prefix_last=1)[2][:, :-1]
        return self.head_log_probs(hidden)

    def head_log_probs(self, hidden):
        """Log-probabilities of all completions, from the hidden states that predict their tokens."""
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_SMALL_CHUNK_SIZE

        labels = self.ids[:, self.sizes.prompt :]
        log_probs, *_ = ChunkedLogProbFunction.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            self.model.lm_head.weight,
            None,
            labels.reshape(-1),
            1.0,
            _CHUNKED_LOGPROB_SMALL_CHUNK_SIZE,
            None,
            1.0,
            ("log_probs", "entropy"),
        )
        return log_probs.view(labels.shape)


def run(argv: list[str] | None) -> int:
    scale = SCALES["bench"]
    parser = Parser("rivals", __doc__, cpu_only=True)
    parser.add_argument("--prompt-tokens", type=whole(2), default=scale.prompt_tokens)
    parser.add_argument("--completion-tokens", type=whole(1), default=scale.completion_tokens)
    parser.add_argument("--k", type=whole(2), default=8)
    parser.add_argument("--repeats", type=whole(1, 100), default=5)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}")
    args = parser.parse_args(argv)
    asked = words("way", args.ways, WAYS)
    if "whole" not in asked:
        raise ConfigError(f"--ways {args.ways}: the others are compared with `whole`; name it, too")
    ways = [way for way in WAYS if way in asked]
    here = place(args)
    grouper_version = version("prefix-grouper") if find_spec("prefix_grouper") else ""
    if "prefix-grouper" in ways and not grouper_version:
        print("prefix-grouper is not installed (pip install prefix-grouper==0.0.1.post1): left out", file=sys.stderr)
        ways.remove("prefix-grouper")
    sizes = {"prompt_tokens": args.prompt_tokens, "completion_tokens": args.completion_tokens, "k": args.k}
    facts = {**sizes, "shape": scale.shape, "prefix_grouper_version": grouper_version, **here.facts}
    folder = here.folder / "rivals"
    folder.mkdir(exist_ok=True)
    name = f"p{args.prompt_tokens}_c{args.completion_tokens}_k{args.k}.csv"
    table = Table(folder / name, COLUMNS, facts, args.fresh)
    if not all(table.has(way=way, repeat=repeat) for way in ways for repeat in range(args.repeats)):
        use_fork(ARMS["shared"])
        measure(Rivals(scale.shape, scale.vocab_size, Sizes(*sizes.values())), ways, args.repeats, table)
    table.finish()
    for way in ways:
        mine = [row for row in table.rows if row["way"] == way]
        score, train, _, peak = (statistics.median(float(row[name]) for row in mine) for name in COLUMNS[2:6])
        print(f"{way:15} score {score:7.3f} s   train {train:7.3f} s   peak {peak / 2**20:7.1f} MiB above the start")
    print(os.path.relpath(table.path))
    return 0


def measure(group: Rivals, ways: list[str], repeats: int, table: Table) -> None:
    """Adds the rows that `table` has not: seconds and bytes. The first of `ways` is what gradients are compared to."""
    high_water, peaks = HighWater("cpu"), {}
    for way in ways:
        print(f"{way}: peaks", flush=True)
        peaks[way] = [peak_of(partial(work, way), high_water) for work in (group.score, group.train)]
    keep_freed_memory()
    for way in reversed(ways):  # warms up
        group.train(way)
    truth = group.gradient()
    for repeat in range(repeats):
        for way in ways:
            if table.has(way=way, repeat=repeat):
                continue
            score, train = timed(partial(group.score, way)), timed(partial(group.train, way))
            gradient, (score_peak, train_peak) = group.gradient(), peaks[way]
            table.add(
                {
                    "way": way,
                    "repeat": repeat,
                    "score_seconds": score.seconds,
                    "train_seconds": train.seconds,
                    "score_peak_bytes": score_peak,
                    "train_peak_bytes": train_peak,
                    "gradient_difference": f"{((gradient - truth).norm() / truth.norm()).item():.2e}",
                }
            )
            print(f"{way}: {repeat + 1} of {repeats}, {score.seconds + train.seconds:.1f} s", flush=True)


def main(argv: list[str] | None = None) -> int:
    return exit_code("rivals", run, argv)


if __name__ == "__main__":
    sys.exit(main())

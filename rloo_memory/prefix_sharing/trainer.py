"""The passes of RLOO and GRPO: how the rows of a batch go through the model."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from .config import check_processes
from .enabling import check_dropout, disable_prefix_sharing, enable_prefix_sharing, shares_starts
from .generation import generate_with_shared_prefix
from .hooks import has_parameter_hooks, state_of, traces_of
from .images import OF_IMAGES, OF_TOKENS, MultimodalInputs, count_tiles
from .lm_head import causal_lm_of
from .passes import GoesWhole, TokenCount, has_several_processes, on_any_process, same_number_everywhere
from .probe import dropouts
from .shared_passes import SharedPrefixPasses, prompts_of
from .token_budget import TokenBudgetPasses, check_whole_rows, saves_time, takes_whole_rows
from .tree import Prompts, Tree, common_length

logger = get_logger(__name__)

_ROWS = "rows of the rollout"


def shuffle_groups(batch: dict[str, Sequence | None], group_size: int) -> dict[str, Sequence | None]:
    """Shuffle all sequence-like values in unison. Each `group_size` consecutive elements stay together, in order."""
    batch_size = len(next(x for x in batch.values() if x is not None))
    # As many random numbers for every group size, so that what is sampled next does not depend on it
    order = torch.randperm(batch_size)
    order = (order[order % group_size == 0, None] + torch.arange(group_size)).flatten()

    def permute(x: Sequence | None) -> Sequence | None:
        if x is None or (isinstance(x, torch.Tensor) and x.ndim == 0):
            return x
        return x[order] if isinstance(x, torch.Tensor) else [x[i] for i in order]

    return {name: permute(x) for name, x in batch.items()}


@dataclass(frozen=True)
class _Batch:
    """What is known of the rows of a rollout, or of a batch of an evaluation."""

    prompts: Prompts
    group_size: int  # of what processes have equally many branches for
    common_length: int  # what all prompts begin with, there
    goes_whole: bool = False  # its prompts are so short that its rows go through the model whole


class TrainerPasses:
    """
    The passes of a trainer with `prefix_sharing`, `tokens_per_forward` or both, for which its models are prepared.
    Raises a `ValueError` if rows cannot go through them in passes, or not on these processes.
    """

    def __init__(
        self,
        args,
        accelerator: Accelerator,
        model: PreTrainedModel,
        ref_model: PreTrainedModel | None = None,
        *,
        takes_images: bool = False,
    ):
        self.args = args
        self.model = model
        self.device = accelerator.device
        self.num_processes = accelerator.num_processes
        self._batches: dict[bool, _Batch | None] = {}  # the last one of training, and of evaluation
        self._scored: Tree | None = None  # of all rows of the last one
        self._trained: Tree | None = None  # of those of an update
        self._rows = range(0)  # of the rollout, from this micro-batch to the end of its update
        self._state: tuple = ()  # of the model in this micro-batch
        self._traces: tuple = ()  # of changes of its weights and gradients, behind the last one
        self._place = 0  # of the micro-batch in its update
        self._has_passes = True  # whether the loss of the last training step came from passes
        self._count = TokenCount()  # of what was scored and trained since it was last read
        self._said: set[str] = set()
        check_processes(args, accelerator, model, takes_images)
        self._models = [model] if ref_model is None else [model, ref_model]
        for each in self._models:
            if args.prefix_sharing:
                enable_prefix_sharing(each, args.shares_dropout, holder=self)
            else:
                check_whole_rows(each)
        self._shares_starts = self._may_go_whole = False
        if args.prefix_sharing:
            self._shares_starts = self._agreed(shares_starts)
            self._may_go_whole = not takes_images and self._agreed(takes_whole_rows)
            for each in self._models:
                causal_lm_of(each).base_model._prefix_sharing.shares_starts = self._shares_starts
        self._in_one_backward = accelerator.distributed_type != DistributedType.NO
        # The completions of a prompt can be spread over several micro-batches
        self._splits_groups = args.prefix_sharing and args.per_device_train_batch_size < args.num_generations

    def _agreed(self, found_in: Callable[[PreTrainedModel], bool | None]) -> bool:
        """
        What is found in all models, on all processes, that can be tried: with FSDP2, TRL divides the reference before,
        and a process may wait for weights of the first. Nothing is so in a kind that nobody could try.
        """
        for kind in dict.fromkeys(type(model.config) for model in self._models):  # FSDP2 changes a model's class
            answers = {found_in(model) for model in self._models if type(model.config) is kind}
            is_so, is_not = on_any_process([True in answers, False in answers], self.device)
            if is_not or not is_so:
                return False
        return True

    @property
    def _batch(self) -> _Batch | None:
        return self._batches.get(self.model.training)

    @property
    def _goes_whole(self) -> bool:
        return self._batch is not None and self._batch.goes_whole

    @property
    def count(self) -> TokenCount:
        """What is scored now adds to it. An evaluation is no part of the step that follows."""
        return self._count if self.model.training else TokenCount()

    def rows_per_prompt(self, num_rows: int) -> int:
        """Number of consecutive rows that are sure to have the same prompt, the same on every process."""
        # In evaluation, a batch can hold a part of a prompt's completions
        in_evaluation = self.args.num_generations_eval or self.args.num_generations
        return math.gcd(num_rows, self.args.num_generations if self.model.training else in_evaluation)

    def rows_to_score(self, batch_size: int) -> int:
        """Number of rows that are scored together: a prompt's, if they would be fewer."""
        is_shared = self.model.training and not self._goes_whole
        return self.args.num_generations if self._splits_groups and is_shared else batch_size

    def of_rows(
        self, model: PreTrainedModel, rows: slice, given: dict, alone: bool = False
    ) -> SharedPrefixPasses | TokenBudgetPasses:
        """
        Passes of consecutive rows of a batch through one of the models, or of rows that share among themselves
        `alone`. `given` is what TRL scores them with: `input_ids` of shape `(B, P + C)` with `logits_to_keep`
        completion columns, and, of images, `num_images` and `num_tiles` of each row.
        """
        self._has_passes |= torch.is_grad_enabled()
        bounds = (given["input_ids"].size(1) - given["logits_to_keep"], self.args.tokens_per_forward)
        common = {"activation_offloading": self.args.activation_offloading, "count": self.count}
        if not self.args.prefix_sharing or self._goes_whole:
            return TokenBudgetPasses(*bounds, **common)
        tree, first = None if alone else self._scored, rows.start
        if torch.is_grad_enabled():
            tree = self._tree_to_train(model)
            first += self._first_row(tree)
        elif first == 0 and tree is not None:
            tree.close()  # each model that scores begins with the first row
        common |= {name: given[name][rows] for name in ("num_images", "num_tiles") if given.get(name) is not None}
        return SharedPrefixPasses(
            *bounds,
            completions_per_forward=self.args.per_device_train_batch_size if self._splits_groups else None,
            tree=tree,
            rows=range(first, first + rows.stop - rows.start),
            group_size=self._batch.group_size if alone and self._batch is not None else 1,
            **common,
        )

    def go_whole(self, reason: GoesWhole) -> None:
        """Rows go through the model as they are, if no other process waits for them in passes."""
        if has_several_processes():
            raise reason
        self.warn(f"Rows go through the model whole: {reason}")

    def warn(self, text: str) -> None:
        """Once."""
        kind = re.sub(r"\d+", "", text)  # of whatever row
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(text)

    def _tree_to_train(self, model: PreTrainedModel) -> Tree | None:
        """That of the update, None for rows that are no part of a training step, or score another model than it
        trains: a reference, or the policy without its adapter."""
        if not self._rows or self._batch is None:
            return None
        if model is not causal_lm_of(self.model) or state_of(self.model) != self._state:
            return None
        if self._trained is None:
            if len(self._rows) > self.args.per_device_train_batch_size and has_parameter_hooks(self.model):
                self.warn(
                    "A hook takes the gradient of a parameter behind each micro-batch, so prompts are shared within "
                    "micro-batches only. Set `per_device_train_batch_size` to a multiple of `num_generations`."
                )
                return None
            prompts = self._batch.prompts[self._rows.start : self._rows.stop]
            self._trained = self._tree(self._batch, prompts, self.args.per_device_train_batch_size)
        return self._trained

    def _first_row(self, tree: Tree | None) -> int:
        """Which row of an update's tree is the first one of the micro-batch."""
        return 0 if tree is None else len(tree.prompts) - len(self._rows)

    def _tree(self, batch: _Batch, prompts: Prompts, rows_per_backward: int | None = None) -> Tree:
        backward = {"rows_per_backward": rows_per_backward, "in_one_backward": self._in_one_backward}
        if self.num_processes == 1:
            return Tree.of(prompts, **backward)
        length = batch.common_length if len(prompts) > batch.group_size else 0
        return Tree.of_groups(prompts, batch.group_size, length, **backward)

    def compare_rows(self, given: dict) -> None:
        """
        Find out what the prompts of a batch, see [`~TrainerPasses.of_rows`], have in common with their images, and
        whether it saves time to share them on any process. Processes that shard the weights must call the model
        equally often, so that several share what each group of prompts begins with, and what all prompts do if it is
        enough on each.
        """
        if not self.args.prefix_sharing:
            return
        if self.model.training:  # that of an adapter that is new, say
            check_dropout(self.model, self.args.shares_dropout)
        try:
            batch = self._compare(given)
        except GoesWhole as reason:
            self.go_whole(reason)
            self._scored = batch = None
        self._batches[self.model.training] = batch

    def _compare(self, given: dict) -> _Batch:
        inputs = {name: given[name] for name in (*OF_IMAGES, *OF_TOKENS) if given.get(name) is not None}
        num_rows = len(given["input_ids"])
        multimodal = MultimodalInputs.of(inputs, num_rows, given.get("num_images"), given.get("num_tiles"))
        input_ids, attention_mask = given["input_ids"].cpu(), given["attention_mask"].cpu()
        prompt_ids, prompt_mask = (x[:, : -given["logits_to_keep"]] for x in (input_ids, attention_mask))
        backbone = causal_lm_of(self.model).base_model
        prompts = prompts_of(backbone, prompt_ids, prompt_mask, multimodal, self._shares_starts)
        group_size = self.rows_per_prompt(len(prompts))
        length = common_length(prompts, group_size)
        found = [prompts.differ_whole(group_size), length == 0]
        differ, is_without = on_any_process(found, self.device)
        batch = _Batch(prompts, 1 if differ else group_size, 0 if is_without else length)
        self._scored = self._tree(batch, prompts)
        bounds = (self.args.per_device_train_batch_size, self.args.tokens_per_forward)
        is_worth_it = not self._may_go_whole or saves_time(self._scored, attention_mask.sum(1), *bounds)
        (is_worth_it,) = on_any_process([is_worth_it], self.device)
        if not is_worth_it:
            alike = self._scored.num_tokens < int(prompts.lengths.sum())
            why = "prompts have too little in common" if alike else "no two prompts of a batch begin alike"
            self.warn(f"Rows go through the model whole, because sharing would save no time: {why}.")
        return replace(batch, goes_whole=not is_worth_it)

    def what_is_shared(self) -> str:
        """In a line, and what is not, and why."""
        args, budget = self.args, self.args.tokens_per_forward
        passes = "" if budget is None else f", in passes of at most {budget} tokens"
        if not args.prefix_sharing:
            noise = ", whose dropout draws other noise than rows together do" if dropouts(self.model) else ""
            return f"rows go through the model whole{passes}{noise}."
        engine = (
            "vLLM" if args.use_vllm else "continuous batching" if args.use_transformers_continuous_batching else None
        )
        where = "generated, scored and trained" if engine is None else f"scored and trained ({engine} generates)"
        starts = "what different prompts begin with, too"
        if not self._shares_starts:
            starts = "but not what different prompts begin with (positions count padding, or FSDP2 came before)"
        elif self.num_processes > 1:
            starts = "and what all prompts of a batch begin with"
        return (
            f"each prompt is computed once for its {args.num_generations} completions where they are {where}{passes}, "
            f"{starts}."
            + (" They share the dropout of its tokens." if args.shares_dropout and dropouts(self.model) else "")
        )

    def metrics(self) -> dict[str, int | float]:
        """
        Of what was scored and trained since the last call: tokens that went through the model, padding included, those
        of the same rows by themselves, and how many times as many these are.
        """
        count, self._count = self._count, TokenCount()
        return {
            "prefix_sharing/num_tokens": count.in_passes,
            "prefix_sharing/num_tokens_whole_rows": count.in_whole_rows,
            "prefix_sharing/token_ratio": count.in_whole_rows / max(1, count.in_passes),
        }

    def has_other_prompts(self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> bool:
        """Whether rows of a rollout with these left-padded prompts are not, on each process, as they were compared."""
        batch = self._batch
        is_other = batch is not None and not batch.prompts.are(Prompts.of(prompt_ids.cpu(), prompt_mask.cpu()))
        return on_any_process([is_other], self.device)[0]

    def generate_of(
        self, model: PreTrainedModel, processing_class, images: list[list | None] | None
    ) -> Callable[..., torch.Tensor]:
        """`generate` of a model for a batch with these images of each row, which shares prompts."""
        if not self.args.prefix_sharing:
            return model.generate
        num_images = [len(x) if x else 0 for x in images] if images is not None else None

        def generate(*args, **kwargs) -> torch.Tensor:
            names = ("input_ids", "generation_config", "logits_processor", "stopping_criteria")
            inputs = {**dict(zip(names, args, strict=False)), **kwargs}
            if "inputs" in inputs:
                inputs["input_ids"] = inputs.pop("inputs")
            of_images = {name: x for name, x in inputs.items() if name in OF_IMAGES}
            group_size = self.rows_per_prompt(len(inputs.get("input_ids", ())))
            num_tiles = count_tiles(processing_class, images, num_images, of_images)
            try:
                return generate_with_shared_prefix(
                    model, **inputs, group_size=group_size, num_images=num_images, num_tiles=num_tiles
                )
            except GoesWhole as reason:
                if images is not None and has_several_processes():
                    raise
                self.warn(f"`generate` computes the prompt of each row: {reason}")
            return model.generate(*args, **kwargs)

        return generate

    def shuffle(self, batch: dict[str, Sequence | None]) -> dict[str, Sequence | None]:
        """Shuffle a rollout. With `prefix_sharing`, the completions of a prompt stay together."""
        rows = torch.arange(len(next(x for x in batch.values() if x is not None)))
        batch = shuffle_groups({**batch, _ROWS: rows}, self.args.num_generations if self.args.prefix_sharing else 1)
        order: torch.Tensor = batch.pop(_ROWS)
        rollout = self._batches.get(True)
        if rollout is not None and len(rollout.prompts) == len(order):  # else a subclass has rows of its own
            self._batches[True] = replace(rollout, prompts=rollout.prompts[order])
        return batch

    def reward_logits(self, reward_model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits of a reward model, of at most `tokens_per_forward` tokens of rows at a time."""
        batch_size = num_rows = len(inputs["input_ids"])
        if self.args.tokens_per_forward is not None:
            batch_size = max(1, self.args.tokens_per_forward // inputs["input_ids"].size(1))
        passes = [(None, rows) for rows in torch.arange(num_rows, device=self.device).split(batch_size)]
        passes = same_number_everywhere(passes, self.model, self.device)  # ZeRO-3 divides reward models, too
        return torch.cat([reward_model(**{name: x[rows] for name, x in inputs.items()}).logits for _, rows in passes])

    @contextmanager
    def micro_batch(self, trainer) -> Iterator[None]:
        """
        Forward and backward of a micro-batch of an [`RLOOTrainer`] or a [`GRPOTrainer`]. The trainer's steps tell its
        place among those of its prompt and of its update.
        """
        updates, steps = trainer.accelerator.sync_gradients, self.args.steps_per_generation
        before, self._state = self._state, state_of(self.model)
        waits = self._trained is not None and self._trained.nodes
        if waits and (self._state, traces_of(self.model)) != (before, self._traces):
            raise RuntimeError(
                "Weights, gradients, adapters or what is trained are not as they were in the micro-batch before, and "
                "prompts of the update still have a backward to come. Change them between updates (`on_step_end`), or "
                "set `per_device_train_batch_size` to a multiple of `num_generations`."
            )
        had_passes, self._has_passes = self._has_passes, False
        size, step = self.args.per_device_train_batch_size, trainer._step % steps
        left = trainer.current_gradient_accumulation_steps - self._place
        self._rows = range(step * size, min(step + left, steps) * size)
        try:
            yield
            self._leave(updates)
        except BaseException:
            self._forget()
            raise
        if had_passes and not self._has_passes:
            logger.warning(
                "The loss is computed without `_get_per_token_logps_and_entropies` of TRL's trainer, or of other rows "
                "than it was called with, so `prefix_sharing` and `tokens_per_forward` have no effect on it. One that "
                "a subclass has should hand its rows to that of `super()`."
            )

    def _leave(self, updates: bool) -> None:
        """Behind the backward of a micro-batch."""
        tree = self._trained
        if tree is not None:
            stop = self._first_row(tree) + self.args.per_device_train_batch_size
            tree.leave(stop)
            if updates and tree.nodes and self._in_one_backward:
                raise RuntimeError(
                    f"The weights would be updated behind {self._place + 1} micro-batches, and prompts of theirs have "
                    "others. After an interruption, create the trainer again and resume from a checkpoint."
                )
            if updates or stop >= len(tree.prompts):
                tree.leave(len(tree.prompts))
                self._trained = None
        self._rows, self._place = range(0), 0 if updates else self._place + 1
        if self._trained is not None:
            self._traces = traces_of(self.model)

    def _forget(self) -> None:
        """Forget what is kept for the next micro-batch."""
        for tree in filter(None, (self._trained, self._scored)):
            tree.close()
        self._trained, self._rows, self._place = None, range(0), 0

    def remove(self) -> None:
        """Take back what was done to the models. In the middle of an update, prompts have their backward."""
        if self._trained is not None:
            self._trained.backward()
        for model in self._models:
            disable_prefix_sharing(model, holder=self)

    def close(self, step: int) -> bool:
        """Forget what is kept for the next micro-batch. Returns whether some of a prompt's are missing."""
        self._forget()
        per_prompt = self.args.num_generations // self.args.per_device_train_batch_size
        return self._splits_groups and step % per_prompt != 0

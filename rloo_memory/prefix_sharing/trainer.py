"""The passes of RLOO and GRPO: how the rows of a batch go through the model."""

import importlib.metadata
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather, is_peft_model
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from .common_start import CommonStart, common_length
from .enabling import disable_prefix_sharing, enable_prefix_sharing, shares_starts
from .generation import generate_with_shared_prefix
from .images import MultimodalInputs, count_tiles
from .micro_batches import OpenPrefix
from .shared_passes import SharedPrefixPasses, group_rows
from .token_budget import TokenBudgetPasses, check_whole_rows, takes_whole_rows


logger = get_logger(__name__)

# Tokens of whole rows, padding included, for each token with shared prompts, from which on sharing takes less time.
# Attention to a prompt and to a completion apart takes longer than to both at once.
SAVES_TIME_FROM = 1.1


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


def saves_time(
    groups: list[torch.Tensor],
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    rows_per_micro_batch: int,
    tokens_per_forward: int | None = None,
    common_length: int = 0,
) -> bool:
    """
    Whether rows take less time with shared prompts than whole, as far as the number of tokens tells.

    Args:
        groups (`list[torch.Tensor]`):
            Rows that share a prompt.
        attention_mask (`torch.Tensor` of shape `(B, P + C)`):
            1 for tokens, 0 for padding, on the host.
        logits_to_keep (`int`):
            Number of completion columns, C.
        rows_per_micro_batch (`int`):
            Number of rows that are padded to one length.
        tokens_per_forward (`int`, *optional*):
            Tokens that go through the model together.
        common_length (`int`, *optional*, defaults to `0`):
            Number of tokens that all prompts begin with.
    """
    lengths = attention_mask.sum(1)
    prefixes = attention_mask[:, :-logits_to_keep].sum(1) - 1
    whole = TokenBudgetPasses(attention_mask.size(1) - logits_to_keep, tokens_per_forward)
    of_whole_rows = sum(whole.count_tokens(rows.tolist()) for rows in lengths.split(rows_per_micro_batch))
    saved = sum((len(rows) - 1) * int(prefixes[rows[0]]) for rows in groups) + (len(groups) - 1) * common_length
    return of_whole_rows >= SAVES_TIME_FROM * (int(lengths.sum()) - saved)


@dataclass(frozen=True)
class _Update:
    """What a micro-batch knows of the update that it is a part of."""

    is_last: bool  # of its micro-batches
    prompts_go_on: bool  # whether prompts that go through the model with it have their backward with the last
    num_prompts: int


class TrainerPasses:
    """
    The passes of a trainer with `prefix_sharing`, `tokens_per_forward` or both.

    Args:
        args ([`RLOOConfig`] or [`GRPOConfig`]):
            Arguments of the trainer.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Policy, which is prepared for the passes.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference model, which is prepared, too.
        takes_images (`bool`, *optional*, defaults to `False`):
            Whether prompts can have images.

    Raises:
        ValueError: If rows cannot go through the models in passes, or not on these processes.
    """

    def __init__(
        self,
        args,
        accelerator: Accelerator,
        model: PreTrainedModel,
        ref_model: PreTrainedModel | None = None,
        takes_images: bool = False,
    ):
        self.args = args
        self.model = model
        self.device = accelerator.device
        self.num_processes = accelerator.num_processes
        # Whether prompts of a group of the last batch differ on any process, in training and in evaluation
        self._prompts_differ = {True: False, False: False}
        # Number of tokens that the prompts of the last batch begin with, likewise
        self._common_length = {True: 0, False: 0}
        # Whether its prompts are so short that its rows go through the model whole
        self._goes_whole = {True: False, False: False}
        self._open_prefix = None
        # What prompts begin with, of an update and of a batch that is scored
        self._trained_start = self._scored_start = None
        self._update: _Update | None = None  # in a training step
        self._place = 0  # of the micro-batch in its update
        self._has_passes = True  # whether the loss of the last training step came from passes
        option = "prefix_sharing=True" if args.prefix_sharing else f"tokens_per_forward={args.tokens_per_forward}"
        if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
            raise ValueError(
                f"`{option}` runs the layers several times in a forward, which is not tested with FSDP1. Use FSDP2 or "
                "DeepSpeed."
            )
        # Passes need the non-reentrant checkpointing, which frozen weights take from DeepSpeed 0.19.3 on
        deepspeed = accelerator.state.deepspeed_plugin
        is_zero3 = deepspeed is not None and deepspeed.zero_stage == 3
        if is_zero3 and is_peft_model(model) and args.gradient_checkpointing:
            version = importlib.metadata.version("deepspeed")
            if Version(version) < Version("0.19.3"):
                raise ValueError(
                    f"`{option}` with PEFT, DeepSpeed ZeRO-3 and gradient checkpointing needs `deepspeed>=0.19.3`, "
                    f"found {version}. Upgrade DeepSpeed, or set `gradient_checkpointing=False`."
                )
        if takes_images and not args.prefix_sharing:
            raise ValueError(
                f"`{option}` divides rows of text and supports images only with `prefix_sharing=True`. Lower "
                "`per_device_train_batch_size` instead."
            )
        self._models = [model] if ref_model is None else [model, ref_model]
        for each in self._models:
            enable_prefix_sharing(each) if args.prefix_sharing else check_whole_rows(each)
        self._may_go_whole = args.prefix_sharing and not takes_images and all(map(takes_whole_rows, self._models))
        self._in_one_backward = accelerator.distributed_type != DistributedType.NO
        # The completions of a prompt can be spread over several micro-batches
        if args.prefix_sharing and args.per_device_train_batch_size < args.num_generations:
            self._open_prefix = OpenPrefix(
                num_micro_batches=args.num_generations // args.per_device_train_batch_size,
                in_one_backward=self._in_one_backward,
            )

    def rows_per_prompt(self, num_rows: int) -> int:
        """Number of consecutive rows that are sure to have the same prompt, the same on every process."""
        # In evaluation, a batch can hold a part of a prompt's completions
        in_evaluation = self.args.num_generations_eval or self.args.num_generations
        return math.gcd(num_rows, self.args.num_generations if self.model.training else in_evaluation)

    def rows_to_score(self, batch_size: int) -> int:
        """Number of rows that are scored together: a prompt's, with one run of the prompt, if they would be fewer."""
        is_shared = self.model.training and not self._goes_whole[True]
        return self.args.num_generations if self._open_prefix is not None and is_shared else batch_size

    def of_rows(
        self,
        rows: slice,
        input_ids: torch.Tensor,
        logits_to_keep: int,
        num_images: list[int] | None,
        num_tiles: list[int] | None,
    ) -> SharedPrefixPasses | TokenBudgetPasses:
        """
        Passes of some rows of a batch, whose rows follow one another.

        Args:
            rows (`slice`):
                Start and end of the rows.
            input_ids (`torch.Tensor` of shape `(B, P + C)`):
                Tokens of the batch.
            logits_to_keep (`int`):
                Number of completion columns, C.
            num_images (`list[int]`, *optional*):
                Number of images of each row of the batch.
            num_tiles (`list[int]`, *optional*):
                Number of tiles of each row of the batch.
        """
        self._has_passes |= torch.is_grad_enabled()
        bounds = (input_ids.size(1) - logits_to_keep, self.args.tokens_per_forward)
        if not self.args.prefix_sharing or self._goes_whole[self.model.training]:
            return TokenBudgetPasses(*bounds, activation_offloading=self.args.activation_offloading)
        # Where prompts of a group differ, micro-batches share for themselves. Processes that shard the weights must
        # call the model equally often, so that several have a prompt for each row.
        group_size, open_prefix = self.rows_per_prompt(rows.stop - rows.start), self._open_prefix
        if self._prompts_differ[self.model.training]:
            group_size, open_prefix = group_size if self.num_processes == 1 else 1, None
        return SharedPrefixPasses(
            *bounds,
            completions_per_forward=None if self._open_prefix is None else self.args.per_device_train_batch_size,
            group_size=group_size,
            num_images=None if num_images is None else num_images[rows],
            num_tiles=None if num_tiles is None else num_tiles[rows],
            activation_offloading=self.args.activation_offloading,
            open_prefix=open_prefix,
            common_start=self._common_start(rows, len(input_ids)),
        )

    def _common_start(self, rows: slice, num_rows: int) -> CommonStart | None:
        """What the prompts of these rows begin with: those of an update in training, those of a batch in scoring."""
        length = self._common_length[self.model.training]
        if torch.is_grad_enabled():
            if self._update is None:  # rows that are no part of a training step
                return None
            if self._place == 0 and self._trained_start is None and length > 0 and self._update.num_prompts > 1:
                self._trained_start = CommonStart(length, self._in_one_backward)
            if self._trained_start is not None:
                self._trained_start.open(self._update.is_last, self._update.prompts_go_on)
            return self._trained_start
        if rows.start == 0:
            self._scored_start = CommonStart(length) if length > 0 else None
            if self._scored_start is not None and rows.stop < num_rows:
                self._scored_start.open()
        start = self._scored_start
        if rows.stop >= num_rows:
            self._scored_start = None
        return start

    def compare_rows(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        inputs: dict[str, torch.Tensor],
        num_images: list[int] | None,
        num_tiles: list[int] | None,
    ) -> None:
        """
        Find out what the rows of a batch of shape `(B, P + C)`, with their images, have in common: whether prompts of a
        group differ on any process, as environments, rollout functions and subclasses can give them; how many tokens all
        prompts of this process begin with, if those of every process do with enough; and whether it saves time to share
        prompts on any process.
        """
        if not self.args.prefix_sharing:
            return
        group_size = self.rows_per_prompt(len(input_ids))
        multimodal = MultimodalInputs.of(inputs, len(input_ids), num_images, num_tiles)
        input_ids, attention_mask = input_ids.cpu(), attention_mask.cpu()
        prompt_ids, prompt_mask = input_ids[:, :-logits_to_keep], attention_mask[:, :-logits_to_keep]
        groups = group_rows(prompt_ids, prompt_mask, group_size, multimodal)
        length = 0
        if len(groups) > 1 and all(shares_starts(model) for model in self._models):
            length = common_length(prompt_ids, prompt_mask, getattr(self.model.config, "image_token_id", None))
        bounds = (self.args.per_device_train_batch_size, self.args.tokens_per_forward)
        is_worth_it = not self._may_go_whole or saves_time(groups, attention_mask, logits_to_keep, *bounds, length)
        found = [len(groups) * group_size > len(input_ids), length == 0, is_worth_it]
        differ, is_without, is_worth_it = gather(torch.tensor([found], device=self.device)).any(0).tolist()
        mode = self.model.training
        if self._goes_whole[mode] == is_worth_it:
            way = "shared" if is_worth_it else "so short that rows go through the model whole"
            logger.info(f"From this batch on, prompts are {way}.")
        self._prompts_differ[mode], self._goes_whole[mode] = differ, not is_worth_it
        self._common_length[mode] = 0 if is_without else length

    def generate_of(
        self, model: PreTrainedModel, processing_class, images: list[list | None] | None
    ) -> Callable[..., torch.Tensor]:
        """`generate` of a model for a batch with these images of each row. With `prefix_sharing`, it shares prompts."""
        if not self.args.prefix_sharing:
            return model.generate
        num_images = [len(x) if x else 0 for x in images] if images is not None else None

        def generate(input_ids: torch.Tensor, **inputs) -> torch.Tensor:
            return generate_with_shared_prefix(
                model,
                input_ids,
                group_size=self.rows_per_prompt(len(input_ids)),
                num_images=num_images,
                num_tiles=count_tiles(processing_class, images, num_images, inputs),
                **inputs,
            )

        return generate

    def shuffle(self, batch: dict[str, Sequence | None]) -> dict[str, Sequence | None]:
        """Shuffle a batch. With `prefix_sharing`, the completions of a prompt stay together."""
        return shuffle_groups(batch, self.args.num_generations if self.args.prefix_sharing else 1)

    def reward_logits(self, reward_model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits of a reward model, of at most `tokens_per_forward` tokens of rows at a time."""
        batch_size = num_rows = len(inputs["input_ids"])
        if self.args.tokens_per_forward is not None:
            batch_size = max(1, self.args.tokens_per_forward // inputs["input_ids"].size(1))
        batches = [
            {name: x[start : start + batch_size] for name, x in inputs.items()}
            for start in range(0, num_rows, batch_size)
        ]
        return torch.cat([reward_model(**batch).logits for batch in batches])

    @contextmanager
    def micro_batch(self, trainer) -> Iterator[None]:
        """
        Forward and backward of a micro-batch of an [`RLOOTrainer`] or a [`GRPOTrainer`]. The trainer's steps tell its
        place among those of its prompt and of its update.
        """
        updates = trainer.accelerator.sync_gradients
        had_passes, self._has_passes = self._has_passes, False
        try:
            if self._open_prefix is not None:
                self._open_prefix.enter(trainer._step, updates)
            self._enter_update(updates, trainer.current_gradient_accumulation_steps)
            yield
            if self._open_prefix is not None:
                self._open_prefix.backward()
            if updates and self._trained_start is not None:
                self._trained_start.backward()
                self._trained_start = None
            self._update, self._place = None, 0 if updates else self._place + 1
        except BaseException:
            self._forget()
            raise
        if had_passes and not self._has_passes:
            logger.warning(
                "The loss is computed without `_get_per_token_logps_and_entropies` of TRL's trainer, so "
                "`prefix_sharing` and `tokens_per_forward` have no effect on it. A subclass that has its own should "
                "call that of `super()`."
            )

    def _enter_update(self, is_last: bool, num_micro_batches: int) -> None:
        per_prompt = 1 if self._open_prefix is None else self._open_prefix.num_micro_batches
        num_rows = num_micro_batches * self.args.per_device_train_batch_size
        self._update = _Update(
            is_last,
            prompts_go_on=self._place + per_prompt >= num_micro_batches,
            num_prompts=num_rows if self._prompts_differ[True] else num_rows // self.args.num_generations,
        )

    def _forget(self) -> None:
        """Forget what is kept for the next micro-batch."""
        if self._open_prefix is not None:
            self._open_prefix.close()
        self._trained_start = self._scored_start = self._update = None
        self._place = 0

    def remove(self) -> None:
        """Take back what was done to the models."""
        for model in self._models:
            disable_prefix_sharing(model)

    def close(self, step: int) -> bool:
        """Forget what is kept for the next micro-batch. Returns whether some of a prompt's are missing."""
        self._forget()
        if self._open_prefix is None:
            return False
        return step % self._open_prefix.num_micro_batches != 0

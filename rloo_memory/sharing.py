"""Prefix sharing for a trainer of the TRL that is installed, whichever that is: `share_prompts(trainer)`.

It replaces methods of one trainer and the forwards of its models, each of which calls what it replaces, by way of
`prefix_sharing.trainer.TrainerPasses`.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import ProcessorMixin
from transformers.modeling_outputs import SequenceClassifierOutput

from rloo_memory.calls import Call, Replaced, Scored, put_back, replaced
from rloo_memory.prefix_sharing.config import check_passes_config
from rloo_memory.prefix_sharing.hooks import hooks_of
from rloo_memory.prefix_sharing.images import OF_IMAGES
from rloo_memory.prefix_sharing.lm_head import backbone_gives, causal_lm_of
from rloo_memory.prefix_sharing.passes import GoesWhole, on_any_that_gathers
from rloo_memory.prefix_sharing.probe import without_dropout
from rloo_memory.prefix_sharing.trainer import TrainerPasses

# What is replaced, and what TRL calls it with, in this order
METHODS = {
    "train": (),
    "training_step": (),
    "_prepare_inputs": (),
    "_generate_and_score_completions": (),
    "_generate_single_turn": ("prompt_ids", "images"),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
}
DEFAULTS = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
CPU_TILE = 512  # words of the vocabulary
SHUFFLE = "shuffle_sequence_dict"  # by which the module of a trainer shuffles the rows of a rollout


def share_prompts(
    trainer, tokens_per_forward: int | None = None, prefix_sharing: bool = True, shares_dropout: bool = False
) -> "PromptSharing":
    """
    Have a trainer compute each prompt once for all its completions, from its next training on. Gradients are the same
    up to rounding. Some rows of the first batch are scored whole, too, and compared.

    Args:
        trainer (`trl.RLOOTrainer` or `trl.GRPOTrainer`, or a subclass):
            Of TRL 1.14 or newer, as released.
        tokens_per_forward (`int`, *optional*):
            Tokens of completions of a prompt that go through the model together. If `None`, their number is not
            bounded but by `per_device_train_batch_size`.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            `False` leaves rows whole. They go through the model in passes of `tokens_per_forward` tokens.
        shares_dropout (`bool`, *optional*, defaults to `False`):
            Whether the completions of a prompt may share the dropout of its tokens (`lora_dropout`). Gradients then
            have the mean that they have with dropout of each row's own, and another variance.

    Returns:
        `PromptSharing`: its `remove()` undoes it.

    Raises:
        ImportError: If transformers is too old.
        ValueError: If the trainer, its settings or its models cannot share prompts exactly; it is left as it was.
    """
    sharing = PromptSharing(trainer, tokens_per_forward, prefix_sharing, shares_dropout)
    try:
        sharing.install()
    except BaseException:
        sharing.remove()
        raise
    return sharing


class PromptSharing:
    """What [`share_prompts`] has replaced. `remove()` puts it back."""

    def __init__(self, trainer, tokens_per_forward: int | None, prefix_sharing: bool, shares_dropout: bool):
        check_trainer(trainer)
        if tokens_per_forward is None and not prefix_sharing:
            raise ValueError(
                "`prefix_sharing=False` without `tokens_per_forward` would change nothing: set that, or train without "
                "`share_prompts`."
            )
        self.trainer = trainer
        self.settings = {"prefix_sharing": prefix_sharing, "tokens_per_forward": tokens_per_forward}
        self.args = copy.copy(trainer.args)
        offloading = {"activation_offloading": getattr(trainer.args, "activation_offloading", False)}  # the launcher's
        vars(self.args).update(self.settings, shares_dropout=shares_dropout, **offloading)
        self.replaced: list[tuple[object, str, object, object]] = []  # owner, name, what it is, what it was
        self.passes: TrainerPasses | None = None
        self.names = {name: parameters_of(trainer, name) or [] for name in METHODS}
        self.scored: Scored | None = None
        self.compared = False  # shared with whole rows
        self.rollout_compared = False  # the prompts of a group with one another

    @property
    def in_use(self) -> TrainerPasses:
        """Raises RuntimeError where a reward function, say, has removed the sharing within a step."""
        if self.passes is None:
            raise RuntimeError(
                "`prompt_sharing.remove()` was called within a step. Call it before or behind `train()`."
            )
        return self.passes

    def install(self) -> None:
        trainer = self.trainer
        deepspeed = trainer.accelerator.state.deepspeed_plugin
        if is_peft_model(trainer.model) and deepspeed is not None and deepspeed.zero_stage == 3:
            # There TRL takes the reentrant checkpointing, for DeepSpeed before 0.19.3, which `TrainerPasses` refuses
            kwargs = {**(trainer.args.gradient_checkpointing_kwargs or {}), "use_reentrant": False}
            for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):  # since 5.24
                if hasattr(trainer.args, name):
                    self.put(trainer.args, name, kwargs)
            self.args.gradient_checkpointing_kwargs = kwargs
        check_passes_config(self.args)
        if trainer.args.use_liger_kernel:  # as `train` does, but before the model is tried
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
        models = [trainer.accelerator.unwrap_model(x) for x in (trainer.model, trainer.ref_model) if x is not None]
        check_trained(trainer.model)
        takes_images = isinstance(trainer.processing_class, ProcessorMixin)
        self.passes = TrainerPasses(self.args, trainer.accelerator, *models, takes_images=takes_images)
        for name in METHODS:
            self.replace(trainer, name, getattr(PromptSharing, name.removeprefix("_")))
        for model in models:
            causal_lm = causal_lm_of(model)
            self.replace(causal_lm, "forward", functools.partial(PromptSharing.forward, model=causal_lm))
            self.replace(model, "gradient_checkpointing_enable", PromptSharing.checkpointing_enable)
        for reward_func in trainer.reward_funcs:
            if self.args.tokens_per_forward is not None and isinstance(reward_func, nn.Module):
                self.replace(reward_func, "forward", PromptSharing.reward)
        trainer.prompt_sharing = self

    def replace(self, owner, name: str, hook: Callable) -> None:
        """Have `hook`, which is given this, the original and its arguments, be called for `owner.name`."""
        self.put(owner, name, Replaced(self, getattr(owner, name), hook, vars(owner).get(name)))

    def put(self, owner, name: str, value) -> None:
        self.replaced.append((owner, name, value, vars(owner).get(name)))
        setattr(owner, name, value)

    def remove(self) -> None:
        """Undo it. The next training computes whole rows."""
        for owner, name, value, before in reversed(self.replaced):
            if vars(owner).get(name) is value:  # else something replaced it in turn, and still calls it
                while isinstance(before, Replaced) and before.is_over:
                    before = before.before
                put_back(owner, name, before)
        if self.passes is not None:
            self.passes.remove()
        self.passes, self.replaced = None, []
        vars(self.trainer).pop("prompt_sharing", None)

    # -- what is called in place of a trainer's methods ---------------------------------------------------------------

    def train(self, original, *args, **kwargs):
        self.trainer.accelerator.print(f"share_prompts: {self.in_use.what_is_shared()}")
        try:
            return original(*args, **kwargs)
        finally:
            # What an interruption leaves of a prompt's micro-batches is no part of the next training
            if self.passes is not None and self.passes.close(self.trainer._step):
                self.passes.warn("Training ended amid the completions of a prompt. Another begins with a new rollout.")
                self.trainer._step, self.trainer._buffered_inputs = 0, None

    def training_step(self, original, *args, **kwargs):
        trainer = self.trainer
        with self.in_use.micro_batch(trainer):
            loss = original(*args, **kwargs)
        if trainer._step % trainer.current_gradient_accumulation_steps == 0:
            for name, value in self.in_use.metrics().items():
                trainer._metrics["train"][name].append(value)
        return loss

    def prepare_inputs(self, original, *args, **kwargs):
        # The completions of a prompt must stay in the same batch
        with replaced(module_of(self.trainer), SHUFFLE, self.in_use.shuffle):
            return original(*args, **kwargs)

    def generate_and_score_completions(self, original, *args, **kwargs):
        self.rollout_compared = False
        rows = original(*args, **kwargs)
        # Where nothing was scored, or a subclass has put them in another order since
        if not self.rollout_compared or self.in_use.has_other_prompts(rows["prompt_ids"], rows["prompt_mask"]):
            self.in_use.compare_rows(
                {
                    **rows,
                    "input_ids": torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),
                    "attention_mask": torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
                    "logits_to_keep": rows["completion_ids"].size(1),
                }
            )
        return rows

    def generate_single_turn(self, original, *args, **kwargs):
        model = self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped)
        images = Call.of(self.names["_generate_single_turn"], args, kwargs).given.get("images")
        whole = model.generate
        shared = self.in_use.generate_of(model, self.trainer.processing_class, images)

        def generate(*args, **kwargs):
            with replaced(model, "generate", whole):
                return shared(*args, **kwargs)

        with replaced(model, "generate", generate):
            return original(*args, **kwargs)

    def get_per_token_logps_and_entropies(self, original, *args, **kwargs):
        call = Call.of(self.names["_get_per_token_logps_and_entropies"], args, kwargs)
        if not torch.is_grad_enabled() and not self.rollout_compared:
            # Once a rollout, before its rows are scored: old and reference log-probabilities are of the same rows
            self.rollout_compared = True
            self.in_use.compare_rows(call.given)
        if not self.compared and self.can_compare(call.given["model"]):
            self.compare_with_whole_rows(original, call)
            self.compared = True
        batch_size = call.given.get("batch_size")
        if batch_size is not None:
            call = call.but(batch_size=self.in_use.rows_to_score(batch_size))
        return self.in_passes(original, call)

    def in_passes(self, original, call: Call, alone: bool = False):
        self.scored = Scored(call, alone)
        try:
            return call.to(original)
        finally:
            self.scored = None

    def can_compare(self, model: nn.Module) -> bool:
        """Whether it is the policy, without a hook of this step alone: that may expect all rows, and is watched."""
        model, policy = (self.trainer.accelerator.unwrap_model(x) for x in (model, self.trainer.model))
        backbone = causal_lm_of(policy).base_model
        route = getattr(backbone, "_prefix_sharing", None)
        return model is policy and (route is None or hooks_of(backbone) <= route.hooks)

    @torch.no_grad()
    def compare_with_whole_rows(self, original, call: Call) -> None:
        """Raise a `RuntimeError` where these rows have other log-probabilities than TRL gives them by themselves."""
        call = self.rows_to_compare(call)
        with without_dropout(call.given["model"]):
            shared = self.in_passes(original, call.but(batch_size=None), alone=True)[0]
            with small_tiles(call.given["input_ids"]):
                whole = call.but(batch_size=rows_with_an_image(call.given.get("num_images"))).to(original)[0]
        is_token = tokens_of(call)
        if not is_token.any():
            return
        shared, whole = shared[is_token], whole[is_token]
        if not whole.isfinite().all():
            self.in_use.warn(
                "TRL's own log-probabilities of the first batch are not all finite, so nothing could be compared. "
                f"Look at the weights, at the dtype ({self.trainer.model.dtype}) and at the attention implementation."
            )
            return
        args, dtype = self.trainer.args, self.trainer.model.dtype
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else dtype
        apart = (whole - shared).abs().mean().item()
        eps = max(torch.finfo(dtype).eps, 1e-12)  # rotary embeddings compute in float32, whatever the weights are
        most = eps**0.5 * max(1.0, whole.abs().mean().item())  # half of the digits
        if not apart <= most:
            raise RuntimeError(
                f"Log-probabilities of the first batch with shared prompts are {apart:.2g} from those of whole rows, "
                f"more than {most:.2g}. {type(self.trainer).__name__} does not fit `share_prompts`: leave it out."
            )

    def rows_to_compare(self, call: Call) -> Call:
        """The call with two of its rows, of which one has a token if any has; with all rows where there are images."""
        call = call.but(**{name: False for name in ("compute_entropy", "compute_aux_loss") if name in call.given})
        if any(call.given.get(name) is not None for name in OF_IMAGES):
            return call
        has_token = tokens_of(call).any(1)
        first, num_rows = int(has_token.int().argmax()), len(has_token)
        # Of one prompt if they can be, and two: each process must call the model equally often
        size = self.in_use.rows_per_prompt(num_rows)
        first_row = min(first, first // size * size + max(0, size - 2), max(0, num_rows - 2))
        rows = slice(first_row, first_row + 2)
        return call.but(**{name: x[rows] for name, x in call.given.items() if isinstance(x, torch.Tensor)})

    # -- what is called in place of models' forwards ------------------------------------------------------------------

    def forward(self, original, *args, model, **kwargs):
        scored, names = self.scored, inspect.signature(original).parameters if args else ()
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        rows = None if scored is None else scored.next_rows(named.get("input_ids"))
        # Rows of a subclass's own can be those of TRL on one process alone
        if scored is None or on_any_that_gathers(rows is None, model, self.in_use.device) or rows is None:
            return original(*args, **kwargs)
        try:
            passes = self.in_use.of_rows(model, rows, scored.call.given, scored.alone)
            if getattr(named.get("attention_mask"), "shape", None) != named["input_ids"].shape:
                raise GoesWhole("The model is called without an attention mask that has the shape of `input_ids`.")
            return forward_in_passes(model, original, passes, **named)
        except GoesWhole as reason:
            self.in_use.go_whole(reason)
        num_tokens = named["input_ids"].numel()
        self.in_use.count.add(num_tokens, num_tokens)
        return original(*args, **kwargs)

    def checkpointing_enable(self, original, *args, **kwargs):
        return checkpointing_enable(original, *args, **kwargs)

    def reward(self, original, *args, **inputs):
        """Of a reward model: its rows in passes of `tokens_per_forward` tokens, if it is called as TRL does."""
        if "input_ids" not in inputs or not all(isinstance(x, torch.Tensor) for x in inputs.values()):
            return original(*args, **inputs)
        return SequenceClassifierOutput(logits=self.in_use.reward_logits(original, inputs))


def tokens_of(call: Call) -> torch.Tensor:
    """Which columns of completions have a token."""
    return call.given["attention_mask"][:, -call.given["logits_to_keep"] :] != 0


def rows_with_an_image(num_images: list[int] | None) -> int:
    """The fewest rows in which a batch goes through a model that takes none of them without an image."""
    if not num_images or not any(num_images):
        return 1
    sizes, starts = range(1, len(num_images) + 1), range(len(num_images))
    return next(size for size in sizes if all(any(num_images[start : start + size]) for start in starts[::size]))


def forward_in_passes(model, original: Callable, passes, **kwargs):
    """What the forward `original` of `model` gives of completions, whose hidden states `passes` compute."""
    kwargs = {name: x for name, x in kwargs.items() if x is not None and x is not DEFAULTS.get(name)}
    of_head: dict[str, Any] = {
        name: kwargs.pop(name) for name in ("fused_lm_head", "logits_to_keep", "use_cache") if name in kwargs
    }
    of_columns = {name: kwargs[name] for name in ("input_ids", "attention_mask", "labels") if name in kwargs}
    kwargs.pop("labels", None)
    experts = kwargs.pop(
        "output_router_logits", getattr(model.config.get_text_config(), "output_router_logits", False)
    )
    if experts:
        kwargs["output_router_logits"], of_head["output_router_logits"] = True, False
    states = passes.forward(model.base_model, **kwargs)
    # From the last prompt token on, the LM head scores what a backbone gives that has run already
    of_columns = {name: x[:, passes.prefix_length - 1 :] for name, x in of_columns.items()}
    with backbone_gives(model, states.last_hidden_state), small_tiles(states.last_hidden_state):
        outputs = original(**of_columns, **of_head)
    if experts:
        outputs.aux_loss = states.aux_loss
    return outputs


def checkpointing_enable(original, gradient_checkpointing_kwargs: dict | None = None, **own):
    """TRL gives a model its checkpointing back after a generation, with arguments that PyTorch has not."""
    kwargs = dict(gradient_checkpointing_kwargs or {})
    own |= {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
    if not torch.accelerator.is_available():  # no device to take activations from
        own.pop("offload", None)
    return original(gradient_checkpointing_kwargs=kwargs or None, **own)


def small_tiles(states: torch.Tensor):
    """Without Triton, folding a tile of logits takes several float32 temporaries of its size."""
    from trl.trainer import utils  # 1.14 has no such LM head

    if states.device.type != "cpu" or not hasattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE"):
        return nullcontext()
    return replaced(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", CPU_TILE)


def module_of(trainer):
    """The module whose functions the trainer's `_prepare_inputs` calls, None where none shuffles."""
    modules = (sys.modules[cls.__module__] for cls in type(trainer).__mro__ if "_prepare_inputs" in vars(cls))
    return next((module for module in modules if hasattr(module, SHUFFLE)), None)


def check_trained(model) -> None:
    """Raise a `ValueError` for a model of which nothing is trained: gradients of inputs alone keep its loss alive."""
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "No parameter of the model requires a gradient, so nothing would be trained. Load a PEFT model with "
            "`PeftModel.from_pretrained(..., is_trainable=True)`, or pass a `peft_config`."
        )


def parameters_of(trainer, method: str) -> list[str] | None:
    """Those of a trainer's method where it is first defined, in TRL: overrides hand them on by whatever name."""
    definitions = [vars(cls)[method] for cls in type(trainer).__mro__ if method in vars(cls)]
    if not definitions:
        return None
    parameters = list(inspect.signature(definitions[-1]).parameters.values())[1:]
    names = [x.name for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    if all(x.kind is not x.VAR_POSITIONAL for x in parameters):
        return names
    return [*METHODS[method], *(name for name in names if name not in METHODS[method])]  # TRL 1.14 hands them on


def check_trainer(trainer) -> None:
    """Raise a `ValueError` where a trainer has not got what is replaced."""
    name = type(trainer).__name__
    if hasattr(trainer, "prompt_sharing"):
        raise ValueError(f"{name} shares its prompts already: call `trainer.prompt_sharing.remove()` first.")
    for method, wanted in METHODS.items():
        has = parameters_of(trainer, method)
        if has is None or not set(has) >= set(wanted):
            missing = f"`{method}`" if has is None else f"{sorted(set(wanted) - set(has))} of `{method}`"
            raise ValueError(
                f"`share_prompts` takes an RLOOTrainer or a GRPOTrainer of TRL 1.14 or newer, and {name} has no "
                f"{missing}. Train without it."
            )
    if module_of(trainer) is None:
        raise ValueError(f"`share_prompts` needs a `_prepare_inputs` that calls TRL's `{SHUFFLE}`. Train without it.")

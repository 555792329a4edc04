"""One training step on tensors without values: nothing is computed, no memory is allocated, and every byte is counted.

The model is built from its config. What runs is the model's own code and that of `rloo_memory.prefix_sharing`: its
passes of shared prompts or within a token budget, its generation with a shared cache. The trainer's steps around them
are re-enacted here: which model is called, with which shapes, with or without gradients, in which order; a test
compares that with real trainings. So are TRL's LM heads, in `rloo_memory.plan.simulation.heads`. What the trainer
repeats with the same shapes, the micro-batches of an update and the tokens of a completion, is done once; decoding
with the cache at its largest. What cannot run so is in `rloo_memory.plan.simulation.replaced`.
"""

import contextlib
import copy
import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import Adafactor, AutoModelForSequenceClassification, DynamicCache, GenerationConfig

from rloo_memory.errors import ConfigError
from rloo_memory.models import named_config
from rloo_memory.plan.checkpoint import quantized
from rloo_memory.plan.images import RolloutImages
from rloo_memory.plan.simulation.building import build, quantize, weights_not_in_8_bits, with_adapters
from rloo_memory.plan.simulation.events import REFERENCE, TOWER, mark
from rloo_memory.plan.simulation.generating import attending, grow, grow_shared, sample
from rloo_memory.plan.simulation.heads import HEADS
from rloo_memory.plan.simulation.live_bytes import LiveBytes
from rloo_memory.plan.simulation.offloaded import offloaded
from rloo_memory.plan.simulation.passes import passes_of, tree_of
from rloo_memory.plan.simulation.recurrent import operators_in_torch
from rloo_memory.plan.simulation.replaced import pretending
from rloo_memory.plan.simulation.shapes_only import ShapesOnly
from rloo_memory.plan.simulation.work import Work
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.lm_head import causal_lm_of
from rloo_memory.prefix_sharing.states import cache_argument

PHASES = ("load", "generate", "score", "train", "optimizer")


class Simulation:
    """The phases of one step of `setup`, once the optimizer has its state, with every layer of `hf_config`."""

    def __init__(self, setup, hf_config):
        if setup.device == "cpu":  # which is the host: nothing waits elsewhere
            setup = replace(setup, offload_reference=False, offload_reward=False)
        self.setup, self.config = setup, copy.deepcopy(hf_config)  # sharing is noted in a model's config
        self.memory, self.work = LiveBytes(), Work()
        self.shapes = ShapesOnly(self.memory, self.work)
        self.scores = ""  # `REFERENCE` while it does
        self.images = RolloutImages(setup, hf_config, self.shapes, self.memory)
        self.spread: dict = {}  # tree and first row of a micro-batch whose prompt has others
        self.shares_prompts = setup.prefix_sharing or setup.shares_generation
        self.memory.added = self.allocation
        # (phase, event, layer, how often it came before in this phase) -> bytes by kind at the peak until the next one
        self.stretches: dict[tuple, dict[str, int]] = {}
        self.current: tuple | None = None
        self.visits: Counter[tuple] = Counter()
        self.allocations = Counter()  # since the last event, by operation

    def run(self, passes: bool = True) -> dict[tuple, dict[str, int]]:
        """The peaks between events: a phase, a layer's forward, its backward, what is behind the layers or the LM head
        begins. Without `passes`, only loading and generation."""
        pretended = pretending(self.setup.device, self.shapes, self.head_backward())
        with contextlib.ExitStack() as self.patches, pretended, self.shapes:
            with self.phase("load"), warnings.catch_warnings():
                # Names that TRL and PEFT use; the new ones are not in transformers 5.17
                warnings.simplefilter("ignore", FutureWarning)
                self.load()
            self.create_optimizer()
            if self.setup.gradient_accumulation_steps > self.setup.steps_per_generation:
                self.make_gradients()  # it generates again before the optimizer's step
            self.model.eval()  # TRL switches gradient checkpointing off where there is no backward
            self.images.pixel_values = self.images.make()  # of the rollout before
            with self.phase("generate"), torch.no_grad(), self.images.new_rollout():
                if not self.setup.use_vllm:  # whose share of the device `rloo_memory.plan.predict` adds
                    self.generate_shared() if self.shares_prompts else self.generate()
            if not passes:
                return self.stretches
            with self.phase("score"), torch.no_grad(), self.images.new_rollout():
                self.score()
                self.event("batches")
                self.images.make()  # the trainer's batches get rows of their own from all that was scored
            self.model.train()
            with self.phase("train"), self.offloaded():
                self.train()
            with self.phase("optimizer"):
                self.optimizer.step()
        return self.stretches

    @contextlib.contextmanager
    def phase(self, name: str):
        self.memory.reset()
        self.current = (name, "start", None, 0)
        self.visits, self.allocations = Counter(), Counter()
        self.work.phase = name if name in ("score", "train") else None
        yield
        self.stretches[self.current] = dict(self.memory.at_peak)  # counting goes on
        self.current = self.work.phase = None

    def event(self, name: str, layer: int | None = None) -> None:
        """A new stretch begins."""
        if self.current is None:
            return
        self.stretches[self.current] = self.memory.at_peak
        self.current = (self.current[0], name, layer, self.visits[name, layer])
        self.visits[name, layer] += 1
        self.allocations.clear()
        self.memory.reset()
        # Nothing was allocated yet, but what is alive now can be the most
        self.stretches[self.current[0], f"{name}: begins", *self.current[2:]] = dict(self.memory.live)

    def allocation(self, operation) -> None:
        """What is alive when a storage was allocated, as a stretch of its own."""
        if self.current is None or self.current[0] == "load":  # a model's weights are many
            return
        phase, name, *rest = self.current
        if name.removeprefix(REFERENCE) not in TOWER:
            number = self.allocations[operation]
            self.stretches[phase, f"{name}: {operation.name()} {number}", *rest] = dict(self.memory.live)
            self.allocations[operation] += 1

    @contextlib.contextmanager
    def head_backward(self):
        """The backward of an LM head that makes its sums itself."""
        self.event("head's backward")
        with self.memory.of_kind("logits"):
            yield
        self.event("head's end")

    # -- the model and its optimizer ---------------------------------------------------------------------------------

    def load(self) -> None:
        setup = self.setup
        self.model, self.reference = build(setup, self.shapes, self.config), None
        self.backbone = self.model.base_model
        for patch in operators_in_torch(self.model, self.shapes):
            self.patches.enter_context(patch)
        if setup.lora_rank:
            self.model = with_adapters(self.model, setup, self.shapes)
        elif setup.beta:
            dtype = setup.reference_dtype or setup.dtype
            self.reference = build(replace(setup, dtype=dtype), self.shapes, copy.deepcopy(self.config))
            self.memory.watch(self.reference, "host" if setup.offload_reference else "reference")
        if not self.images:
            self.freeze_what_text_does_not_reach()
        if setup.reward_model:
            self.load_reward_model()
        if setup.weight_bits < 16:
            quantize(self.model, setup, self.shapes)
        self.memory.watch(self.model)
        self.memory.reset()  # the weights have their kind now
        mark(self)
        if setup.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        if self.shares_prompts:
            for model in filter(None, (self.model, self.reference)):
                try:
                    enable_prefix_sharing(model)
                except ValueError as error:
                    raise ConfigError(str(error)) from error

    def load_reward_model(self) -> None:
        setup = self.setup
        config = copy.deepcopy(self.config if setup.reward_model == "policy" else named_config(setup.reward_model))
        config.num_labels, config.pad_token_id = 1, 0  # TRL sets the tokenizer's padding token
        config.use_cache = not setup.uses_passes  # the launcher switches it off, TRL does not
        self.reward_model = build(setup, self.shapes, config, AutoModelForSequenceClassification).eval()
        if quantized(config, setup.device):
            quantize(self.reward_model, setup, self.shapes)
        self.memory.watch(self.reward_model, "host" if setup.offload_reward else "reward model")

    def freeze_what_text_does_not_reach(self) -> None:
        """Without a gradient, the weights of towers have no optimizer state either."""
        # A function of its own: a variable that is left would hold weights that are quantized afterwards
        for parameter in self.weights_of_towers():
            parameter.requires_grad_(False)

    def weights_of_towers(self) -> set:
        reached_by_text = {*self.model.get_decoder().parameters(), *self.model.get_output_embeddings().parameters()}
        return set(self.model.parameters()) - reached_by_text

    def create_optimizer(self) -> None:
        """The optimizer, with the state that it has from the second step on."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Paged state is in unified memory, which the driver moves to the host when the GPU is full
        paged = self.setup.optim.startswith("paged") and self.setup.device == "cuda"
        kind = "host" if paged else "optimizer state"
        bytes_per_weight = self.setup.optimizer_bytes_per_weight
        with self.memory.of_kind(kind):
            if bytes_per_weight is not None and self.setup.optim != "adafactor":  # they step in place
                weights = sum(parameter.numel() for parameter in trained)
                whole = weights_not_in_8_bits(self.model) if "8bit" in self.setup.optim else 0
                with self.shapes.new():
                    size = int((weights - whole) * bytes_per_weight) + whole * 8
                    self.optimizer = SimpleNamespace(state=torch.empty(size, dtype=torch.uint8), step=lambda: None)
                self.memory.rename(self.optimizer.state, kind)
                return
            if self.setup.optim == "adafactor":  # as Trainer has it; it makes the update of a matrix beside it
                self.optimizer = Adafactor(trained, lr=1e-6, scale_parameter=False, relative_step=False)
            else:
                fused = self.setup.optim == "adamw_torch_fused"
                # torch's choice where nothing is asked for (`_default_to_fused_or_foreach`)
                foreach = not fused and self.setup.device == "cuda"
                self.optimizer = torch.optim.AdamW(trained, fused=fused, foreach=foreach)
            self.make_gradients()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def offloaded(self):
        return offloaded(self.model, self.memory) if self.setup.activation_offloading else contextlib.nullcontext()

    def autocast(self):
        dtype = self.setup.autocast
        return torch.autocast("cpu", getattr(torch, dtype)) if dtype else contextlib.nullcontext()

    def ids(self, rows: int, columns: int) -> torch.Tensor:
        with self.shapes.new():
            return torch.zeros(rows, columns, dtype=torch.long)

    def rows_of(self, rows: int, columns: int) -> torch.Tensor:
        """Rows that begin with a prompt: real numbers where the model looks for images among them."""
        if not self.images:
            return self.ids(rows, columns)
        return self.images.among(torch.ones(rows, columns, dtype=torch.long))

    def groups_of(self, rows: int, columns: int) -> torch.Tensor:
        """The same for `prefix_sharing`, which compares them: the rows of a group are alike, no others."""
        groups = torch.arange(rows).div(self.setup.num_generations, rounding_mode="floor")
        return self.images.among(groups[:, None].repeat(1, columns))

    def causal_mask(self, rows: int, length: int) -> torch.Tensor:
        """Where a row has padding, transformers builds a mask for every row, query and key."""
        with self.shapes.new():
            return torch.ones(rows, 1, length, length, dtype=torch.bool)

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(self) -> None:
        """The prompts' forward, then the last token with the cache at its largest."""
        setup = self.setup
        rows, prompt, steps = setup.generation_rows, setup.prompt_tokens, setup.max_completion_length - 2
        ids = self.rows_of(rows, prompt)
        images = self.images.of_whole_rows(self.backbone, ids)
        cache = DynamicCache(config=self.config)
        with mock.patch.object(DynamicCache, "update", self.memory.of_kind("KV cache")(DynamicCache.update)):
            self.decode(ids, cache, logits_to_keep=1, **images)
        del images
        with self.memory.of_kind("KV cache"):
            grow(cache, steps, self.event)
        self.decode(self.ids(rows, 1), cache)

    def generate_shared(self) -> None:
        """The same with shared prompts: each once, then the last token with a cache that has room for all that came
        before."""
        rows, prompt = self.setup.generation_rows, self.setup.prompt_tokens
        input_ids, mask = self.groups_of(rows, prompt), torch.ones(rows, prompt, dtype=torch.long)
        with mock.patch.object(self.model, "generate", self.last_shared_token), self.generating():
            generate_with_shared_prefix(
                self.model,
                input_ids,
                mask,
                generation_config=GenerationConfig(max_new_tokens=self.setup.max_completion_length),
                group_size=self.setup.num_generations,
                num_images=self.images.number_of_each(rows),
                **self.images.inputs(input_ids),
            )

    def last_shared_token(self, **kwargs) -> None:
        """In place of transformers' `generate`, which is called with a cache of shared prompts."""
        setup, cache = self.setup, kwargs[self.cache_name]
        rows, prefix = setup.generation_rows, setup.prompt_tokens - 1
        steps = max(setup.max_completion_length - 2, 1)
        kind = type(attending(cache)[0][1])
        with mock.patch.object(kind, "make_room", self.memory.of_kind("KV cache")(kind.make_room)):
            self.decode_shared(rows, prefix, 1, cache)  # has the cache take what it keeps
        with self.memory.of_kind("KV cache"):
            grow_shared(cache, prefix, steps, self.window, self.event)
        self.event("decode")
        self.decode_shared(rows, prefix, steps, cache)

    def decode_shared(self, rows: int, prefix: int, step: int, cache) -> None:
        self.decode(
            self.ids(rows, 1),
            cache,
            attention_mask=torch.ones(rows, prefix + step, dtype=torch.long),
            position_ids=torch.full((rows, 1), prefix + step - 1),
        )

    def window(self, layer_idx: int) -> int | None:
        """Tokens that a layer sees, where that is not all of them."""
        config = self.config.get_text_config()
        types = getattr(config, "layer_types", None) or ["full_attention"] * (layer_idx + 1)
        return config.sliding_window if types[layer_idx] == "sliding_attention" else None

    def generating(self):
        """PEFT's `generate` calls the model inside, past the forward that accelerate wraps in autocast."""
        return contextlib.nullcontext() if self.setup.lora_rank else self.autocast()

    @property
    def cache_name(self) -> str:
        return cache_argument(causal_lm_of(self.model))

    def decode(self, input_ids: torch.Tensor, cache, **kwargs) -> None:
        """One forward of `generate` and its sampling."""
        with self.generating():
            logits = self.model(input_ids=input_ids, use_cache=True, **{self.cache_name: cache}, **kwargs).logits
        with self.memory.of_kind("logits"):
            sample(logits, self.setup)

    # -- scoring and training ----------------------------------------------------------------------------------------

    def hidden_states(self, backbone) -> torch.Tensor:
        """Hidden states of what is scored and one behind it, of shape (rows, positions, hidden)."""
        setup, rows = self.setup, self.setup.per_device_train_batch_size
        length = setup.prompt_tokens + setup.max_completion_length
        if setup.uses_passes:
            if not torch.is_grad_enabled():
                rows = setup.rows_to_score
            input_ids, mask = self.groups_of(rows, length), torch.ones(rows, length, dtype=torch.long)
            passes = passes_of(setup, self.images.number_of_each(rows), **self.spread)
            images = self.images.inputs(input_ids)
            return passes.forward(backbone, input_ids, mask, **images).last_hidden_state
        mask = self.causal_mask(rows, length) if setup.padded else None
        ids = self.rows_of(rows, length)
        images = self.images.of_whole_rows(backbone, ids)
        output = backbone(input_ids=ids, attention_mask=mask, use_cache=False, **images)
        return output.last_hidden_state[:, -setup.positions_to_score - 1 :]

    def log_probs(self, model, backbone) -> torch.Tensor:
        """Log-probabilities of one micro-batch, one row a token."""
        with self.autocast():
            hidden = self.hidden_states(backbone)
            self.event("head")
            with self.shapes.new(), self.memory.of_kind("logits"):
                head, ids = model.get_output_embeddings(), self.ids(len(hidden), hidden.shape[1] - 1)
                compute = HEADS[self.setup.lm_head]
                return compute(hidden, head, ids, self.setup)

    @contextlib.contextmanager
    def on_device(self, model, kind: str, offloaded: bool):
        """A model that is on the host except now, if it is `offloaded`."""
        if offloaded:
            self.memory.watch(model, kind)
        yield
        if offloaded:
            self.memory.watch(model, "host")

    def score(self) -> None:
        """The policy, the reference, the reward model. An offloaded reference leaves when the policy trains."""
        self.work.times = self.setup.rows_per_update / self.setup.rows_to_score / self.setup.num_iterations
        if self.setup.scores_policy:
            self.log_probs(self.model, self.backbone)
        self.event("reference")
        self.scores = REFERENCE
        with self.on_device(self.reference, "reference", self.setup.offload_reference):
            if self.reference is not None:
                self.log_probs(self.reference, self.reference.base_model)
            elif self.setup.beta:  # LoRA: the policy without its adapters
                with self.model.disable_adapter():
                    self.log_probs(self.model, self.backbone)
            self.scores, self.work.times = "", 1
            if self.setup.reward_model:
                self.event("reward")
                self.reward()

    def reward(self) -> None:
        """The reward model's forward: all rows of the rollout together, or as many as share a pass."""
        setup = self.setup
        length = setup.prompt_tokens + setup.max_completion_length
        rows = setup.generation_rows
        if setup.tokens_per_forward is not None:
            rows = min(rows, max(1, setup.tokens_per_forward // length))
        with self.on_device(self.reward_model, "reward model", setup.offload_reward), self.autocast():
            mask = self.causal_mask(rows, length) if setup.padded else None
            self.reward_model(input_ids=self.ids(rows, length), attention_mask=mask)

    def make_gradients(self, without: frozenset | set = frozenset()) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None and parameter not in without:
                parameter.grad = torch.empty_like(parameter)
                self.memory.rename(parameter.grad, "gradients")

    def train(self) -> None:
        setup = self.setup
        if setup.gradient_accumulation_steps > 1:  # from the second step on, gradients are there already
            # Towers get theirs with the prompt's, behind the last micro-batch of its completions
            one_prompt = setup.splits_groups and setup.rows_per_update == setup.num_generations
            self.make_gradients(without=self.weights_of_towers() if one_prompt else frozenset())
        if not setup.splits_groups:
            self.work.times = setup.gradient_accumulation_steps
            self.log_probs(self.model, self.backbone).sum().backward()
            return
        # The first of the micro-batches of a prompt, one that is like all those between, and the last
        rows, groups = setup.per_device_train_batch_size, setup.rows_per_update / setup.num_generations
        last = setup.num_generations // rows - 1
        tree = tree_of(setup, self.groups_of(setup.num_generations, setup.prompt_tokens))
        for number in sorted({0, min(1, last), last}):
            self.spread = {"tree": tree, "rows": range(number * rows, (number + 1) * rows)}
            self.work.times = groups * (last - 1 if 0 < number < last else 1)
            self.log_probs(self.model, self.backbone).sum().backward()
            tree.leave((number + 1) * rows)
        self.spread = {}

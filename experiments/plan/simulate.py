"""One training step on tensors without values: the trainer's own code runs, nothing is computed, no memory is
allocated, and every byte is counted.

The model is built from its config. Generation, scoring, policy forward and backward, and the optimizer then run as TRL
runs them (its fused LM head and, where it is on, prefix sharing), and `LiveBytes` counts what each phase holds at its
peak. Only what cannot run so is replaced: the attention kernel (by one that saves what FlashAttention saves),
quantized weights, and Triton's kernels, which work in the buffers they are given.
"""

import contextlib
import copy
import warnings
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache
from transformers.initialization import no_init_weights

from experiments.config import ConfigError
from experiments.plan.live_bytes import LiveBytes
from experiments.plan.shapes_only import ShapesOnly
from experiments.workload.models import named_config

PHASES = ("load", "generate", "score", "train", "optimizer")


class _Attention(torch.autograd.Function):
    """Output and saved tensors of a memory-efficient attention kernel, without computing anything.

    Saved for the backward: query, key, value, output and the float32 log-sum-exp of each query (FlashAttention-2,
    arXiv 2307.08691, algorithm 1). A boolean mask is converted to the query's dtype first (ATen,
    `convert_boolean_attn_mask`).
    """

    @staticmethod
    def forward(ctx, query, key, value, mask):
        if mask is not None and mask.dtype == torch.bool:
            mask = query.new_empty(mask.shape)
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attention(query, key, value, attn_mask=None, **kwargs):
    if torch.is_autocast_enabled("cpu"):  # attention is on autocast's list
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    return _Attention.apply(query, key, value, attn_mask)


class _NoKernel:
    """Stands in for a Triton kernel: `kernel[grid](...)` does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def pretending(device: str):
    """Attention, and on a CUDA device TRL's LM-head kernels, without computing."""
    from trl.kernels import chunked_logprob

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", _attention))
        if device == "cuda":
            for name, value in {
                "_use_triton": lambda device: True,
                "_forward_kernel": _NoKernel(),
                "_backward_kernel": _NoKernel(),
                "_addmm_fp32": lambda total, a, b: None,  # on CUDA a matrix product into `total`
                "triton": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
            }.items():
                stack.enter_context(mock.patch.object(chunked_logprob, name, value, create=True))
        yield


class _QuantizedLinear(torch.autograd.Function):
    """A linear layer whose weight is brought to the input's dtype for each product, as bitsandbytes does.

    With 8 bits it holds its input past autograd's saved tensors (`MatMul8bitLt`: `ctx.tensors`), so checkpointing does
    not let go of it before the backward."""

    @staticmethod
    def forward(ctx, x, bias, shape, holds_input):
        ctx.shape, ctx.held = shape, x if holds_input else None
        return torch.nn.functional.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx, grad):
        return grad @ grad.new_empty(ctx.shape), None, None, None


def _counted(memory: LiveBytes, kind: str, function, event=None):
    """`function`, with what it allocates counted as `kind`. `event` is called before and after it."""

    def counted(*args, **kwargs):
        if event:
            event()
        with memory.of_kind(kind):
            result = function(*args, **kwargs)
        if event:
            event()
        return result

    return counted


def decoder_layers(model) -> torch.nn.ModuleList:
    """The longest list of modules in the model."""
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


class Simulation:
    """The phases of one step of `setup`, once the optimizer has its state, with every layer of `hf_config`."""

    def __init__(self, setup, hf_config):
        self.setup, self.config = setup, hf_config
        self.shapes = ShapesOnly()
        self.memory = LiveBytes()
        # (phase, event, layer, how often it came before in this phase) -> bytes by kind at the peak until the next one
        self.stretches: dict[tuple, dict[str, int]] = {}
        self.current: tuple | None = None
        self.visits: Counter[tuple] = Counter()

    def run(self, passes: bool = True) -> dict[tuple, dict[str, int]]:
        """The peaks between events: a phase begins, a layer's forward begins, its backward begins. Without `passes`,
        only loading and generation."""
        from trl.kernels import ChunkedLogProbFunction
        from trl.models.prefix_sharing import ReadPrefix

        def allowed(context, mask_function):  # its values do not matter, and computing them takes time
            columns = len(context.prefix.positions) + max(context.blocks)
            with self.shapes.new():
                return torch.ones(1, 1, len(context.rows), columns, dtype=torch.bool)

        head_backward = _counted(self.memory, "logits", ChunkedLogProbFunction.backward, lambda: self.event("head"))

        def new_head_backward(ctx, *gradients):  # it makes its sums itself
            with self.shapes.new():
                return head_backward(ctx, *gradients)

        with (
            pretending(self.setup.device),
            mock.patch.object(ChunkedLogProbFunction, "backward", staticmethod(new_head_backward)),
            mock.patch.object(ReadPrefix, "allowed", allowed),
            self.shapes,
            self.memory,
        ):
            with self.phase("load"), warnings.catch_warnings():
                # Names that TRL and PEFT use; the new ones are not in transformers 5.17
                warnings.simplefilter("ignore", FutureWarning)
                self.load()
            self.create_optimizer()
            if self.setup.gradient_accumulation_steps > self.setup.steps_per_generation:
                self.make_gradients()  # it generates again before the optimizer's step
            self.model.eval()  # TRL switches gradient checkpointing off where there is no backward
            with self.phase("generate"), torch.no_grad():
                self.generate_shared() if self.setup.prefix_sharing else self.generate()
            if not passes:
                return self.stretches
            reference = self.on_device(self.reference, "reference", self.setup.offload_reference)
            with reference, self.phase("score"), torch.no_grad():
                self.score()
                self.reward()
            self.model.train()
            with self.phase("train"), self.offloading():
                self.train()
            with self.phase("optimizer"):
                self.optimizer.step()
        return self.stretches

    @contextlib.contextmanager
    def phase(self, name: str):
        self.memory.reset()
        self.current = (name, "start", None, 0)
        self.visits.clear()
        yield
        self.stretches[self.current] = self.memory.at_peak
        self.current = None

    def event(self, name: str, layer: int | None = None) -> None:
        """A new stretch begins."""
        if self.current is None:
            return
        self.stretches[self.current] = self.memory.at_peak
        self.current = (self.current[0], name, layer, self.visits[name, layer])
        self.visits[name, layer] += 1
        self.memory.reset()

    def mark_layers(self) -> None:
        def after_forward(i, output):
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: self.event("backward", i))

        for i, layer in enumerate(decoder_layers(self.model)):
            layer.register_forward_pre_hook(lambda module, args, i=i: self.event("forward", i))
            layer.register_forward_hook(lambda module, args, output, i=i: after_forward(i, output))

    # -- the model and its optimizer ---------------------------------------------------------------------------------

    def build(self, kind=AutoModelForCausalLM, config=None):
        with self.shapes.new(), no_init_weights():
            model = kind.from_config(config or self.config, dtype=getattr(torch, self.setup.dtype))
            model.tie_weights()  # left out with the initialization
        return model

    def load(self) -> None:
        setup = self.setup
        self.model, self.reference = self.build(), None
        self.backbone = self.model.base_model
        if setup.lora_rank:
            self.add_adapters()
        elif setup.beta:
            self.reference = self.build()
            self.memory.watch(self.reference, "host" if setup.offload_reference else "reference")
        if setup.reward_model:
            config = self.config if setup.reward_model == "policy" else named_config(setup.reward_model)
            config = copy.deepcopy(config)
            config.num_labels, config.pad_token_id = 1, 0  # TRL sets the tokenizer's padding token
            config.use_cache = not self.setup.needs_fork  # patch 0006 switches it off
            self.reward_model = self.build(AutoModelForSequenceClassification, config).eval()
            self.memory.watch(self.reward_model, "host" if setup.offload_reward else "reward model")
        if setup.weight_bits < 16:
            self.quantize()
        self.memory.watch(self.model)
        self.memory.reset()  # the weights have their kind now
        self.mark_layers()
        if setup.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        if setup.prefix_sharing:
            from trl.models import prefix_sharing

            # What is checked there are real numbers
            with mock.patch.object(prefix_sharing, "error_of_passes", lambda model, passes: 0.0):
                try:
                    prefix_sharing.enable_prefix_sharing(self.model)
                except ValueError as error:
                    raise ConfigError(str(error)) from error

    def add_adapters(self) -> None:
        """LoRA on every linear layer: float32, and bfloat16 on quantized weights (TRL's trainers, after QLoRA)."""
        from peft import LoraConfig, get_peft_model

        with self.shapes.new(), no_init_weights():
            config = LoraConfig(r=self.setup.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = get_peft_model(self.model, config)
            if self.setup.weight_bits < 16:
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        parameter.data = parameter.data.to(torch.bfloat16)
        if self.setup.gradient_checkpointing:
            self.model.enable_input_require_grads()

    def quantize(self) -> None:
        """4 or 8 bits a weight of every linear layer but the head, and bitsandbytes' scales: with 4 bits one byte for
        64 weights and a float32 for 256 of those (QLoRA, arXiv 2305.14314), with 8 bits a float32 a row."""
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            if not isinstance(module, torch.nn.Linear) or module is head or "lora_" in name:
                continue
            weight, shape = module.weight, module.weight.shape
            if self.setup.weight_bits == 4:
                size = weight.numel() // 2 + weight.numel() // 64 + weight.numel() // (64 * 256) * 4
            else:
                size = weight.numel() + shape[0] * 4
            with self.shapes.new():
                module.weight = torch.nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
            holds_input = self.setup.weight_bits == 8
            module.forward = lambda x, m=module, s=shape, h=holds_input: _QuantizedLinear.apply(x, m.bias, s, h)

    def create_optimizer(self) -> None:
        """The optimizer, with the state that it has from the second step on."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kind = "host" if self.setup.optimizer_on_host else "optimizer state"
        bytes_per_weight = self.setup.optimizer_bytes_per_weight
        with self.memory.of_kind(kind):
            if bytes_per_weight is not None:  # not torch's own: it steps in place
                weights = sum(parameter.numel() for parameter in trained)
                whole = self.weights_not_in_8_bits() if "8bit" in self.setup.optim else 0
                with self.shapes.new():
                    size = int((weights - whole) * bytes_per_weight) + whole * 8
                    self.optimizer = SimpleNamespace(state=torch.empty(size, dtype=torch.uint8), step=lambda: None)
                self.memory.rename(self.optimizer.state, kind)
                return
            self.optimizer = torch.optim.AdamW(trained, fused=True)
            self.make_gradients()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def weights_not_in_8_bits(self) -> int:
        """Trained weights whose moments an 8-bit optimizer keeps in float32: those of tensors below 4,096 elements
        (bitsandbytes, `min_8bit_size`) and of embeddings (transformers' `Trainer.create_optimizer`)."""
        embeddings = {m.weight for m in self.model.modules() if isinstance(m, torch.nn.Embedding)}
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return sum(p.numel() for p in trained if p.numel() < 4096 or any(p is weight for weight in embeddings))

    @contextlib.contextmanager
    def offloading(self):
        """With `activation_offloading`, tensors saved for the backward are on the host until they are needed."""
        if not self.setup.activation_offloading:
            yield
            return
        weights = {p.untyped_storage()._cdata for p in self.model.parameters()}

        def pack(tensor):
            if tensor.untyped_storage()._cdata in weights or tensor.numel() < 1024:  # as TRL's OffloadActivations
                return tensor
            with self.memory.of_kind("host"):
                return (tensor.clone(),)

        def unpack(packed):
            return packed[0].clone() if isinstance(packed, tuple) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16, enabled=self.setup.bf16)

    def ids(self, rows: int, columns: int) -> torch.Tensor:
        with self.shapes.new():
            return torch.zeros(rows, columns, dtype=torch.long)

    def causal_mask(self, rows: int, length: int) -> torch.Tensor:
        """Where a row has padding, transformers builds a mask for every row, query and key."""
        with self.shapes.new():
            return torch.ones(rows, 1, length, length, dtype=torch.bool)

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(self) -> None:
        """The prompts' forward, then the last token with the cache at its largest."""
        setup = self.setup
        rows, prompt, steps = setup.generation_rows, setup.prompt_tokens, setup.max_completion_length - 2
        mask = self.causal_mask(rows, prompt) if setup.padded_prompts else None
        cache = DynamicCache(config=self.config)
        with mock.patch.object(DynamicCache, "update", _counted(self.memory, "KV cache", DynamicCache.update)):
            self.decode(rows, prompt, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
        del mask
        with self.memory.of_kind("KV cache"):
            for layer in cache.layers:
                layer.keys, layer.values = (
                    x.new_empty(*x.shape[:2], min(x.shape[2] + steps, _kept(layer)), x.shape[3])
                    for x in (layer.keys, layer.values)
                )
                if layer.is_sliding:
                    layer.cumulative_length += steps
        self.decode(rows, 1, past_key_values=cache)

    def generate_shared(self) -> None:
        """The same with the fork's own cache: each prompt once, room for the completions' tokens behind it."""
        from trl.generation.shared_prefix import prefill
        from trl.models.prefix_sharing import attend_to_cache

        setup = self.setup
        rows, k, prefix = setup.generation_rows, setup.num_generations, setup.prompt_tokens - 1
        steps = max(setup.max_completion_length - 2, 1)
        prompts = torch.zeros(rows, prefix + 1, dtype=torch.long)
        with self.autocast(), self.memory.of_kind("activations"):
            cache = prefill(self.model, prompts, torch.ones_like(prompts), group_size=k)
        room = 0
        while room < steps:  # as the cache grows
            room += max(64, room)
        with self.memory.of_kind("KV cache"):
            for i, layer in enumerate(cache.layers):
                self.event("grow", i)
                layer.states = [
                    tuple(x.new_empty(*x.shape[:2], prefix + room * k, x.shape[3]) for x in states)
                    for states in layer.states
                ]
                layer.num_steps = steps - 1
        with attend_to_cache(cache):
            self.decode(
                rows,
                1,
                attention_mask=torch.ones(rows, prefix + steps, dtype=torch.long),
                position_ids=torch.full((rows, 1), prefix + steps - 1),
                past_key_values=cache,
            )

    def decode(self, rows: int, columns: int, **kwargs) -> None:
        """One forward of `generate` and its sampling: the last logits in float32, the temperature, softmax."""
        # PEFT's `generate` calls the model inside, past the forward that accelerate wraps in autocast
        with contextlib.nullcontext() if self.setup.lora_rank else self.autocast():
            logits = self.model(input_ids=self.ids(rows, columns), use_cache=True, **kwargs).logits
        with self.memory.of_kind("logits"):
            last = logits[:, -1, :].to(torch.float32, copy=True)
            scores = last / self.setup.temperature
            torch.nn.functional.softmax(scores, dim=-1)

    # -- scoring and training ----------------------------------------------------------------------------------------

    def hidden_states(self) -> torch.Tensor:
        """Hidden states that predict the next token, of shape (rows, completion, hidden)."""
        from trl.models.prefix_sharing import SharedPrefixPasses
        from trl.models.token_budget import TokenBudgetPasses

        setup, rows = self.setup, self.setup.per_device_train_batch_size
        length = setup.prompt_tokens + setup.max_completion_length
        if setup.prefix_sharing or setup.tokens_per_forward:
            prompts = torch.arange(rows).div(setup.num_generations, rounding_mode="floor")
            input_ids, mask = prompts[:, None].repeat(1, length), torch.ones(rows, length, dtype=torch.long)
            passes = SharedPrefixPasses(setup.prompt_tokens, setup.completions_per_forward, setup.num_generations)
            backbone = self.backbone
            if setup.tokens_per_forward:
                passes = TokenBudgetPasses(
                    prefix_length=setup.prompt_tokens,
                    tokens_per_forward=setup.tokens_per_forward,
                    prefix_sharing=setup.prefix_sharing,
                    group_size=setup.num_generations,
                )
                backbone = self.padded_backbone() if setup.padded and not setup.prefix_sharing else self.backbone
            return passes.forward(backbone, input_ids, mask).last_hidden_state[:, :-1]
        mask = self.causal_mask(rows, length) if setup.padded else None
        output = self.backbone(input_ids=self.ids(rows, length), attention_mask=mask, use_cache=False)
        return output.last_hidden_state[:, -setup.max_completion_length - 1 : -1]

    def padded_backbone(self):
        """The backbone as it is called with rows of different lengths, which need a mask."""

        def forward(attention_mask, **kwargs):
            return self.backbone(attention_mask=self.causal_mask(*attention_mask.shape), **kwargs)

        forward.get_input_embeddings = self.backbone.get_input_embeddings
        return forward

    def log_probs(self) -> torch.Tensor:
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

        head = self.model.get_output_embeddings()
        with self.autocast():
            hidden = self.hidden_states()
            self.event("head")
            with self.shapes.new(), self.memory.of_kind("logits"):
                hidden = hidden.reshape(-1, hidden.shape[-1])
                return ChunkedLogProbFunction.apply(
                    hidden,
                    head.weight,
                    head.bias,
                    self.ids(1, len(hidden))[0],
                    self.setup.temperature,
                    _CHUNKED_LOGPROB_CHUNK_SIZE,
                    None,
                    1.0,
                    ("log_probs", "entropy"),
                )[0]

    @contextlib.contextmanager
    def on_device(self, model, kind: str, offloaded: bool):
        """A model that is on the host except now, if it is `offloaded`."""
        if offloaded:
            self.memory.watch(model, kind)
        yield
        if offloaded:
            self.memory.watch(model, "host")

    def score(self) -> None:
        self.log_probs()  # the reference takes as much, one after the other

    def reward(self) -> None:
        """The reward model's forward: all rows of the rollout together, or as many as share a pass."""
        setup = self.setup
        if not setup.reward_model:
            return
        self.event("reward")
        rows = setup.completions_per_forward or setup.generation_rows
        length = setup.prompt_tokens + setup.max_completion_length
        with self.on_device(self.reward_model, "reward model", setup.offload_reward), self.autocast():
            mask = self.causal_mask(rows, length) if setup.padded else None
            self.reward_model(input_ids=self.ids(rows, length), attention_mask=mask)

    def make_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                self.memory.rename(parameter.grad, "gradients")

    def train(self) -> None:
        if self.setup.gradient_accumulation_steps > 1:  # from the second step on, gradients are there already
            self.make_gradients()
        self.log_probs().sum().backward()


def _kept(layer) -> float:
    """Tokens that a layer of transformers' cache keeps: its sliding window, or all."""
    return layer.sliding_window - 1 if layer.is_sliding else float("inf")

"""Models in every attention implementation that transformers loads them with, shared and whole."""

from itertools import product

import flash_stand_in
import pytest
import torch
from torch.nn.utils import parameters_to_vector
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from experiments.checks.family_check import error
from experiments.checks.float64 import pure_float64
from experiments.checks.tiny_families import VOCAB
from rloo_memory.prefix_sharing import routing
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix

from .conftest import Fixed

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1,
    "vocab_size": VOCAB,
}  # fmt: skip
# What is special about each, and implementations that it cannot have: PyTorch's has no soft-capping and no sinks, the
# first flash kernels and flex_attention on a CPU have no sinks
WITHOUT_SINKS = {"sdpa", "flex_attention", *flash_stand_in.KERNELS[:2]}
MODELS = {
    "llama": ({}, set()),
    "mistral": ({"sliding_window": 8}, set()),
    "gemma2": ({"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, {"sdpa"}),
    "gemma3_text": ({"sliding_window": 8}, set()),
    # Its masks have the window, which it does not tell its attention: flash kernels attend to all
    "qwen2_moe": (
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        set(),
    ),
    "qwen3_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, set()),
    "gpt_oss": ({"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, WITHOUT_SINKS),
}
IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention", *flash_stand_in.KERNELS)
CASES = [
    (model, implementation, (8, 2)[(i + j) % 2])
    for (i, model), (j, implementation) in product(enumerate(MODELS), enumerate(IMPLEMENTATIONS))
    if implementation not in MODELS[model][1]
]
FLASH2, FLASH3, FLASH3_WITH_SINKS = flash_stand_in.KERNELS
SAMPLE = [
    ("llama", FLASH2, 8), ("llama", "eager", 2), ("mistral", FLASH3, 2), ("gemma2", FLASH2, 2),
    ("gemma3_text", "flex_attention", 8), ("qwen3_moe", FLASH2, 2), ("qwen2_moe", FLASH2, 8), ("qwen2_moe", "sdpa", 2),
    ("gpt_oss", FLASH3_WITH_SINKS, 2), ("gpt_oss", "eager", 8),
]  # fmt: skip


def save_model(model_type, dtype, folder):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE, **MODELS[model_type][0])
    model = AutoModelForCausalLM.from_config(config)
    for name, param in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(param)
    model.to(dtype).save_pretrained(folder)


def load(model_type, implementation):
    experts = {"experts_implementation": "eager"} if "moe" in model_type or "oss" in model_type else {}
    return {"attn_implementation": implementation, "dtype": "auto", **experts}


class TestImplementations:
    @pytest.fixture
    def shared_layers(self, monkeypatch):
        """One entry for each time that a layer attends to a prefix."""
        layers, attend = [], routing.ReadPrefix.attend

        def counted(self, own, module, *args, **kwargs):
            layers.append(module.config._attn_implementation)
            return attend(self, own, module, *args, **kwargs)

        monkeypatch.setattr(routing.ReadPrefix, "attend", counted)
        return layers

    @pytest.fixture
    def trained(self, train, shared_layers):
        """What two updates change of the weights of a model in a folder, whole and shared."""

        def run(folder, model_type, implementation, rows):
            kwargs = load(model_type, implementation)
            options = {"router_aux_loss_coef": 0.0} if "experts_implementation" in kwargs else {}
            start = parameters_to_vector(AutoModelForCausalLM.from_pretrained(folder, **kwargs).parameters())
            for share in (None, {}):
                weights, *_ = train(Fixed, rows, share, model=str(folder), model_init_kwargs=kwargs, **options)
                yield weights.double() - start.detach().double()
                assert share is not None or not shared_layers

        return run

    def check_exactly(self, case, trained, monkeypatch, shared_layers):
        """In float64 throughout: 2e-15 of what the updates change."""
        model_type, implementation, rows = case
        stand_in = flash_stand_in.install(monkeypatch)
        save_model(model_type, torch.float64, self.tmp_dir)
        with pure_float64():
            whole, shared = trained(self.tmp_dir, *case)
        assert shared_layers[-1] == implementation
        assert stand_in.calls[implementation] > 0 or implementation in ("sdpa", "eager")
        assert error(shared, whole) < 1e-12

    @pytest.mark.sample
    @pytest.mark.parametrize("case", SAMPLE[1::2], ids=str)
    def test_train(self, case, trained, monkeypatch, shared_layers):
        self.check_exactly(case, trained, monkeypatch, shared_layers)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_train_in_every_way(self, case, trained, monkeypatch, shared_layers):
        self.check_exactly(case, trained, monkeypatch, shared_layers)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", [("llama", FLASH2, 8), ("gemma2", FLASH3, 2)], ids=str)
    def test_train_with_kernels_that_refuse_float32(self, case, trained, monkeypatch, shared_layers):
        """In which models are tried. Beside float64, the error may be half as large again as that of whole rows."""
        model_type, implementation, rows = case
        flash_stand_in.install(monkeypatch, strict=True)
        save_model(model_type, torch.bfloat16, self.tmp_dir)
        in_float64 = f"{self.tmp_dir}/float64"
        AutoModelForCausalLM.from_pretrained(self.tmp_dir, dtype=torch.float64).save_pretrained(in_float64)
        with pure_float64():
            exact = next(trained(in_float64, model_type, "eager", rows))
        whole, shared = trained(self.tmp_dir, *case)
        assert set(shared_layers) == {"eager", implementation}  # when it is switched on, eager attention stands in
        assert error(shared, exact) < 1.5 * error(whole, exact)

    # Flash kernels and `generate`'s own cache see the window of "qwen2_moe" differently
    @pytest.mark.parametrize("case", [case[:2] for case in SAMPLE if case[:2] != ("qwen2_moe", FLASH2)], ids=str)
    def test_generate(self, case, monkeypatch):
        model_type, implementation = case
        flash_stand_in.install(monkeypatch)
        save_model(model_type, torch.float64, self.tmp_dir)
        kwargs = load(model_type, implementation)
        model = AutoModelForCausalLM.from_pretrained(self.tmp_dir, **kwargs).eval()
        prompts = torch.arange(20, 44).view(2, 12).repeat_interleave(3, 0)
        inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
        whole = model.generate(**inputs, generation_config=config)
        enable_prefix_sharing(model)
        assert torch.equal(generate_with_shared_prefix(model, **inputs, generation_config=config), whole)

    @pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", *IMPLEMENTATIONS])
    def test_what_is_softmax_attention(self, name, monkeypatch):
        flash_stand_in.install(monkeypatch)
        assert routing.is_softmax_attention(name)
        assert not routing.is_softmax_attention("someone/flash-linear-attention")

    def test_what_is_registered_later_is_reached(self, monkeypatch):
        save_model("llama", torch.float32, self.tmp_dir)
        model = AutoModelForCausalLM.from_pretrained(self.tmp_dir)
        enable_prefix_sharing(model)
        calls = []

        def attend(module, *args, **kwargs):
            calls.append(module.layer_idx)
            return sdpa_attention_forward(module, *args, **kwargs)

        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", attend)
        model(input_ids=torch.arange(20, 30)[None])
        assert calls == [0, 1]

    @pytest.mark.slow
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_a_model_that_nobody_shares_compiles_as_a_whole(self, implementation):
        save_model("llama", torch.float32, self.tmp_dir)
        model = AutoModelForCausalLM.from_pretrained(self.tmp_dir, attn_implementation=implementation).eval()
        input_ids = torch.arange(20, 30)[None]
        torch.compiler.reset()  # what tests before this one compiled
        compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
        assert torch.equal(compiled(input_ids=input_ids).logits, model(input_ids=input_ids).logits)

"""Models in every attention implementation that transformers loads them with, shared and whole."""

from itertools import product

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rloo_memory.prefix_sharing import routing
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix

from . import flash_stand_in
from .sharing_trainers import TRAINERS


TOKENIZER = "tiny-Qwen2ForCausalLM-2.5"
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
# What is special about each, and implementations that it cannot have: PyTorch's has no soft-capping and no sinks, and the
# first flash kernels and flex_attention on a CPU have no sinks
WITHOUT_SINKS = {"sdpa", "flex_attention", *flash_stand_in.KERNELS[:2]}
MODELS = {
    "llama": ({}, set()),
    "mistral": ({"sliding_window": 8}, set()),
    "gemma2": ({"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, {"sdpa"}),
    "gemma3_text": ({"sliding_window": 8}, set()),
    "qwen3_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, set()),
    "gpt_oss": ({"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, WITHOUT_SINKS),
}
IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention", *flash_stand_in.KERNELS)
CASES = [
    (model, implementation, trainer, rows)
    for model, implementation, trainer, rows in product(MODELS, IMPLEMENTATIONS, ("RLOO", "GRPO"), (8, 2))
    if implementation not in MODELS[model][1]
]
FLASH2, FLASH3, FLASH3_WITH_SINKS = flash_stand_in.KERNELS
SAMPLE = [
    ("llama", FLASH2, "RLOO", 8), ("llama", "eager", "GRPO", 2), ("mistral", FLASH3, "GRPO", 2),
    ("gemma2", FLASH2, "RLOO", 2), ("gemma3_text", "flex_attention", "GRPO", 8), ("qwen3_moe", FLASH2, "RLOO", 2),
    ("gpt_oss", FLASH3_WITH_SINKS, "RLOO", 2), ("gpt_oss", "eager", "GRPO", 8),
]  # fmt: skip
# Norms and rotary embeddings are in float32, which two updates pass on: 2e-10 to 3e-9
TOLERANCE = 5e-9


def save_model(model_type, dtype, folder):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **SHAPE, **MODELS[model_type][0])
    model = AutoModelForCausalLM.from_config(config)
    for name, param in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(param)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder, model_type, implementation):
    experts = {"experts_implementation": "eager"} if "moe" in model_type or "oss" in model_type else {}
    return {"attn_implementation": implementation, "dtype": "auto", **experts}


def trained(algorithm, folder, model_type, implementation, rows, sharing):
    """Weights behind two updates with completions of one token to nine."""
    config_class, trainer_class = TRAINERS[algorithm == "GRPO"]

    class WithCompletions(trainer_class):
        def _generate_single_turn(self, prompt_ids, images, *args, **kwargs):
            generator = torch.Generator().manual_seed(self.state.global_step)
            lengths = [(3, 9, 1, 6)[row % 4] for row in range(len(prompt_ids))]
            ids = [torch.randint(10, 100, (length,), generator=generator).tolist() for length in lengths]
            return ids if algorithm == "RLOO" else (ids, None)

    router = (
        {"router_aux_loss_coef": 0.0} if "experts_implementation" in load(folder, model_type, implementation) else {}
    )
    args = config_class(
        output_dir=f"{folder}/output", per_device_train_batch_size=rows, gradient_accumulation_steps=8 // rows,
        num_generations=4, max_completion_length=10, max_steps=2, learning_rate=1e-2, optim="sgd", max_grad_norm=0.0,
        lr_scheduler_type="constant", beta=0.04, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
        model_init_kwargs=load(folder, model_type, implementation), prefix_sharing=sharing, **router,
    )  # fmt: skip
    trainer = WithCompletions(
        model=folder,
        reward_funcs=lambda completion_ids, **kwargs: [sum(ids) * 7919 % 13 / 13 for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["the sky is blue and the sea is deep", "the sea"] * 2}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    return torch.cat([param.detach().double().flatten() for param in trainer.model.parameters()])


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

    def check(self, case, monkeypatch, shared_layers, dtype, strict, tolerance):
        model_type, implementation, algorithm, rows = case
        stand_in = flash_stand_in.install(monkeypatch, strict)
        save_model(model_type, dtype, self.tmp_dir)
        # Rows that are padding alone are not numbers where eager attention rounds float64's least to float32
        other = {"gpt_oss": "eager", "gemma2": FLASH2}.get(model_type, "sdpa")
        reference = other if implementation == "eager" else implementation
        whole = trained(algorithm, self.tmp_dir, model_type, reference, rows, sharing=False)
        assert not shared_layers
        shared = trained(algorithm, self.tmp_dir, model_type, implementation, rows, sharing=True)
        assert set(shared_layers[-4:]) == {implementation}  # the first are those of the check when it is switched on
        assert stand_in.calls[reference] > 0 or reference in ("sdpa", "eager")
        assert ((shared - whole).norm() / whole.norm()).item() < tolerance

    @pytest.mark.sample
    @pytest.mark.parametrize("case", SAMPLE, ids=str)
    def test_train(self, case, monkeypatch, shared_layers):
        self.check(case, monkeypatch, shared_layers, torch.float64, strict=False, tolerance=TOLERANCE)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_train_in_every_way(self, case, monkeypatch, shared_layers):
        self.check(case, monkeypatch, shared_layers, torch.float64, strict=False, tolerance=TOLERANCE)

    # Kernels that refuse float32, in which models are tried. The tolerance is bfloat16's rounding of a weight
    @pytest.mark.parametrize("case", [("llama", FLASH2, "RLOO", 8), ("gemma2", FLASH3, "GRPO", 2)], ids=str)
    def test_train_in_half_precision(self, case, monkeypatch, shared_layers):
        self.check(case, monkeypatch, shared_layers, torch.bfloat16, strict=True, tolerance=4e-3)

    @pytest.mark.parametrize("case", [case[:2] for case in SAMPLE], ids=str)
    def test_generate(self, case, monkeypatch):
        model_type, implementation = case
        flash_stand_in.install(monkeypatch)
        save_model(model_type, torch.float64, self.tmp_dir)
        kwargs = load(self.tmp_dir, model_type, implementation)
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

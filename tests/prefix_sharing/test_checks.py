from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import LilyConfig, LoHaConfig, LoraConfig, PromptTuningConfig, PveraConfig, get_peft_model
from transformers import GenerationConfig

from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.probe import PROBE_PREFIX_LENGTH, error_of_passes
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import check_whole_rows
from rloo_memory.prefix_sharing.trainer import TrainerPasses

from .sharing_trainers import SMALL, GRPOConfig, RLOOConfig, build_trainer
from .test_passes import TRAINERS, load, make_inputs

MODEL_ID = "tiny-Qwen2ForCausalLM-2.5"
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
# (model type, what is special about it, words of the refusal)
REFUSED = [
    ("stablelm", {}, ["StableLmForCausalLM", "AttentionInterface"]),
    ("opt", {}, ["OPTForCausalLM", "differ"]),  # positions from the mask
    # Stock fails on it, too: what TRL takes for its backbone is the whole model
    ("llama4_text", {}, ["Llama4ForCausalLM", "chunked_attention", "prefix_sharing=False"]),
    ("llama", {"attention_dropout": 0.1}, ["self_attn` is 0.1", "disable_dropout=True"]),
    ("gpt2", {"embd_pdrop": 0.1}, ["transformer.drop", "0.1"]),
    # Noise that is no dropout layer's
    ("starcoder2", {"residual_dropout": 0.1}, ["self_attn` is 0.1", "disable_dropout=True"]),
    ("mixtral", {"router_jitter_noise": 0.1}, ["MixtralForCausalLM", "differ", "noise"]),
    ("llama", DYNAMIC, ["dynamic", "prefix_sharing=False"]),
]


class TestPrefixSharingChecks:
    @pytest.mark.parametrize("model_type, more, words", REFUSED)
    def test_models_that_are_refused(self, model_type, more, words):
        with pytest.raises(ValueError) as refusal:
            enable_prefix_sharing(build(family(model_type, **more)))
        assert all(word in str(refusal.value) for word in words), refusal.value

    @pytest.mark.parametrize(
        "config, word",
        [
            (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING"),
            # Its experts are mixed by a mean over all tokens of a call, which a start at zero hides
            (LilyConfig(target_modules=["q_proj"], r=4), "differ"),
            (LoHaConfig(target_modules=["q_proj"], r=4, module_dropout=0.1), "module_dropout"),
            (LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"), "aLoRA"),
        ],
    )
    def test_adapters_that_are_refused(self, config, word):
        with pytest.raises(ValueError, match=word):
            enable_prefix_sharing(get_peft_model(load(MODEL_ID), config))

    def test_whole_rows_that_are_refused(self):
        with pytest.raises(ValueError, match="OPTForCausalLM.* differ.*per_device_train_batch_size"):
            check_whole_rows(build(family("opt")))
        with pytest.raises(ValueError, match="dynamic.*per_device_train_batch_size"):
            check_whole_rows(build(family("llama", **DYNAMIC)))
        check_whole_rows(build(family("stablelm")))  # rows that share nothing can

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize("option", [{"prefix_sharing": True}, {"tokens_per_forward": 16}])
    def test_fsdp1_is_refused(self, config_class, option):
        accelerator = SimpleNamespace(
            distributed_type=DistributedType.FSDP,
            is_fsdp2=False,
            device=torch.device("cpu"),
            num_processes=2,
            state=SimpleNamespace(deepspeed_plugin=None),
        )
        with pytest.raises(ValueError, match="FSDP1.* FSDP2.* DeepSpeed"):
            TrainerPasses(config_class(self.tmp_dir, **option), accelerator, load(MODEL_ID))

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    def test_images_in_whole_rows_are_refused(self, config_class):
        args = config_class(self.tmp_dir, tokens_per_forward=9)
        with pytest.raises(ValueError, match="tokens_per_forward=9.* only with `prefix_sharing=True`"):
            TrainerPasses(args, Accelerator(cpu=True), None, takes_images=True)

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize("option", [{"prefix_sharing": True}, {"tokens_per_forward": 64}])
    @pytest.mark.parametrize(
        "kwargs, match",
        [
            # PyTorch takes the reentrant one if it is not told
            ({"gradient_checkpointing_kwargs": {}}, "use_reentrant"),
            ({"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}, "use_reentrant"),
            ({"gradient_checkpointing_kwargs": {"use_reentrant": None}}, "use_reentrant"),
            ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ],
    )
    def test_invalid_config(self, config_class, option, kwargs, match):
        with pytest.raises(ValueError, match=match):
            config_class(output_dir=self.tmp_dir, num_generations=4, per_device_train_batch_size=4, **option, **kwargs)

    def test_no_number_is_no_agreement(self):
        class NoNumbers(SharedPrefixPasses):
            def forward(self, *args, **kwargs):
                outputs = super().forward(*args, **kwargs)
                return replace(outputs, last_hidden_state=outputs.last_hidden_state * torch.nan)

        model = load(MODEL_ID)
        enable_prefix_sharing(model)
        assert error_of_passes(model, SharedPrefixPasses(PROBE_PREFIX_LENGTH)) == 0
        assert error_of_passes(model, NoNumbers(PROBE_PREFIX_LENGTH)) != 0

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize(
        "kwargs", [{}, {"use_reentrant": False}, {"use_reentrant": False, "determinism_check": "none"}]
    )
    def test_valid_checkpointing(self, config_class, kwargs):
        config_class(
            output_dir=self.tmp_dir,
            num_generations=4,
            per_device_train_batch_size=4,
            prefix_sharing=True,
            gradient_checkpointing=bool(kwargs),
            gradient_checkpointing_kwargs=kwargs,
        )

    def test_noise_is_refused_and_leaves_no_trace(self):
        model = get_peft_model(load(MODEL_ID), PveraConfig(target_modules=["q_proj"], r=4)).train()
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        rng_state = torch.get_rng_state()

        with pytest.raises(ValueError, match="differ"):
            enable_prefix_sharing(model)

        assert model.training and torch.equal(torch.get_rng_state(), rng_state)
        for name, param in params.items():
            torch.testing.assert_close(model.get_parameter(name), param, rtol=0, atol=0)

    @pytest.mark.parametrize(
        "name, value", [("num_beams", 2), ("guidance_scale", 1.5), ("cache_implementation", "static")]
    )
    def test_generation_config_of_the_model(self, name, value):
        model = load(MODEL_ID).eval()
        enable_prefix_sharing(model)
        setattr(model.generation_config, name, value)
        inputs, prompt_length = make_inputs()
        prompts = {name: inputs[name][:, :prompt_length] for name in ("input_ids", "attention_mask")}
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            generate_with_shared_prefix(model, **prompts, generation_config=GenerationConfig(max_new_tokens=2))

    def test_cache_of_older_checkpoints(self):
        model = load(MODEL_ID).eval()
        enable_prefix_sharing(model)
        model.generation_config.cache_implementation = "hybrid"
        inputs, prompt_length = make_inputs()
        prompts = {name: inputs[name][:, :prompt_length] for name in ("input_ids", "attention_mask")}
        config = GenerationConfig(max_new_tokens=2, min_new_tokens=2)
        assert generate_with_shared_prefix(model, **prompts, generation_config=config).shape[1] == prompt_length + 2

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_train_with_max_length(self, config_class, trainer_class):
        options = {"generation_kwargs": {"max_new_tokens": None, "max_length": 32}, "max_completion_length": 256}
        options |= {"per_device_train_batch_size": 3, "prefix_sharing": True}
        trainer = build_trainer(trainer_class, config_class(output_dir=self.tmp_dir, **SMALL | options))
        trainer.train()
        assert trainer.state.log_history[-1]["train_loss"] is not None

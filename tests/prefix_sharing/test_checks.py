from dataclasses import replace

import pytest
import torch
from datasets import load_dataset
from peft import LoHaConfig, LoraConfig, PveraConfig, get_peft_model
from transformers import GenerationConfig

from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.probe import PROBE_PREFIX_LENGTH, error_of_passes
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses

from .sharing_trainers import GRPOConfig, RLOOConfig
from .test_passes import TRAINERS, load, make_inputs

MODEL_ID = "tiny-Qwen2ForCausalLM-2.5"


class TestPrefixSharingChecks:
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

    def test_dropout_of_adapter(self):
        config = LoHaConfig(target_modules=["q_proj"], r=4, module_dropout=0.1)
        with pytest.raises(ValueError, match="module_dropout"):
            enable_prefix_sharing(get_peft_model(load(MODEL_ID), config))

    def test_noise_is_refused_and_leaves_no_trace(self):
        model = get_peft_model(load(MODEL_ID), PveraConfig(target_modules=["q_proj"], r=4)).train()
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        rng_state = torch.get_rng_state()

        with pytest.raises(ValueError, match="differ"):
            enable_prefix_sharing(model)

        assert model.training and torch.equal(torch.get_rng_state(), rng_state)
        for name, param in params.items():
            torch.testing.assert_close(model.get_parameter(name), param, rtol=0, atol=0)

    def test_alora_is_refused(self):
        config = LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")
        with pytest.raises(ValueError, match="aLoRA"):
            enable_prefix_sharing(get_peft_model(load(MODEL_ID), config))

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
        dataset = load_dataset("zen", "standard_prompt_only", split="train")
        training_args = config_class(
            output_dir=self.tmp_dir,
            per_device_train_batch_size=3,
            num_generations=3,
            max_steps=1,
            prefix_sharing=True,
            generation_kwargs={"max_new_tokens": None, "max_length": 32},
            report_to="none",
        )
        trainer = trainer_class(
            model=MODEL_ID,
            reward_funcs=lambda completions, **kwargs: [float(len(set(completion))) for completion in completions],
            args=training_args,
            train_dataset=dataset,
        )
        trainer.train()
        assert trainer.state.log_history[-1]["train_loss"] is not None

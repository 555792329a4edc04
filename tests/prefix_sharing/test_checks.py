import importlib.metadata
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import LilyConfig, LoHaConfig, LoraConfig, PromptTuningConfig, PveraConfig, get_peft_model
from transformers import DynamicCache, GenerationConfig

from experiments.checks.family_check import PROMPT, batch, error_of
from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.probe import PROBE_PREFIX_LENGTH, error_of_passes
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import check_whole_rows
from rloo_memory.prefix_sharing.trainer import TrainerPasses
from rloo_memory.settings.trl_parser import RLOOConfig

from .conftest import llama

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
# (model type, what is special about it, words of the refusal)
REFUSED = [
    ("stablelm", {}, ["StableLmForCausalLM", "AttentionInterface"]),
    ("opt", {}, ["OPTForCausalLM", "differ"]),  # positions from the mask
    # Stock fails on it, too: what TRL takes for its backbone is the whole model
    ("llama4_text", {}, ["Llama4ForCausalLM", "chunked_attention", "prefix_sharing=False"]),
    ("llama", {"attention_dropout": 0.1}, ["self_attn` is 0.1", "disable_dropout=True"]),
    ("gpt2", {"embd_pdrop": 0.1}, ["transformer.drop", "0.1"]),
    ("bert", {}, ["BertSelfAttention attends to later tokens"]),  # which small weights hardly show
    # Noise that is no dropout layer's
    ("starcoder2", {"residual_dropout": 0.1}, ["self_attn` is 0.1", "disable_dropout=True"]),
    ("mixtral", {"router_jitter_noise": 0.1}, ["MixtralForCausalLM", "differ", "noise"]),
    ("llama", DYNAMIC, ["dynamic", "prefix_sharing=False"]),
]

# What is refused in settings with either option, and with shared prompts
OPTIONS = [{"prefix_sharing": True}, {"tokens_per_forward": 64}]
OF_EITHER = [
    # PyTorch takes the reentrant one if it is not told
    ({"gradient_checkpointing_kwargs": {}}, "use_reentrant"),
    ({"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}, "use_reentrant"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": None}}, "use_reentrant"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ({"torch_compile": True}, "torch_compile"),
    ({"pad_to_multiple_of": 8}, "pad_to_multiple_of"),
]
HALF = {"per_device_train_batch_size": 2}  # of the completions of a prompt
OF_SHARED = [
    (
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
        r"per_device_train_batch_size \(3\) must be a multiple or a divisor of num_generations \(4\)",
    ),
    ({**HALF, "steps_per_generation": 2}, r"times gradient_accumulation_steps \(1\) must be a multiple"),
    ({**HALF, "gradient_accumulation_steps": 2, "ddp_static_graph": True}, "ddp_static_graph=True"),
]
ACCEPTED = [
    {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {}},
    {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"gradient_checkpointing_kwargs": {"use_reentrant": False, "determinism_check": "none"}},
    {"ddp_static_graph": True, "accelerator_config": {"split_batches": True}},
]


def config_of(**settings):
    """RLOO's, whose check is GRPO's, too."""
    whole = {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return RLOOConfig("out", use_cpu=True, bf16=False, **whole | settings)


def prompts():
    return {name: x[:, :PROMPT] for name, x in batch().items()}


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
            enable_prefix_sharing(get_peft_model(llama(), config))

    def test_whole_rows_that_are_refused(self):
        with pytest.raises(ValueError, match="OPTForCausalLM.* differ.*per_device_train_batch_size"):
            check_whole_rows(build(family("opt")))
        with pytest.raises(ValueError, match="BertLMHeadModel.* BertSelfAttention attends to later tokens"):
            check_whole_rows(build(family("bert")))
        with pytest.raises(ValueError, match="dynamic.*per_device_train_batch_size"):
            check_whole_rows(build(family("llama", **DYNAMIC)))
        check_whole_rows(build(family("stablelm")))  # rows that share nothing can

    def test_a_small_difference_is_said_in_its_digits(self, monkeypatch):
        monkeypatch.setattr("rloo_memory.prefix_sharing.enabling.error_of_passes", lambda *args: 4e-4)
        with pytest.raises(ValueError, match=r"differ .* by 0\.04%"):
            enable_prefix_sharing(llama())

    @pytest.mark.parametrize("option", OPTIONS, ids=str)
    @pytest.mark.parametrize(
        "kind, plugin, said",
        [
            (DistributedType.FSDP, None, "FSDP1.* FSDP2.* DeepSpeed"),
            (DistributedType.DEEPSPEED, SimpleNamespace(zero_stage=3), "deepspeed>=0.19.3`, found 0.19.2"),
        ],
    )
    def test_launches_that_are_refused(self, kind, plugin, said, option, monkeypatch):
        version = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: "0.19.2" if name == "deepspeed" else version(name)
        )
        accelerator = SimpleNamespace(
            distributed_type=kind,
            is_fsdp2=False,
            device="cpu",
            num_processes=2,
            state=SimpleNamespace(deepspeed_plugin=plugin),
        )
        model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        with pytest.raises(ValueError, match=said):
            TrainerPasses(config_of(**option), accelerator, model)

    def test_images_in_whole_rows_are_refused(self):
        with pytest.raises(ValueError, match="tokens_per_forward=9.* only with `prefix_sharing=True`"):
            TrainerPasses(config_of(tokens_per_forward=9), Accelerator(cpu=True), None, takes_images=True)

    @pytest.mark.parametrize("option", OPTIONS, ids=str)
    @pytest.mark.parametrize("settings, said", OF_EITHER, ids=str)
    def test_settings_that_are_refused_with_either(self, settings, said, option):
        with pytest.raises(ValueError, match=f"`{next(iter(option))}.*{said}"):
            config_of(**option, **settings)

    @pytest.mark.parametrize("settings, said", OF_SHARED, ids=str)
    def test_settings_that_are_refused_with_shared_prompts(self, settings, said):
        with pytest.raises(ValueError, match=f"`prefix_sharing=True`.*{said}"):
            config_of(prefix_sharing=True, **settings)

    def test_settings_of_two_processes_that_are_refused(self, monkeypatch):
        monkeypatch.setattr(RLOOConfig, "world_size", 2)
        with pytest.raises(ValueError, match="split_batches=True` with 2 processes"):
            config_of(prefix_sharing=True, accelerator_config={"split_batches": True})
        with pytest.raises(ValueError, match=r"times steps_per_generation \(1\) must be a multiple"):
            config_of(prefix_sharing=True, **HALF, gradient_accumulation_steps=2, steps_per_generation=1)

    def test_settings_that_are_accepted(self):
        for settings in ACCEPTED:
            config_of(prefix_sharing=True, **settings)

    @pytest.mark.parametrize("option, version", [*zip(OPTIONS, ("5.12.1", "5.2.0"), strict=True)])
    def test_version(self, option, version, monkeypatch):
        monkeypatch.setattr(transformers, "__version__", version)
        config_of()
        with pytest.raises(ImportError, match=rf"`{next(iter(option))}` requires .* but {version} is installed"):
            config_of(**option)

    def test_no_number_is_no_agreement(self):
        class NoNumbers(SharedPrefixPasses):
            def forward(self, *args, **kwargs):
                outputs = super().forward(*args, **kwargs)
                return replace(outputs, last_hidden_state=outputs.last_hidden_state * torch.nan)

        model = llama()
        enable_prefix_sharing(model)
        assert error_of_passes(model, SharedPrefixPasses(PROBE_PREFIX_LENGTH)) == 0
        assert error_of_passes(model, NoNumbers(PROBE_PREFIX_LENGTH)) != 0
        one = torch.ones(2)
        assert max(error_of((one, one * torch.nan), (one, one))) > 1

    def test_noise_is_refused_and_leaves_no_trace(self):
        model = get_peft_model(llama(), PveraConfig(target_modules=["q_proj"], r=4)).train()
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
        model = llama().eval()
        enable_prefix_sharing(model)
        setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            generate_with_shared_prefix(model, **prompts(), generation_config=GenerationConfig(max_new_tokens=2))

    @pytest.mark.parametrize("name", ["cache", "past_key_values"])  # since transformers 5.24, and before
    def test_a_cache_of_the_callers_own(self, name):
        model = llama().eval()
        enable_prefix_sharing(model)
        with pytest.raises(ValueError, match=f"with `{name}`, it does not begin with the prompts"):
            generate_with_shared_prefix(model, **prompts(), max_new_tokens=2, **{name: DynamicCache()})

    def test_cache_of_older_checkpoints(self):
        model = llama().eval()
        enable_prefix_sharing(model)
        model.generation_config.cache_implementation = "hybrid"
        config = GenerationConfig(max_length=PROMPT + 2, min_new_tokens=2)  # in place of `max_new_tokens`
        # Without a cache, too: there is one all the same
        for given in ({}, {"use_cache": False}):
            output = generate_with_shared_prefix(model, **prompts(), generation_config=config, **given)
            assert output.shape[1] == PROMPT + 2

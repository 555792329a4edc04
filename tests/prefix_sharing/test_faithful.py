import copy
import importlib.metadata
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config
from trl.trainer.utils import disable_dropout_in_model

from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing import routing
from rloo_memory.prefix_sharing.enabling import disable_prefix_sharing, enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.token_budget import TokenBudgetPasses
from rloo_memory.prefix_sharing.trainer import TrainerPasses

from .sharing_trainers import SMALL, GRPOConfig, RLOOConfig, build_trainer
from .test_passes import TRAINERS, forward_whole_rows, load, make_inputs

pytestmark = pytest.mark.slow

MODEL_ID = "tiny-Qwen2ForCausalLM-2.5"
NESTED_MODEL_ID = "tiny-Gemma3ForConditionalGeneration"
BATCH = {"num_generations": 4, "per_device_train_batch_size": 4}


def implementations(model):
    """Attention implementation that each config of a model names."""
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


def num_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class TestPrefixSharingFaithful:
    def make_trainer(self, config_class, trainer_class, model, peft_config=None, **kwargs):
        kwargs = {"per_device_train_batch_size": 3, "bf16": False, "use_cpu": True, **kwargs}
        args = config_class(output_dir=self.tmp_dir, **SMALL | kwargs)
        tokenizer = AutoTokenizer.from_pretrained(MODEL_ID)
        return build_trainer(trainer_class, args, model=model, processing_class=tokenizer, peft_config=peft_config)

    @pytest.mark.parametrize("model_id", [MODEL_ID, NESTED_MODEL_ID])
    def test_model_is_as_it_came(self, model_id):
        model = load(model_id).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})  # layers run once more in the backward
        names, hooks = implementations(model), num_hooks(model)
        inputs, prompt_length = make_inputs()
        expected, expected_grads = forward_whole_rows(model, inputs)
        enable_prefix_sharing(model)
        passes = SharedPrefixPasses(prompt_length, tokens_per_forward=8)
        within = []
        mlp = model.base_model.get_decoder().layers[1].mlp
        handle = mlp.register_forward_pre_hook(lambda *args: within.append(implementations(model)))

        outputs = model(**inputs, passes=passes)
        assert implementations(model) == names
        outputs.log_probs.sum().backward()

        assert implementations(model) == names
        assert within and all(seen == names for seen in within)
        torch.testing.assert_close(outputs.log_probs, expected.log_probs[:, prompt_length - 1 :], rtol=1e-4, atol=1e-5)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-3, atol=1e-5)

        prompts = {name: inputs[name][:, :prompt_length] for name in ("input_ids", "attention_mask")}
        config = GenerationConfig(max_new_tokens=2, do_sample=False)
        generate_with_shared_prefix(model.eval(), **prompts, generation_config=config)
        assert implementations(model) == names
        handle.remove()
        disable_prefix_sharing(model)
        assert num_hooks(model) == hooks and implementations(model) == names
        with pytest.raises(ValueError, match="did not pass their keys and values"):
            model(**inputs, passes=passes)

    def test_copies(self):
        model = AutoModelForCausalLM.from_pretrained(MODEL_ID)
        enable_prefix_sharing(model)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        hooks = num_hooks(copied)
        enable_prefix_sharing(copied)
        assert num_hooks(copied) == hooks == num_hooks(model)
        disable_prefix_sharing(copied)
        assert num_hooks(copied) == 0 and b"prefix_sharing" not in pickle.dumps(copied)

    def test_second_check(self):
        model = load(MODEL_ID)
        enable_prefix_sharing(model)
        model.model.layers[1].self_attn.attention_dropout = 0.1
        with pytest.raises(ValueError, match="dropout"):
            enable_prefix_sharing(model)
        assert num_hooks(model) == 0

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_second_trainer(self, config_class, trainer_class):
        build(family("qwen3_5_text", vocab_size=300)).save_pretrained(self.tmp_dir)
        model = AutoModelForCausalLM.from_pretrained(self.tmp_dir, dtype=torch.float32)
        for _ in range(2):
            trainer = self.make_trainer(config_class, trainer_class, model, beta=0.05, prefix_sharing=True)
            trainer.train()
            assert implementations(model) == implementations(trainer.ref_model)

    def test_logits_to_keep(self):
        model = build(family("gemma4_text")).eval()
        input_ids = torch.arange(10, 22)[None]
        expected = model(input_ids=input_ids, logits_to_keep=3).logits
        enable_prefix_sharing(model)
        torch.testing.assert_close(model(input_ids=input_ids, logits_to_keep=3).logits, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("column", [12, 13, 3, 11])
    def test_mask_with_a_hole(self, column):
        # The first and the second token of a completion, one of a prompt, and its last one
        model = load(MODEL_ID)
        enable_prefix_sharing(model)
        inputs, prompt_length = make_inputs()
        inputs["attention_mask"][0, column] = 0
        for passes in (
            SharedPrefixPasses(prompt_length),
            TokenBudgetPasses(prompt_length, tokens_per_forward=20),
            SharedPrefixPasses(prompt_length, tokens_per_forward=20),
        ):
            with pytest.raises(ValueError, match=rf"row 0 .*column {column}\)"):
                model(**inputs, passes=passes)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_check_is_in_float32(self, dtype, monkeypatch):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        params = {name: (param.detach().clone(), param.data_ptr()) for name, param in model.named_parameters()}
        seen = set()
        handle = model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
        enable_prefix_sharing(model)
        handle.remove()
        assert seen == {torch.float32}

        forward = model.model.forward

        def shifted(*args, **kwargs):
            if isinstance(kwargs.get("shared_prefix"), routing.ReadPrefix):
                kwargs["position_ids"] = kwargs["position_ids"] + 1
            return forward(*args, **kwargs)

        with monkeypatch.context() as patch:  # an error of 5.9 %, where half of bfloat16's digits are 8.8 %
            patch.setattr(model.model, "forward", shifted)
            with pytest.raises(ValueError, match="differ"):
                enable_prefix_sharing(model)

        for name, (param, pointer) in params.items():
            assert model.get_parameter(name).data_ptr() == pointer
            torch.testing.assert_close(model.get_parameter(name), param, rtol=0, atol=0)

    def test_kernel_without_float32(self):
        model = AutoModelForCausalLM.from_pretrained(MODEL_ID, dtype=torch.bfloat16)

        def refuse(module, args):
            assert args[0].dtype == torch.bfloat16

        model.model.layers[1].mlp.register_forward_pre_hook(refuse)
        enable_prefix_sharing(model)
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize("option", [{"prefix_sharing": True}, {"tokens_per_forward": 64}])
    @pytest.mark.parametrize("kwargs", [{"torch_compile": True}, {"pad_to_multiple_of": 8}])
    def test_options_of_both(self, config_class, option, kwargs):
        with pytest.raises(ValueError, match=f"`{next(iter(option))}.*{next(iter(kwargs))}"):
            config_class(output_dir=self.tmp_dir, use_cpu=True, bf16=False, **BATCH, **option, **kwargs)

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    def test_options_of_processes(self, config_class, monkeypatch):
        kwargs = {"output_dir": self.tmp_dir, "use_cpu": True, "bf16": False, "prefix_sharing": True}
        config_class(**BATCH, ddp_static_graph=True, accelerator_config={"split_batches": True}, **kwargs)
        with pytest.raises(ValueError, match="ddp_static_graph"):
            config_class(
                num_generations=4,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                ddp_static_graph=True,
                **kwargs,
            )
        monkeypatch.setattr(config_class, "world_size", 2)
        with pytest.raises(ValueError, match="split_batches"):
            config_class(**BATCH, accelerator_config={"split_batches": True}, **kwargs)

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    @pytest.mark.parametrize("prefix_sharing, passes", [(True, 2), (False, 1)])  # of the prompt, of its completions
    @pytest.mark.parametrize("checkpointing_kwargs, runs", [({"every_n_layers": 2}, 1), ({"offload": True}, 2)])
    def test_layers_to_checkpoint(
        self, config_class, trainer_class, checkpointing_kwargs, runs, prefix_sharing, passes
    ):
        trainer = self.make_trainer(
            config_class,
            trainer_class,
            load(MODEL_ID),
            prefix_sharing=prefix_sharing,
            gradient_checkpointing_kwargs=checkpointing_kwargs,
        )
        calls = []

        def count(module, args):
            if torch.is_grad_enabled():
                calls.append(1)

        trainer.model.model.layers[1].mlp.register_forward_pre_hook(count)
        trainer.train()
        assert len(calls) == runs * passes  # of the second layer

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    @pytest.mark.parametrize("kwargs", [{}, {"prefix_sharing": True}])
    def test_nothing_to_train(self, config_class, trainer_class, kwargs):
        model = get_peft_model(load(MODEL_ID), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.requires_grad_(False)  # as `PeftModel.from_pretrained` leaves it
        with pytest.raises(ValueError, match="is_trainable=True"):
            self.make_trainer(config_class, trainer_class, model, beta=0.05, **kwargs)

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_dropout_of_adapter_that_is_off(self, config_class, trainer_class):
        peft_config = LoraConfig(target_modules=["q_proj"], lora_dropout=0.05, task_type="CAUSAL_LM")
        args = (config_class, trainer_class, MODEL_ID, peft_config)
        self.make_trainer(*args, prefix_sharing=True, disable_dropout=True)
        with pytest.raises(ValueError, match="lora_dropout"):
            self.make_trainer(*args, prefix_sharing=True)
        model = get_peft_model(load(MODEL_ID), peft_config)
        disable_dropout_in_model(model)
        enable_prefix_sharing(model)

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize("option", [{"prefix_sharing": True}, {"tokens_per_forward": 64}])
    @pytest.mark.parametrize("version", ["0.18.6", "0.19.2"])
    def test_deepspeed_version(self, config_class, option, version, monkeypatch):
        versions = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: version if name == "deepspeed" else versions(name)
        )
        accelerator = SimpleNamespace(
            device="cpu",
            num_processes=2,
            distributed_type=DistributedType.DEEPSPEED,
            state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)),
        )
        model = get_peft_model(load(MODEL_ID), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        with pytest.raises(ValueError, match=f"deepspeed>=0.19.3`, found {version}"):
            TrainerPasses(config_class(output_dir=self.tmp_dir, **option), accelerator, model)

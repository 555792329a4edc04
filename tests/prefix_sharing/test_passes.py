import pytest
import torch
from datasets import load_dataset
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from .sharing_trainers import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from rloo_memory.prefix_sharing import enabling
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.trainer import shuffle_groups
from .sharing_trainers import add_fused_lm_head


from peft import LoraConfig

MODEL_IDS = [
    "tiny-Cohere2ForCausalLM",
    "tiny-Qwen2ForCausalLM-2.5",
    "tiny-Qwen3ForCausalLM",
    "tiny-Qwen3MoeForCausalLM",
]
NESTED_MODEL_ID = "tiny-Gemma3ForConditionalGeneration"
TRAINERS = [(RLOOConfig, RLOOTrainer), (GRPOConfig, GRPOTrainer)]


def load(model_id):
    auto_class = AutoModelForImageTextToText if "Conditional" in model_id else AutoModelForCausalLM
    model = auto_class.from_pretrained(model_id, dtype=torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def make_batch():
    # Two prompts, left-padded, with three completions each, right-padded
    prompt_length, completion_length = 12, 6
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(10, 100, (6, prompt_length + completion_length), generator=generator)
    input_ids[:3, :prompt_length] = input_ids[0, :prompt_length]
    input_ids[3:, :prompt_length] = input_ids[3, :prompt_length]
    attention_mask = torch.ones_like(input_ids)
    attention_mask[3:, :5] = 0
    for row, length in enumerate([6, 2, 1, 4, 0, 6]):
        attention_mask[row, prompt_length + length :] = 0
    return input_ids, attention_mask, prompt_length


def make_inputs():
    input_ids, attention_mask, prompt_length = make_batch()
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :prompt_length] = -100
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "fused_lm_head": True}
    return inputs, prompt_length


def forward_whole_rows(model, inputs):
    outputs = model(**inputs)
    outputs.log_probs.sum().backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return outputs, grads


class TestPrefixSharing:
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    @pytest.mark.parametrize("tokens_per_forward", [None, 1, 8])
    @pytest.mark.parametrize("model_id", [*MODEL_IDS, NESTED_MODEL_ID])
    def test_log_probs_and_gradients(self, model_id, tokens_per_forward, gradient_checkpointing):
        model = load(model_id).train()
        inputs, prompt_length = make_inputs()
        expected, expected_grads = forward_whole_rows(model, inputs)

        enable_prefix_sharing(model)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outputs = model(**inputs, passes=SharedPrefixPasses(prompt_length, tokens_per_forward))
        outputs.log_probs.sum().backward()

        torch.testing.assert_close(outputs.log_probs, expected.log_probs[:, prompt_length - 1 :], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outputs.entropy, expected.entropy[:, prompt_length - 1 :], rtol=1e-5, atol=1e-5)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("model_id", [*MODEL_IDS, NESTED_MODEL_ID])
    def test_generate(self, model_id):
        model = load(model_id).eval()
        input_ids, attention_mask, prompt_length = make_batch()
        inputs = {"input_ids": input_ids[:, :prompt_length], "attention_mask": attention_mask[:, :prompt_length]}
        generation_config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, disable_compile=True)
        expected = model.generate(**inputs, generation_config=generation_config)

        enable_prefix_sharing(model)
        output = generate_with_shared_prefix(model, **inputs, generation_config=generation_config)

        assert torch.equal(output, expected)

    def test_trained_embedding_is_looked_up_once(self):
        # The gradient of a lookup has the size of the vocabulary, so passes must not look tokens up one by one
        model = load("tiny-Qwen2ForCausalLM-2.5").train()
        enable_prefix_sharing(model)
        input_ids, attention_mask, prompt_length = make_batch()
        lookups = []
        model.get_input_embeddings().register_forward_hook(lambda module, args, output: lookups.append(output))
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "fused_lm_head": True}
        outputs = model(**inputs, passes=SharedPrefixPasses(prompt_length, tokens_per_forward=1))
        outputs.log_probs.sum().backward()
        assert len(lookups) == 1

    def test_unsupported_attention_implementation(self):
        model = load("tiny-Qwen2ForCausalLM-2.5")
        AttentionInterface.register("linear", lambda module, query, key, value, mask, **kwargs: (value, None))
        model.config._attn_implementation = "linear"
        with pytest.raises(ValueError, match="'linear'.* need not be a softmax"):
            enable_prefix_sharing(model)

    @pytest.mark.parametrize("raised, error", [(TypeError, ValueError), (KeyboardInterrupt, KeyboardInterrupt)])
    def test_failed_check_restores_attention(self, raised, error, monkeypatch):
        def fail(*args, **kwargs):
            raise raised

        monkeypatch.setattr(enabling, "error_of_passes", fail)
        model = load("tiny-Qwen2ForCausalLM-2.5")
        with pytest.raises(error):
            enable_prefix_sharing(model)
        assert model.config._attn_implementation == "sdpa"

    def test_empty_prompt(self):
        model = load("tiny-Qwen2ForCausalLM-2.5")
        enable_prefix_sharing(model)
        input_ids, attention_mask, prompt_length = make_batch()
        attention_mask[2, :prompt_length] = 0
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        with pytest.raises(ValueError, match="row 2"):
            model(**inputs, labels=labels, fused_lm_head=True, passes=SharedPrefixPasses(prompt_length))
        prompts = {name: x[:, :prompt_length] for name, x in inputs.items()}
        with pytest.raises(ValueError, match="row 2"):
            generate_with_shared_prefix(model, **prompts, generation_config=GenerationConfig(max_new_tokens=1))

    def test_shuffle_keeps_groups(self):
        batch = {"x": torch.arange(12), "y": list("aaabbbcccddd")}
        shuffled = shuffle_groups(batch, group_size=3)
        groups = shuffled["x"].view(4, 3)
        assert torch.equal(groups - groups[:, :1], torch.arange(3).expand(4, 3))
        assert all(group[0] % 3 == 0 for group in groups.tolist())
        assert "".join(shuffled["y"]) == "".join("abcd"[i // 3] for i in shuffled["x"].tolist())


class TestPrefixSharingTrainers:
    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    @pytest.mark.parametrize("model_id", MODEL_IDS)
    def test_train(self, model_id, config_class, trainer_class):
        dataset = load_dataset("zen", "standard_prompt_only", split="train")
        training_args = config_class(
            output_dir=self.tmp_dir,
            learning_rate=0.1,  # use higher lr because gradients are tiny and default lr can stall updates
            per_device_train_batch_size=3,  # reduce the batch size to reduce memory usage
            num_generations=3,  # reduce the number of generations to reduce memory usage
            max_completion_length=8,  # reduce the completion length to reduce memory usage
            prefix_sharing=True,
            tokens_per_forward=18,  # two completions with a prompt token each
            max_steps=5,
            report_to="none",
        )
        trainer = trainer_class(
            model=model_id,
            reward_funcs="tiny-Qwen2ForSequenceClassification-2.5",
            args=training_args,
            train_dataset=dataset,
        )
        previous_trainable_params = {n: param.clone() for n, param in trainer.model.named_parameters()}

        trainer.train()

        assert trainer.state.log_history[-1]["train_loss"] is not None
        for n, param in previous_trainable_params.items():
            new_param = trainer.model.get_parameter(n)
            assert not torch.equal(param, new_param), f"Parameter {n} has not changed."

    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_train_peft(self, config_class, trainer_class):
        dataset = load_dataset("zen", "standard_prompt_only", split="train")
        training_args = config_class(
            output_dir=self.tmp_dir,
            learning_rate=0.1,  # use higher lr because gradients are tiny and default lr can stall updates
            per_device_train_batch_size=3,  # reduce the batch size to reduce memory usage
            num_generations=3,  # reduce the number of generations to reduce memory usage
            max_completion_length=8,  # reduce the completion length to reduce memory usage
            beta=0.1,  # the reference is the model with the adapter disabled
            prefix_sharing=True,
            max_steps=5,
            report_to="none",
        )
        trainer = trainer_class(
            model="tiny-Qwen2ForCausalLM-2.5",
            reward_funcs="tiny-Qwen2ForSequenceClassification-2.5",
            args=training_args,
            train_dataset=dataset,
            peft_config=LoraConfig(),
        )
        trainer.train()
        assert trainer.state.log_history[-1]["train_loss"] is not None

    @pytest.mark.parametrize("config_class", [RLOOConfig, GRPOConfig])
    @pytest.mark.parametrize(
        "kwargs, match",
        [
            ({"prefix_sharing": True, "per_device_train_batch_size": 6}, "per_device_train_batch_size"),
            ({"prefix_sharing": True, "cache_implementation": "static"}, "cache_implementation"),
            ({"prefix_sharing": True, "generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ],
    )
    def test_invalid_config(self, config_class, kwargs, match):
        with pytest.raises(ValueError, match=match):
            config_class(
                output_dir=self.tmp_dir,
                num_generations=4,
                gradient_accumulation_steps=2,
                **{"per_device_train_batch_size": 4, **kwargs},
            )

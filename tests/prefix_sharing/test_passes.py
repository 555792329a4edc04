import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from experiments.fused_head import add_fused_lm_head
from rloo_memory.prefix_sharing import enabling
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.trainer import shuffle_groups

from .sharing_trainers import TRAINERS  # noqa: F401


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

"""What goes through a model behind prompts, and what is refused of it."""

import pytest
import torch
from transformers import AttentionInterface, GenerationConfig

from experiments.checks.family_check import PROMPT, TOLERANCE, batch, error_of, in_float64, run, run_micro_batches
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.trainer import shuffle_groups

from .conftest import llama


class TestPrefixSharing:
    def test_trained_embedding_is_looked_up_once(self):
        # The gradient of a lookup has the size of the vocabulary, so passes must not look tokens up one by one
        model, lookups = llama(), []
        enable_prefix_sharing(model)
        model.get_input_embeddings().register_forward_hook(lambda module, args, output: lookups.append(output))
        run(model, passes=SharedPrefixPasses(PROMPT, tokens_per_forward=1))
        assert len(lookups) == 1

    @pytest.mark.parametrize("in_one_backward", [False, True])
    @pytest.mark.parametrize("is_frozen", [False, True])
    def test_micro_batches_of_one_completion_whose_loss_is_computed_twice(self, is_frozen, in_one_backward):
        """Also where no keys and values of the frozen layers below have a gradient."""
        with in_float64():
            model = llama().requires_grad_(not is_frozen)
            model.get_decoder().layers[-1].requires_grad_(True)
            truth = run(model)
            enable_prefix_sharing(model)
            forward = model.forward

            def forward_twice(**kwargs):
                forward(**kwargs)  # whose loss has no backward
                return forward(**kwargs)

            model.forward = forward_twice
            found = run_micro_batches(model, in_one_backward=in_one_backward)
            assert max(error_of(found, truth)) <= TOLERANCE

    def test_unsupported_attention_implementation(self):
        model = llama()
        AttentionInterface.register("linear", lambda module, query, key, value, mask, **kwargs: (value, None))
        model.config._attn_implementation = "linear"
        with pytest.raises(ValueError, match="'linear'.* need not be a softmax"):
            enable_prefix_sharing(model)

    def test_empty_prompt(self):
        model, inputs = llama(), batch()
        enable_prefix_sharing(model)
        inputs["attention_mask"][2, :PROMPT] = 0
        with pytest.raises(ValueError, match="row 2"):
            run(model, inputs, passes=SharedPrefixPasses(PROMPT))
        prompts = {name: x[:, :PROMPT] for name, x in inputs.items()}
        with pytest.raises(ValueError, match="row 2"):
            generate_with_shared_prefix(model, **prompts, generation_config=GenerationConfig(max_new_tokens=1))

    def test_shuffle_keeps_groups(self):
        batch = {"x": torch.arange(12), "y": list("aaabbbcccddd")}
        shuffled = shuffle_groups(batch, group_size=3)
        groups = shuffled["x"].view(4, 3)
        assert torch.equal(groups - groups[:, :1], torch.arange(3).expand(4, 3))
        assert all(group[0] % 3 == 0 for group in groups.tolist())
        assert "".join(shuffled["y"]) == "".join("abcd"[i // 3] for i in shuffled["x"].tolist())

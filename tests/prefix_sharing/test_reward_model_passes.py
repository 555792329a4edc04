import pytest
import torch

from tests.probes.tiny import build_trainer

from .conftest import TRAINERS

pytestmark = pytest.mark.slow


class TestRewardModelPasses:
    @pytest.mark.parametrize(
        "options, num_rows",
        [
            ({}, [6]),
            ({"prefix_sharing": True}, [6]),
            ({"prefix_sharing": True, "tokens_per_forward": 16}, [2, 2, 2]),
            ({"tokens_per_forward": 1}, [1, 1, 1, 1, 1, 1]),
        ],
    )
    @pytest.mark.parametrize("trainer_class", TRAINERS)
    def test_rewards(self, trainer_class, options, num_rows):
        reward_model = "tiny-Qwen2ForSequenceClassification-2.5"
        trainer = build_trainer(trainer_class, self.tmp_dir, "tiny", reward_funcs=reward_model, **options)
        prompts, completions = ["The sky"] * 6, [" is" * n for n in range(6)]
        reward_model, tokenizer = trainer.reward_funcs[0], trainer.reward_processing_classes[0]
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right")
        with torch.no_grad():
            expected = reward_model(**inputs.to(reward_model.device)).logits
        outputs = []
        reward_model.model.register_forward_hook(lambda module, args, output: outputs.append(output))

        rewards = trainer._calculate_rewards([{"prompt": p} for p in prompts], prompts, completions, [[1]] * 6)

        torch.testing.assert_close(rewards, expected.float())
        assert [len(output.last_hidden_state) for output in outputs] == num_rows
        assert all(output.past_key_values is None for output in outputs)
        # Not as TRL calls it
        with torch.no_grad():
            assert reward_model(inputs["input_ids"], output_hidden_states=True).hidden_states

"""For each setting of GRPO: how far an update of 8 completions together is from one of 8 micro-batches of 1, relative
to the update, and what the planner says such an update depends on. JSON."""

import json
import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from trl.trainer import grpo_trainer

import trl
from experiments.checks.setup_trainer import text_dataset
from rloo_memory import data, models
from rloo_memory.plan.trl_settings import by_batch
from rloo_memory.settings.trl_parser import CHOICES

SHAPE = dict(
    vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
DENSE = Qwen3Config(**SHAPE)
EXPERTS = dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
CASES = [(DENSE, dict(loss_type=name)) for name in CHOICES["loss_type"]] + [
    (DENSE, dict(top_entropy_quantile=0.2)),
    (DENSE, dict(entropy_coef=0.5)),
    (DENSE, dict(use_adaptive_entropy=True, entropy_coef=0.5, entropy_target=9.0, max_steps=2)),
    (DENSE, dict(importance_sampling_level="sequence", off_policy_mask_threshold=0.5, delta=2.0)),
    (DENSE, dict(scale_rewards="batch", mask_truncated_completions=True)),
    (Qwen3MoeConfig(**SHAPE, **EXPERTS), dict(router_aux_loss_coef=0.5)),
    (Qwen3MoeConfig(**SHAPE, **EXPERTS, router_aux_loss_coef=0.5), {}),
    (Qwen3MoeConfig(**SHAPE, **EXPERTS), dict(router_aux_loss_coef=0.0)),
]
grpo_trainer.shuffle_sequence_dict = lambda batch, *rest: batch  # the same rows in the same order in both


def reward(completion_ids, **kwargs):
    return [len(set(ids)) / 10 + sum(i % 7 == 0 for i in ids) for ids in completion_ids]


def update(batch: int, config, options: dict) -> torch.Tensor:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    args = trl.GRPOConfig(
        folder, num_generations=8, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch,
        max_completion_length=6, learning_rate=0.05, lr_scheduler_type="constant", optim="sgd", max_grad_norm=1e9,
        seed=1, beta=0.0, bf16=False, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        **{"max_steps": 1, **options},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(model, reward, args, train_dataset=text_dataset(["a b c"]), processing_class=tokenizer)

    def completions(prompt_ids, *args):  # of different lengths
        rows = range(len(prompt_ids))
        return [[(37 * row + 11 * i) % 400 + 7 for i in range(2 + row % 4)] + [3 - row % 2] for row in rows], None

    trainer._generate_single_turn = completions
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before


tokenizer = models.build_tokenizer(data.load_documents(), 512)
result = []
with tempfile.TemporaryDirectory() as folder:
    for config, options in CASES:
        together, apart = update(8, config, options), update(1, config, options)
        distance = ((together - apart).norm() / together.norm()).item()
        result.append([f"{config.model_type} {options}", distance, by_batch(options, config)])
print(json.dumps(result))

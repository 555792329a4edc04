"""A hub of tiny models, a tiny Llama, and trainers of TRL as released whose completions do not depend on rounding."""

import logging

import pytest
import tiny_hub
import torch
from trl.trainer import grpo_trainer

import trl
from experiments.checks import tiny_families
from experiments.checks.family_check import prepared
from experiments.checks.tiny_families import VOCAB
from rloo_memory import share_prompts
from rloo_memory.prefix_sharing.trainer import shuffle_groups
from tests.probes.tiny import build_model, build_tokenizer, build_trainer

K = 4
TRAINERS = (trl.RLOOTrainer, trl.GRPOTrainer)
PROMPTS = [" ".join(f"w{3 + 7 * i % 90}" for i in range(n)) for n in (31, 22)]


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    tiny_hub.make(folder)
    build_model().save_pretrained(folder / "tiny")
    build_tokenizer().save_pretrained(folder / "tiny")
    return folder


@pytest.fixture(autouse=True)
def here(request, monkeypatch, tmp_path, hub):
    """Models and data are found by their names. A test of a class has `self.tmp_dir`."""
    monkeypatch.chdir(hub)
    # Configs ask for bfloat16 unless told otherwise, and transformers refuses it without a GPU unless `use_cpu` is set
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    if request.instance is not None:
        request.instance.tmp_dir = str(tmp_path)


def llama():
    """With plain attention in all layers, in the default dtype, as `family_check` compares it."""
    return prepared(tiny_families.build(tiny_families.family("llama")), torch.get_default_dtype())


class Fixed(trl.GRPOTrainer):
    """Completions that do not depend on rounding."""

    def _generate_single_turn(self, prompt_ids, images, *args, **kwargs):
        random = torch.Generator().manual_seed(self.state.global_step)
        lengths = [(3, 9, 1, 6)[row % 4] for row in range(len(prompt_ids))]
        return [torch.randint(4, VOCAB, (length,), generator=random).tolist() for length in lengths], None


@pytest.fixture
def policy(tmp_path):
    llama().save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


@pytest.fixture
def build(policy, tmp_path, monkeypatch):
    """A trainer whose rollouts keep the completions of a prompt together, as sharing does."""
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: shuffle_groups(batch, K))

    def make(trainer_class, batch_size, model=policy, peft_config=None, **options):
        if model is policy:
            options = {"model_init_kwargs": {"dtype": torch.float64}, **options}
        options = {"max_completion_length": 16, "max_steps": 2, "beta": 0.04, "lr_scheduler_type": "linear", **options}
        torch.manual_seed(0)
        return build_trainer(
            trainer_class,
            tmp_path,
            model,
            PROMPTS,
            lambda completion_ids, **_: [sum(ids) * 7919 % 13 / 13 for ids in completion_ids],
            {"processing_class": build_tokenizer(VOCAB), "peft_config": peft_config},
            launched=False,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=8 // batch_size,
            optim="sgd",
            max_grad_norm=0.0,
            shuffle_dataset=False,
            **options,
        )

    return make


def weights_of(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.model.parameters()])


@pytest.fixture
def train(build):
    """Trains the policy. Returns its weights, tokens of its first layer, and what was logged."""

    def run(trainer_class, batch_size, share=None, prepare=lambda trainer: None, **options):
        trainer, tokens = build(trainer_class, batch_size, **options), []
        prepare(trainer)
        if share is not None:
            share_prompts(trainer, **share)

        def count(module, args):
            tokens.append(args[0][..., 0].numel())

        layers = [module for name, module in trainer.model.named_modules() if name.endswith("layers.0.mlp")]
        layers[0].register_forward_pre_hook(count)
        trainer.train()
        return weights_of(trainer), sum(tokens), trainer.state.log_history

    return run


@pytest.fixture
def told():
    """Warnings of the package."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("rloo_memory.prefix_sharing.trainer")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)

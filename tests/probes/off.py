"""Three updates of each trainer without any option of the patches, on a tree of TRL.

    off.py TREE

Completions end at different lengths, so rows are padded on both sides. Prints for each trainer what was logged, the
lengths, the parameters (float32, base64), and whether attention has dropout without and with `disable_dropout`.
"""

import base64
import json
import logging
import sys
import tempfile

import tiny
import torch


def train(trainer_class, folder):
    lengths = []

    def reward(completion_ids, **kwargs):
        lengths.append([len(ids) for ids in completion_ids])
        return tiny.reward(completion_ids)

    trainer = tiny.build_trainer(
        trainer_class,
        folder,
        reward_funcs=reward,
        max_steps=3,
        beta=0.05,
        num_iterations=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=16,
        max_completion_length=24,
    )
    trainer.train()
    logs = [
        {key: value for key, value in log.items() if "time" not in key and "per_second" not in key}
        for log in trainer.state.log_history
    ]
    parameters = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    return {
        "logs": logs,
        "lengths": lengths,
        "parameters": base64.b64encode(parameters.numpy().tobytes()).decode(),
        "dropout": [has_dropout(trainer_class, folder, disable) for disable in (False, True)],
    }


def has_dropout(trainer_class, folder, disable):
    """In a model whose attention has a probability in place of a layer."""
    dropout = {"model_init_kwargs": {"attention_dropout": 0.1}, "disable_dropout": disable}
    model = tiny.build_trainer(trainer_class, folder, beta=0.05, **dropout).model.train()
    ids = torch.arange(3, 15)[None]
    first, second = (model(input_ids=ids).logits for _ in range(2))
    return not torch.equal(first, second)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.path.insert(0, sys.argv[1])
    import trl

    assert trl.__file__.startswith(sys.argv[1]), trl.__file__
    with tempfile.TemporaryDirectory() as folder:
        tiny.build_model().save_pretrained(folder)
        print(json.dumps({name: train(getattr(trl, f"{name}Trainer"), folder) for name in ("RLOO", "GRPO")}))

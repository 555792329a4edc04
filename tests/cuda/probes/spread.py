"""Two updates of a model whose layers are on two devices, and `log_probs` of one's own loop.

Prints a line of JSON: {"devices", "trained": how far from TRL's the weights have moved, relative to that, "generated":
whether as TRL does, "alone": relative difference of `log_probs` to whole rows}.
"""

import contextlib
import json
import sys
import tempfile

import torch
from datasets import Dataset

from rloo_memory import log_probs, share_prompts
from tests.probes.tiny import build_config, build_model, build_tokenizer
from trl import RLOOConfig, RLOOTrainer

PROMPTS = [" ".join(f"w{3 + (7 * i + j) % 90}" for i in range(n)) for j, n in enumerate((31, 22, 17, 29))]
PARTS = ("embed_tokens", "layers.0", "rotary_emb", "layers.1", "norm")
DEVICES = {"lm_head": 0, **{f"model.{part}": int(part in PARTS[3:]) for part in PARTS}}
COMPLETIONS = [torch.arange(5, 5 + length) for length in (3, 9, 1, 6)]


class Fixed(RLOOTrainer):
    """Generates, and trains on other completions: those of a prompt, decoded greedily, are all the same."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.generated = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return [COMPLETIONS[row % 4].tolist() for row in range(len(prompt_ids))]


def train(folder: str, shared: bool) -> Fixed:
    trainer = Fixed(
        folder,
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 13 / 13 for ids in completion_ids],
        args=RLOOConfig(
            folder, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=4,
            max_completion_length=9, learning_rate=1e-3, bf16=False, save_strategy="no", report_to="none",
            generation_kwargs={"do_sample": False}, shuffle_dataset=False,
            model_init_kwargs={"dtype": "float32", "device_map": DEVICES},
        ),
        processing_class=build_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):  # what is logged
        if shared:
            share_prompts(trainer)
        trainer.train()
    return trainer


def whole(model, prompt: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the completions behind a prompt, 0 behind their ends."""
    rows = []
    for completion in COMPLETIONS:
        ids = torch.cat([prompt, completion])[None].cuda()
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def apart(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x - truth).norm() / truth.norm()).item()


def weights_of(model) -> torch.Tensor:
    return torch.cat([param.detach().flatten().cpu() for param in model.parameters()])


with tempfile.TemporaryDirectory() as folder:
    model = build_model(build_config(tie_word_embeddings=True))
    model.generation_config.eos_token_id = 1  # to look for one of many, CUDA sorts them by a kernel
    model.save_pretrained(folder)
    before = weights_of(model)
    stock, shared = (train(folder, shared) for shared in (False, True))
prompt, model = torch.arange(50, 80), stock.model
found = {
    "devices": sorted({str(param.device) for param in model.parameters()}),
    "trained": apart(weights_of(shared.model) - before, weights_of(model) - before),
    "generated": stock.generated == shared.generated,
    "alone": apart(log_probs(model, prompt, COMPLETIONS), whole(model, prompt)),
}
print(json.dumps(found))

"""`share_prompts`: what it refuses, says and leaves behind. JSON."""

import copy
import json
import logging
import re
import tempfile
from pathlib import Path

import tiny
import torch
from datasets import Dataset

import trl
from rloo_memory import share_prompts

README = Path(__file__).parents[2] / "README.md"
PARTS = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=4, num_generations=8)


class Told(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Around(trl.RLOOTrainer):
    """Computes log-probabilities without the model's own forward."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        states = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = model.lm_head(states[:, -logits_to_keep - 1 : -1]).float()
        ids = input_ids[:, -logits_to_keep:, None]
        return logits.log_softmax(-1).gather(-1, ids)[..., 0], torch.zeros(len(ids), logits_to_keep), None


class Misplaced(trl.RLOOTrainer):
    """Has a forward that scores other columns when it is given fewer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        forward = self.model.forward

        def scored(*args, labels=None, **kwargs):
            moved = None if labels is None else labels.roll(int(labels.shape[1] > 7), 1)
            return forward(*args, labels=moved, **kwargs)

        self.model.forward = scored


def error_of(function) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained_as_in_readme(folder) -> int:
    """Updates of the program that README.md shows, with a small model, short completions and a prompt of words."""
    small = {
        '"Qwen/Qwen3-8B"': repr(folder),
        "max_completion_length=512": f"max_completion_length=6, max_steps=1, bf16=False, output_dir={folder!r}",
    }
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.S)[1]
    for words, instead in small.items():
        assert program.count(words) == 1, words
        program = program.replace(words, instead)
    names = {"dataset": Dataset.from_dict({"prompt": tiny.PROMPTS})}
    exec(program, names)
    return names["trainer"].state.global_step if names["trainer"].prompt_sharing else 0


def tokens_seen(trainer) -> list[int]:
    """Tokens of each call of the first layer, with gradients."""
    seen = []

    def count(module, args):
        if torch.is_grad_enabled():
            seen.append(args[0].shape[0] * args[0].shape[1])

    trainer.model.base_model.layers[0].mlp.register_forward_pre_hook(count)
    return seen


with tempfile.TemporaryDirectory() as folder:
    tiny.build_model().save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    build = lambda **options: tiny.build_trainer("RLOO", folder, **options)  # noqa: E731
    result = {"trl": trl.__version__, "updates of README's program": trained_as_in_readme(folder)}

    trainer = build(**PARTS)
    forward = trainer.model.forward
    sharing = share_prompts(trainer)
    result["twice"] = error_of(lambda: share_prompts(trainer))
    seen = tokens_seen(trainer)
    trainer.train()
    result["shared"] = sum(seen)
    model, ids = copy.deepcopy(trainer.model), torch.tensor([[2, 3, 4, 5]])
    model.lm_head.weight.data.zero_()
    scored = [x(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.std() > 1e-3 for x in (model, trainer.model)]
    result["copy"] = [x.item() for x in scored]
    sharing.remove()
    result["left"] = sorted({"train", "training_step", "_prepare_inputs", "prompt_sharing"} & vars(trainer).keys())
    result["forward is TRL's"] = trainer.model.forward == forward
    seen.clear()
    trainer.train()
    result["whole"] = sum(seen)

    uneven = PARTS | dict(per_device_train_batch_size=3, gradient_accumulation_steps=8, steps_per_generation=8)
    result["batch"] = error_of(lambda: share_prompts(build(**uneven)))
    dropping = build(**PARTS)
    dropping.model.base_model.layers[0].self_attn.attention_dropout = 0.1
    result["model"] = error_of(lambda: share_prompts(dropping))
    result["left by a refusal"] = [name for name in ("training_step", "prompt_sharing") if name in vars(dropping)]
    result["no trainer"] = error_of(lambda: share_prompts(dropping.accelerator))
    result["budget"] = error_of(lambda: share_prompts(build(**PARTS), tokens_per_forward=0))

    trl.RLOOTrainer = Misplaced
    misplaced = build(**PARTS)
    share_prompts(misplaced)
    result["misplaced"] = error_of(misplaced.train)
    ids = torch.randint(3, tiny.VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(0))
    ids[:, :8] = ids[0, :8]
    mask = torch.ones_like(ids)
    mask[:2, 8:] = 0  # as of truncated completions
    score = lambda: misplaced._get_per_token_logps_and_entropies(misplaced.model, ids, mask, 4)  # noqa: E731
    with torch.no_grad():
        result["misplaced, behind rows without a token"] = error_of(score)

    trl.RLOOTrainer = Around
    around, told = build(**PARTS), Told()
    share_prompts(around)
    logging.getLogger("rloo_memory.prefix_sharing.trainer").addHandler(told)
    around.train()
    result["around"] = [line for line in told.lines if "_get_per_token_logps_and_entropies" in line]
print(json.dumps(result))

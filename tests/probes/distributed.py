"""Trainings on two processes, on CPU with gloo, with the TRL that is imported.

    torchrun --nproc_per_node 2 tests/probes/distributed.py FOLDER RUNS

RUNS is a JSON list of dictionaries: a `name` and arguments of `train`. What a run computed goes to FOLDER/NAME.pt.
"""

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from fsdp_on_cpu import allow_fsdp_on_cpu
from peft import LoraConfig
from tiny import VOCABULARY, build_config, build_tokenizer, build_trainer
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from rloo_memory import share_prompts
from rloo_memory.errors import leave
from rloo_memory.prefix_sharing import tree
from trl import GRPOTrainer, RLOOTrainer

try:
    import with_deepspeed
except ImportError:  # deepspeed is not here, and no run asks for it
    with_deepspeed = None

gc.freeze()  # each training collects garbage, as in tests/zygote.py
TRAINERS = {"rloo": RLOOTrainer, "grpo": GRPOTrainer}
COMPLETION_TOKENS, COMPLETIONS = 6, 3
tree.MIN_SAVED_TOKENS = 100  # of prompts that begin alike
# Two prompts a micro-batch and process. The processes never have as many tokens, and
PROMPTS = (
    # a prompt without a prefix to share,
    (["w5", "w7 w8 w9 w10 w11 w12 w13"], ["w21 w22 w23", "w31 w32"]),
    # two prompts that are equal,
    (["w41 w42 w43 w44", "w51 w52"], ["w61 w62 w63 w64 w65", "w61 w62 w63 w64 w65"]),
    # no prefix at all; no completion that counts,
    (["w6", "w9"], ["w71 w72 w73", "w81 w82 w83 w84"]),
    (["w11 w12 w13", "w11 w12 w13"], ["w3", "w91 w92 w93 w94 w95 w4"]),
)  # are what one of them has and the other has not.
NEVER_END = (71, 81)  # first tokens of prompts all of whose completions are cut, and so masked
RATIO = "prefix_sharing/token_ratio"
LOGGED = ("loss", "kl", "entropy", "reward", "clip_ratio/region_mean")
ALWAYS = dict(
    optim="sgd", learning_rate=0.03, max_grad_norm=0.0, shuffle_dataset=False, num_generations=COMPLETIONS,
    temperature=0.8, beta=0.1, per_device_eval_batch_size=3, num_generations_eval=2, gradient_checkpointing=False,
    max_completion_length=COMPLETION_TOKENS, mask_truncated_completions=True,
)  # fmt: skip


def build_model(folder):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(build_config(tie_word_embeddings=False)).double()
    for parameter in model.parameters():  # larger than usual: no gradient is near zero, no two tokens are near a tie
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    model.save_pretrained(folder)


def fixed_completions(prompt_ids):
    """Completions of different lengths that depend on prompt and row; every fifth is cut."""
    completions = []
    for row, prompt in enumerate(prompt_ids):
        length = 1 + (sum(prompt) + 2 * row) % COMPLETION_TOKENS
        ids = [2 + (7 * prompt[-1] + 11 * row + 3 * i * i) % (VOCABULARY - 2) for i in range(length)]
        completions.append(ids if prompt[0] in NEVER_END or row % 5 == 4 else [*ids[:-1], 1])
    return completions


def reward(completion_ids, **kwargs):
    return [(sum(ids) + 5 * row) % 13 / 13 for row, ids in enumerate(completion_ids)]


def trained_parameters(model):
    """Whole, where they are sharded."""

    def whole(parameter):
        if hasattr(parameter, "ds_id"):
            return with_deepspeed.full(parameter)
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()

    return {name: whole(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}


def in_order(prompts, accumulate):
    """Rank 0 takes the first half of what is generated at once."""
    dataset = []
    for start in range(0, len(prompts), accumulate):
        steps = prompts[start : start + accumulate]
        dataset += [prompt for rank in range(2) for step in steps for prompt in step[rank]]
    return dataset


def noted_completions(instance, generate, alone):
    """The list of those that the trainer will get: generated or fixed. GRPO's are not `alone`."""
    completions, generate_single_turn = [], instance._generate_single_turn

    def single_turn(prompt_ids, *args, **kwargs):
        if generate:
            result = generate_single_turn(prompt_ids, *args, **kwargs)
        else:
            result = fixed_completions(prompt_ids) if alone else (fixed_completions(prompt_ids), None)
        completions.append(result if alone else result[0])
        return result

    instance._generate_single_turn = single_turn
    return completions


def tokenize_differently(instance):
    tokenize = instance._tokenize_prompts

    def with_one_more_token(prompts):
        prompt_ids, *others = tokenize(prompts)
        return [[*ids, 30 + row % 2] for row, ids in enumerate(prompt_ids)], *others

    instance._tokenize_prompts = with_one_more_token


def sorting(trainer_class, scores):
    """Sorts rows by the lengths of their prompts, in each rollout and loss; the other way around as it `scores`."""

    def by_length(rows):
        order = rows["prompt_mask"].sum(1).argsort(stable=True)
        return {name: x[order] if isinstance(x, torch.Tensor) and x.dim() else x for name, x in rows.items()}

    class Sorting(trainer_class):
        def _generate_and_score_completions(self, inputs):
            return by_length(super()._generate_and_score_completions(inputs))

        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, by_length(inputs))

        def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, *args, **kwargs):
            order = (mask[:, :-keep].sum(1) * -scores).argsort(stable=True)
            scored = super()._get_per_token_logps_and_entropies(model, ids[order], mask[order], keep, *args, **kwargs)
            return tuple(x if x is None else x[order.argsort()] for x in scored)

    return Sorting


def train(
    folder,
    *,
    trainer,
    fsdp=None,
    zero3=None,
    dtype="float64",
    accumulate=1,
    rows=2 * COMPLETIONS,
    generate=False,
    evaluate=False,
    lora=False,
    differ=False,
    save=None,
    resume=None,
    prompts=PROMPTS,
    options=None,
    native=False,
    sort=None,
    reward_model=False,
):
    """One training, with micro-batches of some `rows`: of two groups, of one, or of a part of one. Unless told to
    `generate`, completions are fixed, so that both arms train on the same ones. With `differ`, the prompts of a group
    do, on one of the processes.

    With `save` it leaves a checkpoint after that update, with `resume` it goes on from that of an earlier run. With
    `native` the trainers have a `prefix_sharing` of their own, that of trl/first."""
    trainer_class = TRAINERS[trainer] if sort is None else sorting(TRAINERS[trainer], scores=sort == "scores")
    torch.manual_seed(0)  # for the head of the reward model
    options = dict(options or {})
    names = () if native else ("prefix_sharing", "tokens_per_forward")
    sharing = {name: options.pop(name) for name in names if name in options}
    dataset = in_order(prompts, accumulate)
    for variable in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[variable]  # set by an earlier run with FSDP or DeepSpeed
    given = {
        "reward_processing_classes": [None, build_tokenizer()] if reward_model else None,
        "eval_dataset": Dataset.from_dict({"prompt": dataset[:3]}) if evaluate else None,
        "peft_config": LoraConfig(r=4, lora_alpha=64, target_modules="all-linear") if lora else None,
    }
    instance = build_trainer(
        trainer_class,
        folder / "out",
        str(folder / "model"),
        dataset,
        [reward, str(folder / "model")] if reward_model else reward,
        given,
        launched=False,
        save_strategy="steps" if save else "no",
        save_steps=save or 500,
        max_steps=2 if generate else 3,
        num_iterations=accumulate,
        gradient_accumulation_steps=accumulate * 2 * COMPLETIONS // rows,
        per_device_train_batch_size=rows,
        model_init_kwargs={"dtype": getattr(torch, dtype), **options.pop("model", {})},
        **({} if fsdp is None else {"fsdp": True, "fsdp_config": {"version": 2, **fsdp}}),
        **({} if zero3 is None else {"deepspeed": with_deepspeed.config(**zero3)}),
        **{**ALWAYS, **options},
    )
    if any(sharing.values()):
        share_prompts(instance, **sharing)
    completions = noted_completions(instance, generate, alone=trainer == "rloo")
    if differ and instance.accelerator.process_index == 1:
        tokenize_differently(instance)
    before = trained_parameters(instance.model)
    instance.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{resume}") if resume else None)
    if evaluate:
        instance.evaluate()
    logs = [
        {name: log[name] for name in log if name.removeprefix("eval_") in LOGGED} for log in instance.state.log_history
    ]
    both = [None, None]
    dist.all_gather_object(both, completions)
    after = trained_parameters(instance.model)
    return {
        "logs": [log for log in logs if log],
        "before": before,
        "after": after,
        "completions": both,
        "token_ratios": [log[RATIO] for log in instance.state.log_history if RATIO in log],
    }


def main():
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    # A process that waits in vain for the other one gives up after this time, and torchrun ends both
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    allow_fsdp_on_cpu()
    if dist.get_rank() == 0 and not (folder / "model").exists():
        build_model(folder / "model")
    dist.barrier()
    for run in runs:
        name = run.pop("name")
        result = train(folder, **run)
        if dist.get_rank() == 0:
            torch.save(result, folder / "result.part")
            (folder / "result.part").rename(folder / f"{name}.pt")  # a file of that name is whole
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    main()

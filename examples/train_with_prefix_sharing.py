"""RLOO or GRPO with prefix sharing, whole: model, data, reward, training. Runs as it is, on a CPU, too.

.venv/bin/python examples/train_with_prefix_sharing.py --compare                 in a clone, after ./setup_env.sh
python train_with_prefix_sharing.py --model Qwen/Qwen3-0.6B --k 16 --steps 20    with rloo-memory beside TRL
"""

import argparse
import logging
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONTEXT = "The town has a mill, a school and four bridges over a slow river, and meadows under water in spring. " * 8
SHAPE = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32,
)  # fmt: skip
SETTINGS = dict(
    learning_rate=1e-3, beta=0.0, max_completion_length=16, logging_steps=1, report_to="none", save_strategy="no",
    disable_tqdm=True,
)  # fmt: skip


def reward(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """One number a completion. TRL calls it by name, with lists of one entry a completion: `completions` (chats where
    prompts are chats), each column of the dataset, here `answer`, and more in `kwargs` (see docs/launch.md)."""
    return [text.count(expected) / 10 for text, expected in zip(completions, answer, strict=True)]


def small_model():
    """A Qwen3 of 4 layers with random weights, and a tokenizer that has one token a byte."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from rloo_memory.models import build_tokenizer

    tokenizer = build_tokenizer([CONTEXT], vocab_size=260)  # 256 bytes, 4 special tokens
    ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    config = Qwen3Config(vocab_size=len(tokenizer), **ids, **SHAPE)
    return AutoModelForCausalLM.from_config(config), tokenizer


def train(args: argparse.Namespace) -> None:
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # in a clone, rloo_memory is there
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # kernels that nothing here needs
    import torch
    from datasets import Dataset
    from transformers import set_seed

    import trl
    from rloo_memory import share_prompts

    cuda = torch.cuda.is_available()
    make_config, make_trainer = (getattr(trl, args.algorithm.upper() + kind) for kind in ("Config", "Trainer"))
    set_seed(0)
    model, tokenizer = (args.model, None) if args.model else small_model()
    rows = Dataset.from_list([{"prompt": f"{CONTEXT}Write the letter {x}:", "answer": x} for x in "abcdefgh"])
    batch = 2 - args.k % 2  # divides k; fewer need less memory, more are faster
    groups = dict(num_generations=args.k, per_device_train_batch_size=batch)
    groups |= dict(gradient_accumulation_steps=args.k // batch)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(folder, max_steps=args.steps, bf16=cuda, **groups, **SETTINGS)
        trainer = make_trainer(model, reward, config, train_dataset=rows, processing_class=tokenizer)
        if args.prefix_sharing:
            share_prompts(trainer)
        start = time.monotonic()
        trainer.train()
    seconds = (time.monotonic() - start) / args.steps
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux; Python and torch included
    peak, where = (torch.cuda.max_memory_allocated(), "on the GPU") if cuda else (resident, "of the whole process")
    sharing = "on" if args.prefix_sharing else "off"
    print(f"prefix sharing {sharing}: {seconds:.2f} s a step, peak {peak / 2**20:,.0f} MiB {where}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix-sharing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--algorithm", choices=("rloo", "grpo"), default="rloo")
    parser.add_argument("--model", help="a folder or a name on the hub; default: a small one with random weights")
    parser.add_argument("--k", type=int, default=8, help="completions a prompt")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compare", action="store_true", help="with and without, each in a process of its own")
    args = parser.parse_args()
    if args.k < 2 or args.steps < 1:
        parser.error(f"--k {args.k} --steps {args.steps}: it takes at least 2 completions a prompt and 1 step")
    if not args.compare:
        sys.exit(train(args))
    words = ["--algorithm", args.algorithm, "--k", str(args.k), "--steps", str(args.steps)]
    words += ["--model", args.model] if args.model else []
    for sharing in ("--no-prefix-sharing", "--prefix-sharing"):
        print(f"{sharing}: loading", flush=True)
        command, steps = [sys.executable, "-u", "-W", "ignore", __file__, *words, sharing], 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if line.startswith("{'loss'"):
                    steps += 1
                    print(f"  step {steps} of {args.steps}", flush=True)
        if process.returncode != 0:
            sys.exit(process.returncode)
        print(line, end="", flush=True)

"""A tiny teacher, built on the spot, learns to explain to a tiny student (`rloo_memory.hooks.teacher_student`).

.venv/bin/python examples/teacher_student.py --shared
"""

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rloo_memory import models
from rloo_memory.errors import ConfigError, exit_code


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithm", choices=("rloo", "grpo"), default="rloo")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--k", type=int, default=4, help="explanations a question")
    parser.add_argument("--shared", action="store_true", help="with share_prompts")
    return exit_code("teacher_student", run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    if args.steps < 1 or args.k < 2:
        raise ConfigError(f"--steps {args.steps} --k {args.k}: it takes at least 1 step and 2 explanations a question")
    import trl
    from rloo_memory import share_prompts
    from rloo_memory.hooks.teacher_student import PARTS, TeacherStudentReward, examples

    make_config, make_trainer = (getattr(trl, args.algorithm.upper() + kind) for kind in ("Config", "Trainer"))
    data = Dataset.from_list(examples())
    tokenizer = models.build_tokenizer([row["question"] + row["solution"] for row in examples()], 600)
    shape = models.shape_config("tiny-qwen3", len(tokenizer))
    shape.initializer_range = 0.2  # two models that differ
    torch.manual_seed(0)
    teacher, student = (AutoModelForCausalLM.from_config(copy.deepcopy(shape)) for _ in range(2))
    reward = TeacherStudentReward(student, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        options = make_config(
            output_dir=folder,
            max_steps=args.steps,
            num_generations=args.k,
            per_device_train_batch_size=2 * args.k,
            max_completion_length=24,
            learning_rate=1e-2,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = make_trainer(teacher, reward, options, train_dataset=data, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        reward.attach(trainer)
        if args.shared:
            share_prompts(trainer)
        trainer.train()
    for log in trainer.state.log_history[:-1]:
        parts = "".join(f"   {part} {log[f'teacher_student/{part}']:7.3f}" for part in PARTS)
        print(f"step {log['step']}   reward {log['reward']:7.3f}{parts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

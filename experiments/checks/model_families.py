"""Every model family of the pinned transformers: shared exactly, refused and why, or not tried.

    python -m experiments.checks.model_families [--write docs/models.md] [--only llama,gemma3]

A tiny random model of each causal and image-text class goes through TRL's own pass and through prefix sharing: two
prompts with three completions each, in float64. Prints a line a family. Exit code 1 if prefix sharing accepts a model
and its log-probabilities, gradients or greedy decoding are not those of whole rows, or it fails on them.
"""

import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from signal import SIGKILL

from experiments.arms import ARMS
from experiments.builds import use_fork
from experiments.checks import family_check
from experiments.checks.family_check import (
    COMPLETION,
    FAILS,
    LEFT_PADDING,
    OTHER,
    PROMPT,
    REFUSED,
    SHARED,
    TOLERANCE,
    UNTRIED,
    WRONG,
    Result,
)
from experiments.checks.tiny_families import WINDOW, Family, families
from experiments.measuring import need
from experiments.run_options import Parser
from rloo_memory.errors import ConfigError, choose, exit_code

SECONDS = 60  # for one family; most take less than one
# What people train most, by how the names begin
FIRST = (
    "qwen", "llama", "gemma", ("mistral", "ministral", "mixtral"), "phi", "gpt_oss", "deepseek", "glm", "granite",
    "nemotron", "lfm", ("olmo", "flex_olmo"), ("smollm", "smolvlm"),
)  # fmt: skip
# Tried with images, by the names of their classes with images (tests/test_shared_images.py)
WITH_IMAGES = (
    "gemma3", "gemma4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "internvl", "llava",
    "smolvlm",
)  # fmt: skip
PAGE = """# Model families

Of all models that transformers maps to causal or image-text classes,
{counts}.
Made on {made} by

    python -m experiments.checks.model_families --write docs/models.md

Each is a tiny random model: two to six layers, one of each kind that its config has, width 32, windows of {window}
tokens. Two prompts of {prompts} tokens, the second behind padding, have three completions each of up to {completion}
tokens. They go through TRL's own pass as whole rows, and through prefix sharing: all completions of a prompt together,
one at a time, two at a time with gradient checkpointing, and one a micro-batch.

* **shared**: log-probabilities and entropies, and the gradient of all parameters, are those of whole rows in float64,
  with the experts' load-balancing loss where TRL has it for the model. The relative error is below {tolerance}, and
  below the power of ten in the row. **Decoding** compares the logits of four greedy steps with those of `generate`
  without sharing. "As without a cache": `generate` computes others with its cache than without, sharing the latter.
* **refused**: `prefix_sharing=True` ends before training, with an error that says why.
* **not tried**: TRL fails on text alone without sharing as well, or the model needs a package that is not installed.
* **images**: here every prompt is text. "exact": prompts with images are shared exactly as well, and each image goes
  through the vision tower once (`tests/test_shared_images.py`). No other family was tried with images.

Where a name has two classes, TRL takes the one that the checkpoint's config names: as a rule the one with images. A
row stands for the code of a family, with the rotary embedding of its default config: a checkpoint with a dynamic one
is refused whatever its family.

## What people train most

{first}

## All others

{rest}

## Not trained on text by RLOO and GRPO

What decides is the class (`is_encoder_decoder`, `can_generate`, `output_modalities`, `main_input_name`). For attention
to later tokens it is a trial: the last token of a sequence changes the hidden states before it.

{others}
"""
COLUMNS = ("family", "class", "text", "log-probs", "gradient", "decoding", "images")


def check_all(tried: list[Family], workers: int):
    """Yields each family with its result, as they come. Each has a process of its own, and a limit on its time."""
    fork, waiting, running = multiprocessing.get_context("fork"), list(tried), {}
    while waiting or running:
        while waiting and len(running) < workers:
            answer, sent = fork.Pipe(duplex=False)
            family = waiting.pop(0)
            process = fork.Process(target=check_here, args=(family, sent))
            process.start()
            sent.close()
            running[answer] = family, process, time.monotonic() + SECONDS
        for answer in wait(list(running), timeout=1):
            family, process, _ = running.pop(answer)
            try:
                yield family, answer.recv()
            except EOFError:
                process.join()
                late = process.exitcode == -SIGKILL
                ended = f"not done after {SECONDS} seconds" if late else f"the process ended with {process.exitcode}"
                yield family, Result(FAILS, ended)
        for _, process, limit in running.values():
            if time.monotonic() > limit:
                process.kill()


def check_here(family: Family, sent) -> None:
    """In a forked process, whose output nobody reads."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sent.send(family_check.check(family))


def is_bad(result: Result) -> bool:
    return result.verdict in (WRONG, FAILS) or result.generation.startswith(("FAILS", "DIFFERS"))


def cells(family: Family, result: Result) -> tuple[str, ...]:
    """A row of the page. All but the errors is the same on each machine."""
    text = f"{result.verdict}: {result.reason}" if result.reason else result.verdict
    errors = tuple(bound(error) for error in (result.tokens, result.gradient))
    tried = "ForConditionalGeneration" in family.class_name and not set(WITH_IMAGES).isdisjoint(family.names)
    images = "exact" if tried and result.verdict == SHARED else ""
    return (", ".join(family.names), f"`{family.class_name}`", text, *errors, result.generation, images)


def bound(error: float | None) -> str:
    """The power of ten that an error lies below."""
    if error is None:
        return ""
    return f"1e{math.ceil(math.log10(error)):+03d}" if 0 < error < math.inf else str(error)


def rank(family: Family) -> tuple[int, str]:
    """Place on the page: what people train most, then by name."""
    name = family.names[0]
    return next((i for i, starts in enumerate(FIRST) if name.startswith(starts)), len(FIRST)), name


def table(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (COLUMNS, *rows)]
    return "\n".join([lines[0], "|---" * len(COLUMNS) + "|", *lines[1:]])


def page(results: list[tuple[Family, Result]]) -> str:
    """docs/models.md."""
    results = sorted(results, key=lambda pair: rank(pair[0]))
    others: dict[str, list[str]] = {}
    for family, result in results:
        if result.verdict == OTHER:
            others.setdefault(result.reason, []).append(", ".join(family.names))
    shown = [pair for pair in results if pair[1].verdict != OTHER]
    first = [cells(*pair) for pair in shown if rank(pair[0])[0] < len(FIRST)]
    rest = [cells(*pair) for pair in shown if rank(pair[0])[0] == len(FIRST)]
    versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in ("transformers", "torch", "trl"))
    return PAGE.format(
        counts=counts(results),
        made=f"{date.today():%Y-%m-%d} with {versions}",
        window=WINDOW,
        prompts=f"{PROMPT} and {PROMPT - LEFT_PADDING}",
        completion=COMPLETION,
        tolerance=f"{TOLERANCE:.0e}",
        first=table(first),
        rest=table(rest),
        others="\n".join(f"* {reason}: {'; '.join(names)}" for reason, names in sorted(others.items())),
    )


def counts(results: list[tuple[Family, Result]]) -> str:
    """How many models have which verdict; what must not be is named only where it is."""
    found = Counter(result.verdict for _, result in results)
    said = {
        SHARED: "share prompts exactly",
        REFUSED: "are refused",
        WRONG: "are shared **wrong**",
        FAILS: "**fail** when shared",
        UNTRIED: "could not be tried",
        OTHER: "are none that RLOO and GRPO train on text",
    }
    return ", ".join(f"{found[verdict]} {text}" for verdict, text in said.items() if found[verdict])


def load() -> None:
    """Import here what every family's process needs, once."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    use_fork(ARMS["shared"])
    import torch
    import transformers
    import trl.generation.shared_prefix
    import trl.trainer.utils  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m experiments.checks.model_families", description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page, such as docs/models.md")
    parser.add_argument("--only", metavar="NAME,...", help="names of families or classes")
    args = parser.parse_args(argv)
    if args.write and args.only:
        raise ConfigError("--write makes the page of all families; leave out --only")
    need("torch", "transformers", "accelerate", "datasets")
    tried = families()
    if args.only:
        names = {name for family in tried for name in (*family.names, family.class_name)}
        wanted = {choose("family", name, sorted(names)) for name in args.only.split(",")}
        tried = [family for family in tried if not wanted.isdisjoint({*family.names, family.class_name})]
    load()
    results = []
    for family, result in check_all(tried, workers=min(len(os.sched_getaffinity(0)), 8)):
        results.append((family, result))
        print(" | ".join(filter(None, cells(family, result))), flush=True)
    if args.write:
        args.write.write_text(page(results))
    bad = sorted(family.class_name for family, result in results if is_bad(result))
    if bad:
        print(f"model_families: not exact: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def main(argv: list[str] | None = None) -> int:
    return exit_code("model_families", run, argv)


if __name__ == "__main__":
    sys.exit(main())

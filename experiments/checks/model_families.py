"""Every model family of the pinned transformers: shared exactly, refused and why, or not tried.

    python -m experiments.checks.model_families [--write docs/models.md] [--only llama,gemma3]

A tiny random model of each causal and image-text class goes through TRL's own pass and through prefix sharing: two
prompts with three completions each, in float64. Prints a line a family. Exit code 1 if prefix sharing accepts a model
and its log-probabilities, gradients or greedy decoding are not those of whole rows, or it fails on them.
"""

import math
import multiprocessing
import os
import signal
import sys
import textwrap
from collections import Counter
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path

from experiments.checks import family_check
from experiments.checks.family_check import Result
from experiments.checks.tiny_families import WINDOW, Family, families
from experiments.processes import end_with
from experiments.run_options import Parser
from rloo_memory.errors import ConfigError, choose, program

SECONDS = 60  # for one family; most take less than one
# Tried with images, by the names of their classes with images (tests/test_shared_images.py)
WITH_IMAGES = (
    "gemma3", "gemma4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "internvl", "llava",
    "smolvlm",
)  # fmt: skip
PAGE = """# Model families

Of all classes that transformers maps to causal or image-text models,
{counts}.
Made on {made} by

    python -m experiments.checks.model_families --write docs/models.md

The name of a checkpoint's class is in its `config.json`, under `architectures`. Where this page has two classes of a
family, TRL takes the one that is named there, which is the one with images as a rule. A checkpoint with a dynamic
rotary embedding is refused, whatever its class.

Each class was tried as a tiny random model: two to six layers, one of each kind that its config has, width 32, windows
of {window} tokens. Two prompts of {prompts} tokens have three completions each of up to {completion} tokens. They
go through TRL's own pass as whole rows, and through prefix sharing: all completions of a prompt together, one at a
time, two at a time with gradient checkpointing, and one a micro-batch; and as whole rows, two at a time.

## Shared

Log-probabilities, entropies and the gradient of all parameters are those of whole rows in float64. The relative error
is below {tolerance}; the largest is below {worst}. The experts' load-balancing loss is included where TRL has it. The
logits of {steps} greedy steps are those of `generate` without sharing.

{shared}

`generate` computes other logits with its cache than without one in {uncached}. Sharing computes the latter.

Every prompt above is text. Prompts with images are shared exactly as well, and each image is encoded once, in
{images} (`tests/test_shared_images.py`). No other class was tried with images.

## Refused

`prefix_sharing=True` ends before training, with an error that says why:

{refused}

## Not tried

TRL fails on text alone without sharing as well, or the model needs a package that is not installed:

{untried}

## Not trained on text by RLOO and GRPO

What decides is the class (`is_encoder_decoder`, `can_generate`, `output_modalities`, `main_input_name`). For attention
to later tokens it is a trial: the last token of a sequence changes the hidden states before it. By model type:

{others}
"""


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
            running[answer] = family, process
        for answer in wait(list(running)):
            family, process = running.pop(answer)
            try:
                yield family, answer.recv()
            except EOFError:
                process.join()
                late = process.exitcode == -signal.SIGALRM
                ended = f"not done after {SECONDS} seconds" if late else f"the process ended with {process.exitcode}"
                yield family, Result(family_check.FAILS, ended)


def check_here(family: Family, sent) -> None:
    """In a forked process, whose output nobody reads."""
    end_with(multiprocessing.parent_process().pid)
    signal.alarm(SECONDS)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sent.send(family_check.check(family))


def cells(family: Family, result: Result) -> tuple[str, ...]:
    """A row of the page. All but the errors is the same on each machine."""
    text = f"{result.verdict}: {result.reason}" if result.reason else result.verdict
    errors = tuple(bound(error) for error in (result.tokens, result.gradient))
    tried = "ForConditionalGeneration" in family.class_name and not set(WITH_IMAGES).isdisjoint(family.names)
    images = "exact" if tried and result.verdict == family_check.SHARED else ""
    return (", ".join(family.names), f"`{family.class_name}`", text, *errors, result.generation, images)


def bound(error: float | None) -> str:
    """The power of ten that an error lies below."""
    if error is None:
        return ""
    return f"1e{math.ceil(math.log10(error)):+03d}" if 0 < error < math.inf else str(error)


def page(results: list[tuple[Family, Result]]) -> str:
    """docs/models.md."""
    shared = [(family, result) for family, result in results if result.verdict == family_check.SHARED]
    uncached = [family.class_name for family, result in shared if result.generation != "same"]
    pictured = [family.class_name for family, result in shared if cells(family, result)[-1]]
    versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in ("transformers", "torch", "trl"))
    text = PAGE.format(
        counts=counts(results),
        made=f"{date.today():%Y-%m-%d} with {versions}",
        window=WINDOW,
        prompts=f"{family_check.PROMPT} and {family_check.PROMPT - family_check.LEFT_PADDING}",
        completion=family_check.COMPLETION,
        steps=family_check.NEW_TOKENS,
        tolerance=f"{family_check.TOLERANCE:.0e}",
        worst=bound(max(error for _, result in shared for error in (result.tokens, result.gradient))),
        shared=listed([family.class_name for family, _ in shared]),
        uncached=listed(uncached),
        images=listed(pictured),
        refused=by_reason(results, family_check.REFUSED),
        untried=by_reason(results, family_check.UNTRIED),
        others=by_reason(results, family_check.OTHER),
    )
    return "\n".join(wrapped(line) for line in text.splitlines()) + "\n"


def wrapped(line: str) -> str:
    indent = "  " if line.startswith("*") else ""
    return textwrap.fill(line, 119, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def by_reason(results: list[tuple[Family, Result]], verdict: str) -> str:
    """A line for each reason, without what is said of a single model in brackets."""
    found: dict[str, list[str]] = {}
    for family, result in results:
        if result.verdict == verdict:
            names = family.names if verdict == family_check.OTHER else [family.class_name]
            found.setdefault(result.reason.split(" (")[0], []).extend(names)
    return "\n".join(f"* {reason}: {listed(names)}" for reason, names in sorted(found.items()))


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(set(names), key=str.lower))


def counts(results: list[tuple[Family, Result]]) -> str:
    """How many classes have which verdict; what must not be is named only where it is."""
    found = Counter(verdict for _, verdict in {(family.class_name, result.verdict) for family, result in results})
    said = {
        family_check.SHARED: "share prompts exactly",
        family_check.REFUSED: "are refused",
        family_check.WRONG: "are shared **wrong**",
        family_check.FAILS: "**fail** when shared",
        family_check.UNTRIED: "could not be tried",
        family_check.OTHER: "are none that RLOO and GRPO train on text",
    }
    return ", ".join(f"{found[verdict]} {text}" for verdict, text in said.items() if found[verdict])


def load() -> None:
    """Import here what every family's process needs, once."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers
    import trl.trainer.utils  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@program("model_families")
def main(argv: list[str] | None) -> int:
    parser = Parser("checks.model_families", __doc__, place=False)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page, such as docs/models.md")
    parser.add_argument("--only", metavar="NAME,...", help="names of families or classes")
    args = parser.parse_args(argv)
    if args.write and args.only:
        raise ConfigError("--write makes the page of all families; leave out --only")
    tried = families()
    if args.only:
        names = {name for family in tried for name in (*family.names, family.class_name)}
        wanted = {choose("family", name, sorted(names)) for name in args.only.split(",")}
        tried = [family for family in tried if not wanted.isdisjoint({*family.names, family.class_name})]
    load()
    results = []
    for family, result in check_all(tried, min(len(os.sched_getaffinity(0)), 8)):
        results.append((family, result))
        print(" | ".join(filter(None, cells(family, result))), flush=True)
    if args.write:
        args.write.write_text(page(results))
    print(counts(results))
    bad = sorted(
        family.class_name
        for family, result in results
        if result.verdict in (family_check.WRONG, family_check.FAILS)
        or result.generation.startswith(("FAILS", "DIFFERS"))
    )
    if bad:
        print(f"model_families: not exact: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

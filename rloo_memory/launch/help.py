"""The launcher's help. Standard library only, so that it is there before anything is installed."""

import dataclasses
import itertools
import textwrap
from pathlib import Path

from rloo_memory.settings.arguments import LaunchArguments, TrainerAdditions

PROFILES = Path(__file__).parents[1] / "settings" / "profiles"
TEXT = """Train with a profile, in this process, no server.

usage: [MODEL_PATH=MODEL] rloo-memory launch PROFILE [--setting value ...]

  MODEL_PATH=/models/Qwen3-8B rloo-memory launch single_gpu_24gb \\
      --dataset_name prompts.jsonl --reward_funcs rewards:short
  MODEL_PATH=random:qwen3-0.6b rloo-memory launch balanced --max_steps 2        # random weights, to try a card
  rloo-memory launch fits.yaml --model_name_or_path hub:Qwen/Qwen3-8B           # downloads it

MODEL is a folder, hub:owner/name, or random:shape; it goes before a profile's model_name_or_path. Paths are those
where you stand. PROFILE is a YAML file (with ending), or one of

{profiles}
Settings: every one of TRL's RLOOConfig (or GRPOConfig) and ModelConfig, such as --max_steps 100 --beta 0.01, and

{settings}
Dataset: one row a prompt, in the column `prompt`: text, or a chat [{{"role": "user", "content": "..."}}]. Chats
can have images, in a column `image` or, several a row, `images`. Other columns go to the reward by their names.

Reward: a file rewards.py where you stand (or on PYTHONPATH), named as --reward_funcs rewards:short:

  def short(completions, answer, **kwargs):      # texts, or chats; answer: a column, one value a completion
      return [float(str(a) in text) - len(text) / 1000 for text, a in zip(completions, answer)]

In output_dir (default trainer_output): memory.json (rloo-memory doctor OUTPUT_DIR reads it),
memory_phases.csv, checkpoints every save_steps, and at the end the model, unless --save_strategy no.
Exit code: 0 trained, 1 failed or out of memory, 2 a setting that cannot work or a training that would not fit,
130 Ctrl-C, 143 SIGTERM.
More: docs/launch.md.
"""


def profile_lines() -> dict[str, str]:
    """What each profile is for: the first sentence of its file."""
    lines = {}
    for path in sorted(PROFILES.glob("*.yaml")):
        comment = itertools.takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
        lines[path.stem] = " ".join(line[2:] for line in comment).split(". ")[0].rstrip(".")
    return lines


def text() -> str:
    settings = ""
    for field in (*dataclasses.fields(LaunchArguments), *dataclasses.fields(TrainerAdditions)):
        words = f"{field.metadata['help']} (default {field.default})"
        lines = textwrap.wrap(words, 92, break_on_hyphens=False)
        settings += f"  --{field.name:20} " + f"\n{'':25}".join(lines) + "\n"
    profiles = "".join(f"  {name:16} {line}\n" for name, line in profile_lines().items())
    return TEXT.format(profiles=profiles, settings=settings)


if __name__ == "__main__":
    print(text(), end="")

"""One update with two prompts and a reward that depends on the prompt alone. Prints the order in which the prompts
were generated for, and the gradient norm: leave-one-out must find no advantage within a group, so it must be zero."""

import json
import sys
from pathlib import Path

from experiments import config as cfg
from experiments.arms import ARMS
from experiments.builds import use_fork
from experiments.workload import run_models
from rloo_memory import data

arm, folder = sys.argv[1], Path(sys.argv[2])
use_fork(ARMS[arm])

from experiments.workload import trainers  # noqa: E402
from rloo_memory.phases import PhaseRecorder  # noqa: E402

documents = ["apple " * 200, "stone " * 200]
config = cfg.resolve(arm, 2, "test", "cpu", batch=4, steps=1, epochs=1, reward="letters", threads=1)
policy_path, reward_path, tokenizer = run_models.prepare(config, documents, cache=folder)
prompts = [data.build_prompts([document], tokenizer, 128)[0] for document in documents]
trainers.letter_reward = lambda completions: [float("apple" in text[:80]) for text in completions]  # the prompt's part
trainer, policy = trainers.build_classic(config, folder, policy_path, reward_path, tokenizer, prompts)
phases = PhaseRecorder(folder / "phases.csv", "cpu")
phases.attach(policy, trainers.torch_optimizer(trainer))
order = []
generate = policy.generate


def recording_generate(*args, **kwargs):
    order.extend("a" if "apple" in text else "b" for text in tokenizer.batch_decode(kwargs["input_ids"]))
    return generate(*args, **kwargs)


policy.generate = recording_generate
trainer.train()
print(json.dumps({"order": "".join(order), "grad_norm": phases.grad_norms[1][0]}))

import json, sys
from experiments.builds import use_fork
from experiments.config import ARMS, SCALES
from experiments.device import keep_freed_memory
from experiments.evidence.group import Group, Sizes, WAYS
from experiments.workload.models import shape_config
use_fork(ARMS["shared"])
import torch
from transformers import AutoModelForCausalLM
scale = SCALES["bench"]
torch.manual_seed(0)
for cell in sys.argv[1].split(","):
    p, c, k = map(int, cell.split("x"))
    model = AutoModelForCausalLM.from_config(shape_config(scale.shape, scale.vocab_size))
    group = Group(model, scale.vocab_size, Sizes(p, c, k))
    keep_freed_memory()
    for way in reversed(WAYS):
        group.train(way)
    for repeat in range(2):
        for way in WAYS:
            row = group.measure(way, ("score", "train"))
            print(json.dumps({"cell": cell, "way": way, "score": row["score_seconds"], "train": row["train_seconds"]}), flush=True)
    g = []

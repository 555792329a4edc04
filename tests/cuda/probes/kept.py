"""A model that is kept on the host: where its weights are while the policy generates, and while it trains. Prints
JSON."""

import json
from types import SimpleNamespace

import emulate
import torch

from rloo_memory.launch.offload import keep_on_host

device = torch.device("cuda", 0)
accelerator = SimpleNamespace(unwrap_model=lambda model: model, device=device)
trainer = SimpleNamespace(accelerator=accelerator, model=torch.nn.Linear(2, 2, device=device))
kept, some = torch.nn.Linear(1000, 1000), torch.ones(1, 2, device=device)
values, memory = kept.weight.detach().clone(), kept.weight.data_ptr()
keep_on_host(trainer, kept)
with torch.no_grad():
    scores = kept(torch.ones(1, 1000, device=device))
    trainer.model(some)  # generation
error = (scores.cpu() - values.sum(1) - kept.bias.cpu()).abs().max().item()
scoring, allocated = kept.weight.device.type, torch.cuda.memory_allocated()
emulate.reset()
trainer.model(some)
found = {"scoring": scoring, "error": error, "training": kept.weight.device.type}
found["mib_less"] = (allocated - torch.cuda.memory_allocated()) / 2**20
found["copies_to_host"] = emulate.counts()["to_host"]
found["same_memory"] = kept.weight.data_ptr() == memory and torch.equal(kept.weight, values)
print(json.dumps(found))

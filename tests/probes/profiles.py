"""Train one update with every profile, the model of MODEL_PATH in place of its own: prints what each ended with.

Only what a CPU does not have (a GPU to offload from) and what would take long is overridden."""

import json
import sys
from pathlib import Path

from rloo_memory.launch import __main__ as launch
from rloo_memory.settings import profiles

out = Path(sys.argv[1])
# A learning rate at which an update is more than bfloat16 rounds away
quick = """--max_steps=1 --max_completion_length=6 --prompt_tokens=48 --learning_rate=0.01 --logging_steps=1
--activation_offloading=false --save_strategy=no --report_to=none --disable_tqdm=true --predict_memory=false""".split()
result = {}
for name in sys.argv[2:] or profiles.names():
    folder, settings = out / name, profiles.load_profile(name)
    group = max(1, settings["num_generations"] // settings["per_device_train_batch_size"])  # micro-batches
    code = launch.main([name, *quick, f"--gradient_accumulation_steps={group}", f"--output_dir={folder}"])
    record = json.loads((folder / "memory.json").read_text())
    result[name] = {"code": code, "arguments": record["arguments"], "bits": record["weight_bits"]}
    result[name]["trained"] = record["trained_parameters"] / record["parameters"]
print(json.dumps(result))

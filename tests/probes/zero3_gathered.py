"""How much of the model ZeRO-3 has gathered at most while a step of training runs, in one process: the part of all
weights, for each case by name."""

import json
import logging
import tempfile

import one_process  # noqa: F401
import tiny
import with_deepspeed
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from peft import LoraConfig

from trl import RLOOTrainer

LAYERS = 8
SHARED = {"prefix_sharing": True}
CASES = {
    "whole rows": (False, {}),
    "shared": (False, {**SHARED, "tokens_per_forward": 1}),
    "LoRA, shared": (True, {**SHARED, "tokens_per_forward": 1}),
    "LoRA, passes of whole rows": (True, {"tokens_per_forward": 16}),
}
gathered = []


def watch(name):
    function = getattr(DeepSpeedZeRoOffload, name)

    def watched(offload, module):
        function(offload, module)
        weights = list(offload.module.parameters())
        here = sum(p.ds_numel for p in weights if p.ds_status == ZeroParamStatus.AVAILABLE)
        gathered.append(here / sum(p.ds_numel for p in weights))

    setattr(DeepSpeedZeRoOffload, name, watched)


def most_gathered(folder, lora, options):
    gathered.clear()
    # Nothing is kept because it is needed again soon
    zero = with_deepspeed.config(stage3_max_reuse_distance=0, stage3_max_live_parameters=0)
    trainer = tiny.build_trainer(
        RLOOTrainer, folder, given={"peft_config": LoraConfig(r=2, target_modules="all-linear") if lora else None},
        per_device_train_batch_size=8, beta=0.0, optim="sgd", gradient_checkpointing=True,
        deepspeed=zero, **options,
    )  # fmt: skip
    trainer.train()
    return max(gathered)


logging.disable(logging.WARNING)
for name in ("pre_sub_module_forward_function", "pre_sub_module_backward_function"):
    watch(name)
with tempfile.TemporaryDirectory() as folder:
    config = tiny.build_config()
    config.num_hidden_layers, config.layer_types = LAYERS, ["full_attention"] * LAYERS
    tiny.build_model(config).save_pretrained(folder)
    print(json.dumps({name: most_gathered(folder, *case) for name, case in CASES.items()}))

"""FSDP2 on CPU, which torch can do and accelerate offers only where there are accelerators.

    accelerate launch --config_file FILE tests/probes/fsdp_on_cpu.py PROFILE [--setting value ...]

is the launcher with that. Which models are sharded goes to OUTPUT_DIR/sharding.json.
"""

import json
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import Trainer


def allow_fsdp_on_cpu():
    initialize = AcceleratorState.__init__

    def initialize_with_plugin(self, *args, fsdp_plugin=None, **kwargs):
        initialize(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
                fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # only an accelerator can pin memory
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = initialize_with_plugin


def record_sharding():
    train = Trainer.train

    def train_and_record(trainer, *args, **kwargs):
        result = train(trainer, *args, **kwargs)
        if trainer.is_world_process_zero():
            models = {"policy": trainer.model, "reference": trainer.ref_model}
            record = {name: all(isinstance(p, DTensor) for p in model.parameters()) for name, model in models.items()}
            Path(trainer.args.output_dir, "sharding.json").write_text(json.dumps(record))
        return result

    Trainer.train = train_and_record


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    record_sharding()
    from rloo_memory.launch.__main__ import main

    sys.exit(main())

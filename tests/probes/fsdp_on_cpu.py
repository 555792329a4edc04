"""FSDP2 on CPU, which torch can do and accelerate offers only where there are accelerators.

    accelerate launch --config_file FILE tests/probes/fsdp_on_cpu.py PROFILE [--setting value ...]

is the launcher with that. How it sharded the models goes to OUTPUT_DIR/sharding.json.
"""

import json
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
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


def sharding(model) -> dict[str, str]:
    """The offload policy of each sharded parameter, by name. What torch keeps of it is not public."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    return {p._param_fqn: type(group.offload_policy).__name__ for group in groups for p in group.fsdp_params}


def record_sharding():
    train = Trainer.train

    def train_and_record(trainer, *args, **kwargs):
        result = train(trainer, *args, **kwargs)
        if trainer.is_world_process_zero():
            models = {"policy": trainer.model, "reference": trainer.ref_model}
            record = {name: sharding(model) for name, model in models.items() if model is not None}
            Path(trainer.args.output_dir, "sharding.json").write_text(json.dumps(record, indent=1))
        return result

    Trainer.train = train_and_record


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    record_sharding()
    from rloo_memory.launch.__main__ import main

    sys.exit(main())

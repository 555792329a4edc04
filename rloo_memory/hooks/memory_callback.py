"""Memory in the training log of any TRL trainer, so that trackers show it, and a record that the doctor reads.

trainer = RLOOTrainer(...)
trainer.add_callback(MemoryCallback(trainer))
"""

import json
from dataclasses import fields
from pathlib import Path

import torch
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy

import trl
from rloo_memory import host_allocator
from rloo_memory.adapters import lora_settings
from rloo_memory.device import cpu_name, machine_name, status_bytes
from rloo_memory.phases import PhaseRecorder
from rloo_memory.plan.setups import SAME_NAME
from rloo_memory.plan.trl_settings import ALGORITHMS, config_class
from rloo_memory.storage import write_json

MB = 2**20
# Of a config, by how their names begin: where a training runs, what it shows, evaluates and puts where. The rest makes
# a profile that trains the same. `steps_per_generation` says the batch, `gradient_checkpointing` its newer names
NOT_TRAINED_WITH = (
    "output_dir", "resume_from_checkpoint", "logging_", "log_", "report_to", "run_name", "project", "trackio_",
    "disable_tqdm", "debug", "include_", "hub_", "push_to_hub", "fsdp", "deepspeed", "accelerator_config", "ddp_",
    "local_rank", "dataloader_pin_memory", "do_", "eval_", "per_device_eval_", "num_generations_eval", "load_best_",
    "metric_for_best_", "greater_is_better", "generation_batch_size", "activation_checkpointing",
)  # fmt: skip
OF_A_LOADED_MODEL = ("dtype", "quantization_config", "device_map")  # of `model_init_kwargs`


def size_of(weight) -> int:
    """Number of elements. Where ZeRO-3 has divided a weight, torch counts none."""
    return getattr(weight, "ds_numel", weight.numel())


def trained_settings(args, model) -> dict:
    """The trainer's settings under the names of TRL's parser, as a profile would have them: those that decide memory,
    and what else is not as TRL has it; adapters and quantization as they are in the model."""
    trainer = config_class(args)
    usual = {field.name: field.default for field in fields(trainer)} if trainer else {}
    # A profile with vLLM's is refused without it
    left_out = NOT_TRAINED_WITH if getattr(args, "use_vllm", False) else (*NOT_TRAINED_WITH, "vllm_")
    settings = {"algorithm": ALGORITHMS[trainer.__name__]} if trainer else {}
    for name in dict.fromkeys((*SAME_NAME, *usual)):
        value = getattr(args, name, None)
        value = getattr(value, "value", value)  # of an enum, its text
        if name == "model_init_kwargs" and value:
            value = {key: x for key, x in value.items() if key not in OF_A_LOADED_MODEL} or None
        if not name.startswith(left_out) and (name in SAME_NAME or value != usual[name]):
            settings[name] = value
    settings["dtype"] = str(model.dtype).removeprefix("torch.")
    for adapter in list(getattr(model, "peft_config", {}).values())[:1]:
        settings |= lora_settings(vars(adapter))
        if getattr(args, "disable_dropout", False):
            settings["lora_dropout"] = 0.0
    quantization = getattr(model.config, "quantization_config", None)
    if getattr(model, "is_loaded_in_4bit", False):
        settings |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quantization.bnb_4bit_quant_type,
            "use_bnb_nested_quant": quantization.bnb_4bit_use_double_quant,
        }
    elif getattr(model, "is_loaded_in_8bit", False):
        settings["load_in_8bit"] = True
    return {name: value for name, value in settings.items() if value is not None}


def in_json(value) -> bool:
    """Whether JSON has words for it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def own_file(args, name: str) -> Path:
    """The file `name` of this process in the output folder: x.json of the first process, x.1.json of the next."""
    path = Path(args.output_dir, name)
    return path.with_suffix(f".{args.process_index}{path.suffix}") if args.process_index else path


class MemoryCallback(transformers.TrainerCallback):
    """Writes to TRL's metrics, each step:

    * `mem_alloc_mb`, `mem_reserved_mb`: what torch has allocated and reserved on the device after the step, MiB;
    * `mem_max_alloc_mb`: the step's peak, and `mem_peak/<phase>_mb` that of each phase (generate, score, train,
      optimizer);
    * `mem_batch_share`: the part of the step's peak that is neither weights nor gradients nor optimizer state. It
      grows with the number of completions, their length and the prompt's;
    * `mem_alloc_retries`: how often the allocator had to free its cache and try again since the training began.

    Without CUDA the sizes are resident memory of the process. There is nothing reserved, no retry, and no share of the
    batch: what is resident before the optimizer's step is more than weights, gradients and optimizer state.

    Of several processes each writes its own files, memory.json the first and memory.1.json the next; the log shows
    the first one's sizes.

    Args:
        trainer: an RLOO or GRPO trainer.
        snapshot: "peak" or "oom": dump torch's memory snapshot to `output_dir/memory_snapshot.pickle` when a step
            reaches a new peak, or when memory runs out. For https://docs.pytorch.org/memory_viz. Needs CUDA.
        of_launcher: for the record, what the launcher knows beside the trainer: `settings`, such as where the model
            and the data came from; `predicted_peaks`, bytes by phase, and the `predicted_prompt_tokens` that they are
            for; `images`, width and height in pixels of each image of a prompt, as the processor scales it;
            `start_bytes`, `rloo_memory.device.level` before the model was loaded.
    """

    def __init__(self, trainer, snapshot: str | None = None, of_launcher: dict | None = None):
        if snapshot not in (None, "peak", "oom"):
            raise ValueError(f"snapshot is {snapshot!r}; it must be 'peak', 'oom' or None")
        self.cuda = torch.cuda.is_available() and trainer.accelerator.device.type == "cuda"
        self.kind = "cuda" if self.cuda else "cpu"
        if snapshot and not self.cuda:
            raise ValueError(f"snapshot={snapshot!r} needs CUDA, training is on {trainer.accelerator.device}")
        self.trainer, self.snapshot, self.of_launcher = trainer, snapshot, of_launcher or {}
        self.phases: PhaseRecorder | None = None

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if self.phases is not None:  # of a training before this one
            self.phases.detach()
        self.seen = 0  # rows of `phases` that were logged
        self.peaks: dict[str, int] = {}  # those of the highest step, bytes
        self.completion_tokens = 0  # the longest completion, where the trainer tells
        self.lengths = None  # longest completion and prompt when memory.json was last written
        self.out_of_memory: str | None = None  # the phase that memory ran out in
        self.static = 0  # weights, gradients and optimizer state, seen before the optimizer's step
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        resumed = state.global_step > 0
        for name in ("memory.json", "memory_phases.csv", "memory_snapshot.pickle"):
            file = own_file(args, name)
            if not resumed or file.is_symlink():  # of an earlier training, or another place's
                file.unlink(missing_ok=True)
        self.phases = PhaseRecorder(own_file(args, "memory_phases.csv"), self.kind, go_on=resumed)
        if resumed and own_file(args, "memory.json").exists():
            before = json.loads(own_file(args, "memory.json").read_text())
            self.peaks, self.completion_tokens = before["peaks"], before.get("completion_tokens") or 0
            self.phases.prompt_tokens += filter(None, [before.get("prompt_tokens")])
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        while hasattr(optimizer, "optimizer"):  # accelerate's around DeepSpeed's around torch's
            optimizer = optimizer.optimizer
        self.phases.attach(policy, optimizer)
        # Other engines than the policy's own `generate` take lists of token ids
        if hasattr(policy, "generate_batch"):  # continuous batching
            self.phases.mark(policy, "generate_batch", lambda inputs, **kwargs: map(len, inputs))
        if (engine := getattr(self.trainer, "vllm_generation", None)) is not None:
            self.phases.mark(engine, "generate", lambda prompts, **kwargs: map(len, prompts))
        if self.snapshot:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        if self.snapshot == "oom":
            path = str(own_file(args, "memory_snapshot.pickle"))
            torch._C._cuda_attach_out_of_memory_observer(lambda *args: torch.cuda.memory._dump_snapshot(path))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.static = self._now()[0]

    def on_step_end(self, args, state, control, **kwargs):
        self.phases.close()
        self.phases.high_water.reset()
        peaks = self._peaks_of_step()
        if not peaks:
            return
        highest = max(peaks.values())
        allocated, reserved = self._now()
        metrics = {
            "mem_alloc_mb": allocated / MB,
            "mem_max_alloc_mb": highest / MB,
            **{f"mem_peak/{phase}_mb": size / MB for phase, size in peaks.items()},
        }
        if self.cuda:
            metrics["mem_batch_share"] = max(0.0, 1 - self.static / highest)
            metrics["mem_reserved_mb"] = reserved / MB
            metrics["mem_alloc_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)
        made = self.trainer._metrics["train"].get("completions/max_length") or [0]
        self.completion_tokens = max(self.completion_tokens, round(max(made)))
        lengths = (self.completion_tokens, max(self.phases.prompt_tokens, default=None))
        longer, self.lengths = lengths != self.lengths, lengths
        if higher := highest > max(self.peaks.values(), default=0):
            self.peaks = peaks
        if higher or longer:
            self._record()
        if higher and self.snapshot == "peak":
            torch.cuda.memory._dump_snapshot(str(own_file(args, "memory_snapshot.pickle")))

    def failed(self) -> str:
        """Record a step that memory ran out in, as far as it came. Returns the phase."""
        if self.phases is None:
            return "load"
        phase = self.phases.phase
        self.phases.close()
        peaks = self._peaks_of_step()
        if max(peaks.values(), default=0) > max(self.peaks.values(), default=0):
            self.peaks = peaks
        self.out_of_memory = phase
        if self.peaks:
            self._record()
        return phase

    def _peaks_of_step(self) -> dict[str, int]:
        """The highest level of each phase since the last call, bytes."""
        peaks: dict[str, int] = {}
        for peak in self.phases.peaks[self.seen :]:
            size = peak.peak_allocated_bytes if self.cuda else peak.peak_resident_bytes
            if size is not None:
                peaks[peak.phase] = max(peaks.get(peak.phase, 0), size)
        self.seen = len(self.phases.peaks)
        peaks.pop("load", None)
        return peaks

    def _record(self) -> None:
        """memory.json: what the doctor needs to explain the highest peak so far, and what a calibration needs."""
        args, model = self.trainer.args, self.trainer.accelerator.unwrap_model(self.trainer.model)
        sharing = getattr(self.trainer, "prompt_sharing", None)  # of `rloo_memory.share_prompts`
        more = (sharing.settings if sharing else {}) | self.of_launcher.get("settings", {})
        settings = trained_settings(args, model) | {name: value for name, value in more.items() if value is not None}
        recorded = {name: value for name, value in settings.items() if in_json(value)}
        trained = sum(size_of(p) for p in model.parameters() if p.requires_grad)
        sharding = getattr(self.trainer.accelerator.state, "fsdp_plugin", None)
        deepspeed = self.trainer.accelerator.state.deepspeed_plugin
        zero = deepspeed.deepspeed_config["zero_optimization"] if deepspeed else {}
        rewards = getattr(self.trainer, "reward_funcs", [])  # trainers of other kinds have none
        reward_models = [reward for reward in rewards if isinstance(reward, transformers.PreTrainedModel)]
        name = torch.cuda.get_device_name() if self.cuda else cpu_name()
        versions = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
        devices = {
            "num_devices": args.world_size,
            "fully_sharded": sharding is not None,
            "zero_stage": zero.get("stage", 0),
            "offload_parameters": isinstance(getattr(sharding, "cpu_offload", None), CPUOffloadPolicy)
            or zero.get("offload_param", {}).get("device") == "cpu",
            "offload_optimizer": zero.get("offload_optimizer", {}).get("device") == "cpu",
        }
        write_json(
            own_file(args, "memory.json"),
            {
                "device_kind": self.kind,
                "machine": machine_name(self.kind, name),
                "device_name": name,
                "versions": versions,
                "host_allocator": "+".join(host_allocator.mapped()) or "system",
                "device_bytes": torch.cuda.mem_get_info()[1] if self.cuda else None,
                "peaks": self.peaks,
                "out_of_memory": self.out_of_memory,
                "prompt_tokens": max(self.phases.prompt_tokens, default=None),
                "completion_tokens": self.completion_tokens or None,
                "trained_parameters": trained,
                "parameters": sum(map(size_of, model.parameters())),
                "model_config": model.config.to_dict(),
                "reward_model": reward_models[0].config.name_or_path if reward_models else None,
                "devices": devices,
                **self.of_launcher,
                "settings": recorded,
                "not_recorded": [name for name in settings if name not in recorded],
            },
        )

    def _now(self) -> tuple[int, int]:
        if self.cuda:
            return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return status_bytes("VmRSS"), 0

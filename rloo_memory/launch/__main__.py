"""Train with a profile, in this process, no server: `rloo-memory launch PROFILE [--setting value ...]`.

    accelerate launch --config_file rloo_memory/settings/accelerate/fsdp2.yaml -m rloo_memory.launch multi_gpu_70b

TRL's parser reads the profile and what follows it, TRL's trainer trains; `--help` lists profiles, the launcher's own
settings, formats and outputs.
"""

import dataclasses
import os
import shlex
import signal
import sys
import time

from rloo_memory import cuda_check, host_allocator
from rloo_memory.adapters import adapter_of
from rloo_memory.device import is_out_of_memory, level, settle, show_one_gpu
from rloo_memory.errors import ConfigError, Stopped, exit_code, leave
from rloo_memory.launch import command_line, dataset, gate, output, policy, prompt_images, quiet, rewards, vllm_server
from rloo_memory.launch.announce import print_end, print_start
from rloo_memory.launch.help import text as help_text
from rloo_memory.launch.offload import keep_on_host
from rloo_memory.models import one_line


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(help_text(), end="")
        return 0
    # Several are ended by the program that started them, which waits for none that is in a collective
    if not one_of_several():
        signal.signal(signal.SIGTERM, stop)
    try:
        code = exit_code("launch", run, argv)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"launch: {one_line(error)}", file=sys.stderr)
        code = 1
    if one_of_several():
        leave(code)
    return code


def one_of_several() -> bool:
    """Whether this process was started with others that train with it."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def stop(number, frame):
    raise Stopped(number)


def run(argv: list[str]) -> int:
    host_allocator.activate(command_line.host_allocator(argv), restart=sys.argv[-len(argv) :] == argv)
    # one write: the workers' lines would mix
    print(f"host allocator: {', '.join(host_allocator.mapped().values()) or 'system'}\n", end="", flush=True)
    if not one_of_several() and (line := show_one_gpu()):
        print(f"gpus    {line}", flush=True)
    # torch would send attention to cuDNN on recent GPUs, which plans each length anew, so each decoded token
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less fragmentation on CUDA
    quiet.before_import()
    launch, config, model = command_line.parse(argv)
    quiet.after_import()
    rows = dataset.load(launch)
    policy.check(model.model_name_or_path, model.model_revision)
    reward_funcs = rewards.rewards_of(launch, ["prompt"] if rows is None else rows.column_names)
    check_gpu(config, model)
    with output.taken(config) as (checkpoint, finished):
        if not finished:
            train_in_folder(argv, launch, config, model, rows, reward_funcs, checkpoint)
        elif config.process_index == 0:
            print(finished)
        output.end_together()
    return 0


def check_gpu(config, model) -> None:
    """Say it where a GPU stays unused. Raises `ConfigError` where TRL cannot train on it as it is asked to."""
    if config.device.type == "cuda":
        in_bf16 = "bfloat16" in (model.dtype, str((config.model_init_kwargs or {}).get("dtype")))
        half = " --dtype float16" if in_bf16 else ""
        cuda_check.check(config.bf16 or in_bf16, f"--bf16 false --fp16 true{half}")
    elif config.process_index == 0 and (why := cuda_check.unused_gpu()):
        print(f"device  the CPU: {why}", flush=True)


def train_in_folder(argv, launch, config, model, rows, reward_funcs: list, checkpoint: str | None) -> None:
    """Read the model's files, check what it is given, predict, and train."""
    from rloo_memory.hooks.memory_callback import MemoryCallback

    images, named = rows and prompt_images.column_of(rows), model.model_name_or_path
    if config.world_size > 1:  # TRL would wait for the images of a process whose rows have none
        config.log_multimodal = False
    with config.main_process_first():  # it writes or downloads, the others find it
        found = policy.load(named, config, with_images=bool(images))
        if rows is None:
            rows = dataset.builtin_prompts(found.tokenizer, launch.prompt_tokens)
    vllm_server.check(config, found.path, found.tokenizer)
    quantization = policy.quantization_of(found.hf_config, model)
    policy.check_modules(model, config, found.hf_config)
    with dataset.naming_the_dataset(launch.dataset_name):
        dataset.check_enough(rows, config)
        options = config.chat_template_kwargs or {}
        lengths = dataset.measure(rows, found.tokenizer, options, launch.max_prompt_tokens, images)
    source = named if named.startswith("hub:") or adapter_of(named) else found.path
    predicted = {}
    if launch.predict_memory:
        asked = (command_line.split(argv)[0], launch, config, model, source, found.hf_config, lengths)
        predicted = output.decided_once(config, lambda: gate.peaks_that_fit(*asked))
    settle()
    start = level(config.device.type)
    trainer = build_trainer(launch, config, model, found, quantization, rows, reward_funcs)
    if trainer.is_world_process_zero():
        print_start(launch, model, trainer, lengths, rewards.in_words(launch, reward_funcs))
    memory = MemoryCallback(
        trainer,
        snapshot=launch.memory_snapshot,
        of_launcher={
            "settings": {"model_name_or_path": named, **dataclasses.asdict(launch)},
            "predicted_peaks": predicted,
            "predicted_prompt_tokens": lengths.longest if predicted else None,
            "images": lengths.images,
            "start_bytes": start,
        },
    )
    train(trainer, memory, checkpoint)


def build_trainer(launch, config, model, found: policy.Policy, quantization, rows, reward_funcs: list):
    """The trainer, with the models that wait on the host. Raises `ConfigError` for what TRL or `add_to` refuses."""
    from rloo_memory.launch.additions import add_to
    from trl import GRPOTrainer, RLOOTrainer, get_peft_config

    config.model_init_kwargs = {"dtype": model.dtype, **(config.model_init_kwargs or {})}
    if model.attn_implementation:
        config.model_init_kwargs["attn_implementation"] = model.attn_implementation
    if config.world_size > 1:  # with FSDP, TRL would have every process spread a whole reference over all GPUs
        config.model_init_kwargs.setdefault("device_map", None)
    adapter = adapter_of(model.model_name_or_path)
    try:
        trained = found.path
        if adapter:
            trained = policy.with_adapter(adapter.folder, found.path, config, quantization, model.lora_dropout)
        trainer = (RLOOTrainer if launch.algorithm == "rloo" else GRPOTrainer)(
            model=trained,
            reward_funcs=reward_funcs,
            args=config,
            train_dataset=rows,
            processing_class=found.tokenizer,
            peft_config=None if adapter else get_peft_config(model),
            quantization_config=None if adapter else quantization,
        )
        add_to(trainer)
    except Exception as error:  # weights that are cut, a package that is not here, modules that no layer has
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"cannot train {found.path!r}: {said(error)}") from error
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
        raise ConfigError("without a GPU accelerate would train with DDP in place of FSDP; use ddp.yaml")
    if launch.offload_reference:
        keep_on_host(trainer, trainer.ref_model)
    if launch.offload_reward:
        keep_on_host(trainer, trainer.reward_funcs[0])
    rewards.check_first_rewards(trainer)
    return trainer


def train(trainer, memory, checkpoint: str | None) -> None:
    """Train and save; says what came out of it."""
    from rloo_memory.launch.callbacks import Finite, LearningRate

    began = time.monotonic()
    if checkpoint and trainer.is_world_process_zero():
        print(f"begins  from {checkpoint}", flush=True)
    trainer.add_callback(memory)
    trainer.add_callback(Finite(trainer, lambda: memory.phases.grad_norms))
    trainer.add_callback(LearningRate())
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.args.save_strategy != "no":
            if trainer.is_fsdp_enabled:  # checkpoints are shards; of shards alone, `save_model` would save nothing
                trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
            trainer.save_model(trainer.args.output_dir)
    except Exception as error:
        if isinstance(error, ConfigError) or (ended := what_ended(error, trainer, memory, checkpoint)) is None:
            raise
        raise ended from error
    if trainer.is_world_process_zero():
        print_end(trainer, memory, time.monotonic() - began)


def what_ended(error: Exception, trainer, memory, checkpoint: str | None) -> Exception | None:
    """What failed a training, with a remedy; None if nothing is known of it."""
    config, update = trainer.args, trainer.state.global_step + 1
    folder = config.output_dir
    if is_out_of_memory(error):
        return MemoryError(
            f"out of memory in phase {memory.failed()} of update {update} (rloo-memory doctor {shlex.quote(folder)} "
            f"says what filled it): {error}"
        )
    if (url := vllm_server.url_of(config)) and not vllm_server.answers(url):
        server = f"the vLLM server at {url}"
        return ConfigError(f"{server} stopped answering in update {update}; start it and {output.going_on(config)}")
    if output.is_full(error):
        return ConfigError(
            f"cannot write to {folder} in update {update}: {one_line(error)}; make room, or save less "
            f"(save_total_limit, save_only_model), and {output.going_on(config)}"
        )
    if "probability tensor contains" in str(error):
        return ConfigError(
            f"the model's logits are not finite in update {update}, so nothing can be sampled: look at its weights, "
            "and compute in a dtype with more range (bfloat16, float32)"
        )
    if memory.phases is None:  # the optimizer, the schedule, the checkpoint
        return ConfigError(f"cannot go on from {checkpoint}: {said(error)}" if checkpoint else said(error))
    return None


def said(error: Exception) -> str:
    """An error of a library in one line."""
    if "weights_only" in str(error):  # torch advises to run what the file says
        return (
            "a file of it is a pickle of more than tensors, which could run code; take one that is as it was written"
        )
    return " ".join(str(error).split()) if isinstance(error, ValueError) else one_line(error)


if __name__ == "__main__":
    sys.exit(main())

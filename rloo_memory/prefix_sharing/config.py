"""What RLOO and GRPO cannot do where rows go through the model in passes."""

import importlib.metadata

import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_peft_model
from packaging.version import Version


def check_tokens_per_forward(tokens) -> None:
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ValueError(
            f"tokens_per_forward ({tokens}) must be a whole number of at least 1, or `None` for no bound. The "
            "longest row of prompt and completion is a good value to start from."
        )


def check_passes_config(config) -> None:
    """
    Raise a `ValueError` if arguments of a trainer with `tokens_per_forward` or `prefix_sharing` exclude each other,
    and an `ImportError` if transformers is too old.
    """
    check_tokens_per_forward(config.tokens_per_forward)
    option = "tokens_per_forward" if config.tokens_per_forward is not None else "prefix_sharing"
    minimum = "5.13.0" if config.prefix_sharing else "5.6.0"  # what caches have had since
    if Version(transformers.__version__) < Version(minimum):
        raise ImportError(
            f"`{option}` requires transformers version {minimum} or higher, but {transformers.__version__} is "
            "installed. Please upgrade transformers with `pip install --upgrade transformers`."
        )
    _check_checkpointing(config, option)
    if config.neftune_noise_alpha is not None:
        raise ValueError(
            f"`{option}` does not support `neftune_noise_alpha`, whose noise depends on the tokens that go "
            "through the model together. Disable one of them."
        )
    if config.torch_compile:
        raise ValueError(
            f"`{option}` does not support `torch_compile=True`, which compiles the whole model. Remove it, and "
            "compile the layers before prompts are shared: `for layer in model.model.layers: layer.compile()`."
        )
    trl = importlib.metadata.version("trl")
    if config.use_liger_kernel and Version(trl) < Version("1.15"):
        raise ValueError(
            f"`{option}` takes Liger's layers, but with `use_liger_kernel=True` TRL {trl} computes the loss past the "
            "model's log-probabilities. Upgrade TRL to 1.15 or newer."
        )
    if config.pad_to_multiple_of is not None:
        raise ValueError(
            f"`{option}` puts rows together without the padding that `pad_to_multiple_of` "
            f"({config.pad_to_multiple_of}) asks for. Remove one of them."
        )

    if config.prefix_sharing:
        _check_groups(config)


def _check_checkpointing(config, option: str) -> None:
    checkpointing_kwargs = config.gradient_checkpointing_kwargs
    if (
        config.gradient_checkpointing
        and checkpointing_kwargs is not None
        # By themselves, these two leave the kind to transformers, which takes the non-reentrant one
        and (not checkpointing_kwargs or checkpointing_kwargs.keys() - {"every_n_layers", "offload"})
        and checkpointing_kwargs.get("use_reentrant") is not False
    ):
        raise ValueError(
            f"`{option}` needs non-reentrant gradient checkpointing, and `gradient_checkpointing_kwargs` "
            f"({checkpointing_kwargs}) that do not say so get the reentrant one, which would cut the gradient "
            "of what is computed once. Add `'use_reentrant': False`."
        )


def _check_groups(config) -> None:
    # A prompt is shared by the completions of a micro-batch, or by several micro-batches of an update
    batch_size = config.per_device_train_batch_size
    if batch_size % config.num_generations != 0 and config.num_generations % batch_size != 0:
        raise ValueError(
            f"With `prefix_sharing=True`, per_device_train_batch_size ({batch_size}) must be a multiple or a "
            f"divisor of num_generations ({config.num_generations})."
        )
    if batch_size * config.gradient_accumulation_steps % config.num_generations != 0:
        raise ValueError(
            f"With `prefix_sharing=True`, per_device_train_batch_size ({batch_size}) times "
            f"gradient_accumulation_steps ({config.gradient_accumulation_steps}) must be a multiple of "
            f"num_generations ({config.num_generations}), so that all completions of a prompt are in one update."
        )
    if batch_size * config.steps_per_generation % config.num_generations != 0:
        raise ValueError(
            f"With `prefix_sharing=True`, per_device_train_batch_size ({batch_size}) times "
            f"steps_per_generation ({config.steps_per_generation}) must be a multiple of num_generations "
            f"({config.num_generations}), so that all completions of a prompt are on one device."
        )
    if config.accelerator_config.split_batches and config.world_size > 1:
        raise ValueError(
            f"`prefix_sharing=True` does not support `split_batches=True` with {config.world_size} processes, "
            "which would divide the completions of a prompt. Set it to `False`, and "
            "`per_device_train_batch_size` to what one process gets."
        )
    if config.ddp_static_graph and batch_size < config.num_generations:
        raise ValueError(
            f"With `prefix_sharing=True` and per_device_train_batch_size ({batch_size}) below num_generations "
            f"({config.num_generations}), gradients are accumulated, which DDP does not do with "
            "`ddp_static_graph=True`. Disable it."
        )


def check_processes(config, accelerator: Accelerator, model, takes_images: bool) -> None:
    """Raise a `ValueError` if rows cannot go through `model` in passes on these processes, or not with images."""
    option = "prefix_sharing=True" if config.prefix_sharing else f"tokens_per_forward={config.tokens_per_forward}"
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            f"`{option}` runs the layers several times in a forward, which is not tested with FSDP1. Use FSDP2 or "
            "DeepSpeed."
        )
    # Passes need the non-reentrant checkpointing, which frozen weights take from DeepSpeed 0.19.3 on
    deepspeed = accelerator.state.deepspeed_plugin
    is_zero3 = deepspeed is not None and deepspeed.zero_stage == 3
    if is_zero3 and is_peft_model(model) and config.gradient_checkpointing:
        version = importlib.metadata.version("deepspeed")
        if Version(version) < Version("0.19.3"):
            raise ValueError(
                f"`{option}` with PEFT, DeepSpeed ZeRO-3 and gradient checkpointing needs `deepspeed>=0.19.3`, "
                f"found {version}. Upgrade DeepSpeed, or set `gradient_checkpointing=False`."
            )
    if takes_images and not config.prefix_sharing:
        raise ValueError(
            f"`{option}` divides rows of text and supports images only with `prefix_sharing=True`. Lower "
            "`per_device_train_batch_size` instead."
        )

"""What several devices change about a prediction: formulas over the simulated sizes of one device.

* DDP keeps one more copy of the gradients, in its buckets (`gradient_as_bucket_view` in the documentation of
  `torch.nn.parallel.DistributedDataParallel`).
* FSDP2 with `reshard_after_forward` keeps a shard of weights, gradients, optimizer state and reference on each device
  (`torch.distributed.fsdp.fully_shard`; arXiv 2304.11277, section 3). While it computes, one layer is gathered, the
  next is on its way, and what belongs to no layer (embedding, head, last norm) is gathered, too; in a backward the
  gradients of one layer and of those weights are whole. With offloading, shards are on the host.
* With FSDP2 and mixed precision, shards are float32 where weights are trained (accelerate's `fsdp2_prepare_model`),
  and what is gathered and computed is in half precision (its `MixedPrecisionPolicy`). So it is simulated in that, and
  the shards are widened.
* DeepSpeed brings the whole model to half precision, without autocast, and trains shards of float32 (arXiv 1910.02054,
  section 5; `estimate_zero2_model_states_mem_needs` and `estimate_zero3_...` in DeepSpeed 0.19). Bytes of a weight on
  N devices: 2 for itself, 12 / N for its float32 and Adam's moments, 2 / N for its gradient, and while the optimizer
  steps 4 / N for that in float32. ZeRO-2 keeps the 2 bytes whole, and the reference too (TRL's `prepare_deepspeed`);
  ZeRO-3 keeps 2 / N of both. Beside that, in DeepSpeed's defaults, a bucket of 5e8 gradients (`reduce_bucket_size`:
  ZeRO-2 in a backward, ZeRO-3 always), and with ZeRO-3 up to 1e9 gathered weights (`stage3_max_live_parameters`) and
  the gradient of the largest one. While it generates, TRL gathers all (`ds3_gather_for_generation`).
"""

from dataclasses import replace

from rloo_memory.models import meta_model
from rloo_memory.plan.simulation.building import decoder_layers

SHARDED = ("parameters", "reference", "gradients", "optimizer state")


BUCKET, LIVE, SUB_GROUP = 500_000_000, 1_000_000_000, 1_000_000_000  # weights, by DeepSpeed's defaults


def weights_by_place(hf_config) -> tuple[int, int, int]:
    """Numbers of weights: of the largest layer, of all that belongs to no layer, and of the largest single one."""
    model = meta_model(hf_config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    each = [p.numel() for p in model.parameters()]
    return max(layers), sum(each) - sum(layers), max(each)


def as_computed(setup):
    """The setup in the dtype that a device computes in. DeepSpeed computes without autocast."""
    dtype = setup.autocast if setup.fully_sharded or setup.zero_stage else None
    half = replace(setup, dtype=dtype, reference_dtype=None) if dtype else setup
    return replace(half, bf16=False, fp16=False) if setup.zero_stage else half


def widened(setup, kind: str) -> int:
    """Times as large as simulated, `as_computed`, a shard of that kind is."""
    if not setup.keeps_float32 or kind == "optimizer state" and setup.optimizer_bytes_per_weight is not None:
        return 1
    trained = kind != "reference" and not setup.lora_rank
    dtype = setup.reference_dtype or setup.dtype if kind == "reference" else setup.dtype
    loaded = kind in ("parameters", "reference") and dtype == "float32"
    return 2 if trained or loaded else 1


def spread(setup, weights: tuple | None, gradients: int, phase: str, kinds: dict[str, int]) -> dict[str, int]:
    """`kinds`, bytes of one device that does everything, as they are on each of `setup.num_devices`. `weights` as
    `weights_by_place` counts them, which only sharding needs; `gradients` are the bytes of all gradients."""
    kinds = dict(kinds)
    if setup.device == "cpu":  # which is the host
        setup = replace(setup, offload_parameters=False, offload_optimizer=False)
    if setup.zero_stage:
        return with_zero(setup, weights, gradients, phase, kinds)
    if setup.fully_sharded:
        return fully_sharded(setup, weights, phase, kinds)
    if setup.num_devices > 1 and phase != "load":  # DDP's buckets are made with the trainer and stay
        add(kinds, "other", gradients)
    return kinds


def add(kinds: dict[str, int], kind: str, size: int, on_host: bool = False) -> None:
    kind = "host" if on_host else kind
    kinds[kind] = kinds.get(kind, 0) + size


def fully_sharded(setup, weights: tuple, phase: str, kinds: dict[str, int]) -> dict[str, int]:
    # What the optimizer computes with is as large as its shards
    step = ("activations",) if phase == "optimizer" else ()
    for kind in (*SHARDED, *step):
        shard = -(-kinds.pop(kind, 0) * widened(setup, kind) // setup.num_devices)
        add(kinds, kind, shard, setup.offload_parameters)
    if phase in ("generate", "score", "train"):
        size, (layer, rest, _) = bytes_computed(setup), weights
        add(kinds, "parameters", (2 * layer + rest) * size)
        if phase == "train" and not setup.lora_rank:
            add(kinds, "gradients", (layer + rest) * size)
    return kinds


def bytes_computed(setup) -> int:
    """Of a weight in what a device computes with."""
    return 2 if setup.autocast or setup.dtype != "float32" else 4


def with_zero(setup, weights: tuple, gradients: int, phase: str, kinds: dict[str, int]) -> dict[str, int]:
    devices, size, of_states = setup.num_devices, bytes_computed(setup), setup.offload_optimizer
    whole, stage3 = kinds.pop("parameters", 0), setup.zero_stage == 3
    add(kinds, "parameters", -(-whole // devices) if stage3 else whole, stage3 and setup.offload_parameters)
    if stage3 and "reference" in kinds:
        add(kinds, "reference", -(-kinds.pop("reference") // devices), setup.offload_parameters)
    if phase == "load":
        return kinds
    trained = -(-gradients // size // devices)  # weights of a shard
    states = kinds.pop("optimizer state", 0)
    states = states * 4 // size if setup.optimizer_bytes_per_weight is None else states
    # Float32 weights are others than those that compute, but with ZeRO-3 where these are float32 themselves
    of_float32 = 0 if stage3 and size == 4 else 4 * trained
    add(kinds, "optimizer state", -(-states // devices) + of_float32, of_states)
    kinds.pop("gradients", None)
    if stage3 or phase in ("train", "optimizer"):
        add(kinds, "gradients", size * trained, of_states)
    if phase == "optimizer":
        add(kinds, "gradients", 4 * (min(trained, SUB_GROUP) if stage3 else trained), of_states)
        add(kinds, "activations", -(-kinds.pop("activations", 0) * 4 // size // devices), of_states)
    if stage3 or phase == "train":
        add(kinds, "other", BUCKET * size)
    if phase == "train":  # one that is on its way to the bucket
        add(kinds, "gradients", min(size * weights[2], gradients))
    if stage3 and phase in ("generate", "score", "train"):
        all_at_once = phase == "generate" and setup.ds3_gather_for_generation and not setup.use_vllm
        add(kinds, "parameters", whole if all_at_once else min(whole, LIVE * size))
    return kinds

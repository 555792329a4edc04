"""What several devices change about a prediction: formulas over the simulated sizes of one device.

* DDP keeps one more copy of the gradients, in its buckets (`gradient_as_bucket_view` in the documentation of
  `torch.nn.parallel.DistributedDataParallel`).
* FSDP2 with `reshard_after_forward` keeps a shard of weights, gradients, optimizer state and reference on each device
  (`torch.distributed.fsdp.fully_shard`; arXiv 2304.11277, section 3). While it computes, one layer is gathered, the
  next is on its way, and what belongs to no layer (embedding, head, last norm) is gathered, too; in a backward the
  gradients of one layer and of those weights are whole. With offloading, shards are on the host.
* With FSDP2 and mixed precision, shards are float32 where weights are trained (accelerate's `fsdp2_prepare_model`),
  and what is gathered and computed is bfloat16 (its `MixedPrecisionPolicy`). So it is simulated in bfloat16, and the
  shards are widened.
"""

from dataclasses import replace

from rloo_memory.models import meta_model
from rloo_memory.plan.simulation.building import decoder_layers

SHARDED = ("parameters", "reference", "gradients", "optimizer state")


def weights_by_place(hf_config) -> tuple[int, int]:
    """Numbers of weights: of the largest layer, and of all that belongs to no layer."""
    model = meta_model(hf_config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    return max(layers), sum(p.numel() for p in model.parameters()) - sum(layers)


def as_computed(setup):
    """The setup in the dtype that a device computes in."""
    return replace(setup, dtype="bfloat16") if setup.fully_sharded and setup.bf16 else setup


def widened(setup, kind: str) -> int:
    """Times as large as simulated, `as_computed`, a shard of that kind is."""
    if not (setup.fully_sharded and setup.bf16):
        return 1
    trained = kind != "reference" and not setup.lora_rank
    loaded = kind in ("parameters", "reference") and setup.dtype == "float32"
    return 2 if trained or loaded else 1


def spread(setup, weights: tuple[int, int], gradients: int, phase: str, kinds: dict[str, int]) -> dict[str, int]:
    """`kinds`, bytes of one device that does everything, as they are on each of `setup.num_devices`. `weights` as
    `weights_by_place` counts them, which only sharding needs; `gradients` are the bytes of all gradients."""
    if setup.num_devices == 1:
        return kinds
    kinds = dict(kinds)
    if not setup.fully_sharded:
        if phase != "load":  # the buckets are made with the trainer and stay
            kinds["other"] = kinds.get("other", 0) + gradients
        return kinds
    # What the optimizer computes with is as large as its shards
    step = ("activations",) if phase == "optimizer" else ()
    for kind in (*SHARDED, *step):
        shard = -(-kinds.pop(kind, 0) * widened(setup, kind) // setup.num_devices)
        place = "host" if setup.offload_parameters else kind
        kinds[place] = kinds.get(place, 0) + shard
    if phase in ("generate", "score", "train"):
        layer, rest = weights
        size = 2 if setup.bf16 or setup.dtype != "float32" else 4
        kinds["parameters"] = kinds.get("parameters", 0) + (2 * layer + rest) * size
        if phase == "train" and not setup.lora_rank:
            kinds["gradients"] = kinds.get("gradients", 0) + (layer + rest) * size
    return kinds

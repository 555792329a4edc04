"""What TRL with vLLM needs on a CPU and not on a GPU. A shim for tests of small models.

`colocated()` is for the process of the trainer, `to_server()` for that of a trainer with a server. The server's own
processes call `plugin()` themselves, which setup.sh names as a plugin of vLLM: `trl vllm-serve` runs as it is.
Weights go to the server through the TCPStore of vLLM's own `StatelessProcessGroup`, in place of NCCL.
"""

import atexit
import os
from concurrent.futures import ThreadPoolExecutor

VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM takes a share of the machine's memory otherwise
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles its sampler else, which takes longer than all its tests
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def keep_weights_as_loaded() -> None:
    """Its fast products of matrices keep a packed copy of each weight and drop `layer.weight`, which new weights are
    written to."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as products

    ops._supports_onednn = False
    products.check_cpu_sgl_kernel = lambda *shape: False
    vars(ops).pop("causal_conv1d_weight_pack", None)


# What TRL does not hand to vLLM, which makes 16 bits of float32 then, and compiles for a minute
ENGINE = {"dtype": "float32", "enforce_eager": True}


def colocated() -> None:
    """Engines with `ENGINE`. One that is as another is that one: TRL pushes all weights before it generates."""
    import trl.generation.vllm_generation as generation

    keep_weights_as_loaded()
    make, made = generation.LLM, {}

    def engine(**settings):
        settings |= ENGINE
        key = repr(sorted(settings.items()))
        if key not in made:
            made[key] = make(**settings)
        return made[key]

    generation.LLM = engine


def forget_processes() -> None:
    """TRL tells vLLM of the one process by torchrun's variables; the next trainer would take them for its own, and so
    would a program that is started from here."""
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)


class StoreGroup:
    """What `PyNcclCommunicator.broadcast` does, over a store."""

    def __init__(self, host: str, port: int, rank: int, world_size: int):
        from vllm.distributed.utils import StatelessProcessGroup

        self.group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
        self.rank = rank

    def broadcast(self, tensor, src: int, stream=None) -> None:
        received = self.group.broadcast(tensor.contiguous(), src)
        if self.rank != src:
            tensor.copy_(received)


def plugin() -> None:
    """For each process of a server."""
    import torch
    from vllm.distributed.weight_transfer import nccl_engine

    def group_of_worker(init_info, parallel_config):
        rank = parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank
        address = init_info.master_address, init_info.master_port
        return StoreGroup(*address, rank + init_info.rank_offset, init_info.world_size)

    def receive(iterator, group, src, post_unpack_func, device="cpu", **kwargs):
        for name, (shape, dtype) in iterator:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            group.broadcast(tensor, src)
            post_unpack_func([(name, tensor)])

    keep_weights_as_loaded()
    nccl_engine.worker_init_process_group = group_of_worker
    nccl_engine.packed_nccl_broadcast_consumer = receive


def to_server() -> None:
    import trl.generation.vllm_client as client

    def init_communicator(self, device=0):
        world_size = self.get_world_size() + 1
        address = {"master_address": "127.0.0.1", "master_port": self.group_port}
        info = {**address, "rank_offset": 1, "world_size": world_size, "packed": True}
        with ThreadPoolExecutor(max_workers=1) as executor:  # both wait for each other
            url = f"{self.base_url}/init_weight_transfer_engine"
            server = executor.submit(self._post, url, json={"init_info": info})
            self.communicator = StoreGroup(*address.values(), 0, world_size)
            server.result()
        atexit.register(self.close_communicator)

    def send(iterator, group, src, post_iter_func, **kwargs):
        for item in iterator:
            group.broadcast(post_iter_func(item), src)

    client.VLLMClient.init_communicator = init_communicator
    client.packed_nccl_broadcast_producer = send

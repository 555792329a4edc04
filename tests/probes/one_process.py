"""The environment of a distributed run of one process, without a launcher. Imported before DeepSpeed."""

import os
import socket

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
os.environ["DS_ACCELERATOR"] = "cpu"

"""The launcher, with what vLLM needs on a CPU: launch_on_cpu.py PROFILE [--setting value ...]"""

import sys

import vllm_on_cpu

from rloo_memory.launch.__main__ import main

vllm_on_cpu.colocated()
vllm_on_cpu.to_server()
sys.exit(main())

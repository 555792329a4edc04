"""Python's hook at start-up, on PYTHONPATH of every process on the emulated device: values are computed from torch's
import on, in programs that know nothing of it and in the processes that they start."""

import importlib.abc
import importlib.machinery
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Starts the emulation when torch has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_start(module):
            load(module)
            import emulate  # noqa: F401 - starts

        spec.loader.exec_module = load_and_start
        return spec


if os.environ.get("EMULATE", "none") != "none":
    sys.meta_path.insert(0, AfterTorch())

"""Runs upstream's tests of ours on one tree of TRL, in a folder that tests/tiny_hub.py has filled.

upstream_tests.py FOLDER TREE TEST ...
"""

import os
import sys

import datasets
import pytest

if __name__ == "__main__":
    folder, tree, *tests = sys.argv[1:]
    sys.path.insert(0, tree)
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = os.path.join(folder, "datasets")
    import trl

    assert trl.__file__.startswith(tree), trl.__file__
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", "-p", "no:xdist", *tests]))

"""Runs a function on several trees of TRL, having imported torch and transformers once."""

import json
import os
import sys
import tempfile
import traceback

import peft  # noqa: F401
import transformers.trainer  # noqa: F401


def on_each_tree(function, trees):
    """`function(tree)` for each folder of `trees`, in a fork of this process with it first on the path, in order."""
    results = []
    for tree in trees:
        with tempfile.NamedTemporaryFile() as file:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    sys.path.insert(0, tree)
                    import trl

                    assert trl.__file__.startswith(tree), trl.__file__
                    with open(file.name, "w") as out:
                        json.dump(function(tree), out)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert status == 0, tree
            results.append(json.load(file))
    return results

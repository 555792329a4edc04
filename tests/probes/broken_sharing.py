"""The check of model families with something broken: windows, then values that are generated; and with nothing broken.

Windows of 10 tokens are longer than the rows on which `enable_prefix_sharing` tries a model: what it cannot see. Each
family is checked in a process of its own, which starts from what was broken here.
"""

import sys
from unittest import mock

from experiments.checks import model_families
from rloo_memory.prefix_sharing import cache as prefix_cache
from rloo_memory.prefix_sharing import routing

LAYER, WORDS = prefix_cache._SharedPrefixLayer, ["--only", "MistralForCausalLM"]
append = LAYER.append
BROKEN = (
    (routing, "layer_window", lambda *args: None),
    (LAYER, "append", lambda self, key, value: append(self, key, 0 * value)),
)
for owner, name, broken in BROKEN:
    with mock.patch.object(owner, name, broken):
        assert model_families.main(WORDS) == 1
sys.exit(model_families.main(WORDS))

"""Number of weights of every built-in shape: one line a shape."""

from rloo_memory.models import meta_model, shape_config
from rloo_memory.shapes import SHAPES

for name in SHAPES:
    print(name, sum(p.numel() for p in meta_model(shape_config(name)).parameters()))

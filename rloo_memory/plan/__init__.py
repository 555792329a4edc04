"""What a training will take in memory, before it runs.

* `ask.predict`: the peaks of a training, in one call from Python. `predict`: those of a setup. `setups`: what a setup
  is. `__main__` and `options`: the command.
* `doctor`: what makes it fit. `levers`: the changes it knows. `trl_settings`: settings to setups and back. `records`:
  what a run left behind.
* `simulate`: one step on tensors without values. `building`: its models. `replaced`: kernels that cannot run so.
  `shapes_only` and `live_bytes`: such tensors, and counting them. `extrapolate` and `sharding`: from few layers to
  all, from one device to several.
"""

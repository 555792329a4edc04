"""What a training will take in memory, before it runs.

* What is asked: `setups`, from `trl_settings`, `options` of the command or `records` of a run; `checkpoint`, `images`.
* `simulation`: one step on tensors without values. `scale_up`: from few layers and one device to all.
* `predict`: the `peaks` of setups. `accuracy`: how far to trust them, and what is not tensors.
* `levers`: the changes that save memory. `doctor`: those that make a training fit.
* `__main__`: the command. `ask`: one call from Python.
"""

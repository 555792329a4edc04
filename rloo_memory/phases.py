"""Phase marks: which part of a training step is running, and the exact peak of each part.

The marks come from hooks on the policy and its optimizer, so untouched trainers of both TRL lines are measured alike.
Per phase, torch's own counters (CUDA) or the kernel's high-water mark of resident memory (Linux) give the exact peak;
the sampler's file shows the course in between.
"""

import contextlib
import csv
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from rloo_memory.device import level, status_bytes


@dataclass(frozen=True)
class PhasePeak:
    """A finished phase: times in unix seconds, peaks in bytes, None where this machine cannot tell."""

    phase: str
    step: int
    start: float
    end: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_resident_bytes: int | None
    device_used_bytes: int | None


PHASE_COLUMNS = tuple(column.name for column in fields(PhasePeak))


class HighWater:
    """Peak memory since the last `reset()`: torch's counters on CUDA, resident memory from /proc on Linux."""

    def __init__(self, device_kind: str):
        self.cuda = None
        if device_kind == "cuda":
            import torch

            self.cuda = torch.cuda
        self.can_reset = self.reset()

    def wait(self) -> None:
        """Until the device has done what it was given: what is measured ends there, not where the host has asked."""
        if self.cuda:
            self.cuda.synchronize()

    def reset(self) -> bool:
        """Start a new measurement. Returns whether the resident high-water mark could be reset."""
        if self.cuda:
            self.cuda.reset_peak_memory_stats()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        except OSError:
            return False
        return True

    def read(self) -> tuple[int | None, int | None, int | None, int | None]:
        """(peak allocated, peak reserved, peak resident, device used now), bytes."""
        allocated = reserved = used = None
        if self.cuda:
            allocated, reserved = self.cuda.max_memory_allocated(), self.cuda.max_memory_reserved()
            used = level("cuda")
        return allocated, reserved, status_bytes("VmHWM") if self.can_reset else None, used


class PhaseRecorder:
    """Writes one row to `path` when a phase ends, and keeps the rows in `peaks`."""

    def __init__(
        self,
        path: Path,
        device_kind: str,
        go_on: bool = False,
        watch: Callable[[str, int], None] = lambda phase, step: None,
    ):
        """With `go_on`, rows are added to those that a run before this one left, and steps are counted from there.
        `watch` is told the phase and the step whenever a phase begins. Raises OSError, as `enter` and `close` do."""
        self.began = time.time() - time.monotonic()
        self.watch = watch
        self.high_water = HighWater(device_kind)
        self.peaks: list[PhasePeak] = []
        self.step = 0
        self.phase = "load"
        self.start = self.now()
        self.prompt_tokens: list[int] = []  # tokens fed per sequence, padding not counted; empty: not known
        self.begun_by_forward = False  # the "generate" that runs: not known yet whether anything is generated in it
        self.inside = False  # a marked function that generates
        self.rollout_starts: list[float] = []
        self.outside_pool_bytes = 0  # CUDA: what the device holds besides torch's pool
        self.grad_norms: dict[int, list[float]] = {}  # step -> norm before each optimizer step
        self.marks = contextlib.ExitStack()  # what takes back what marks the phases
        if go_on := go_on and path.exists():
            with path.open(newline="") as file:
                self.step = max((int(row["step"]) for row in csv.DictReader(file)), default=0)
        self.file = path.open("a" if go_on else "w", newline="", buffering=1)  # a killed run keeps finished phases
        if not go_on:
            csv.writer(self.file).writerow(PHASE_COLUMNS)

    def enter(self, phase: str, step: int | None = None) -> None:
        """End the current phase and start another, which begins `step` if that is given. Entering the current phase
        again is nothing."""
        if phase == self.phase:
            return
        if self.phase == "generate" and self.begun_by_forward:
            self.phase = "score"  # another engine generated, unmarked; the forward scored what it made
        self.close()
        self.phase = phase
        self.step = self.step if step is None else step
        self.high_water.reset()
        self.start = self.now()
        self.watch(phase, self.step)

    def now(self) -> float:
        """Unix seconds, as the clock said when this recorder was made: setting the clock bends no duration."""
        return self.began + time.monotonic()

    def close(self) -> None:
        """Write the current phase's row; also called when the run fails in the middle of a phase."""
        self.high_water.wait()
        peak = PhasePeak(self.phase, self.step, self.start, self.now(), *self.high_water.read())
        self.peaks.append(peak)
        csv.writer(self.file).writerow(["" if value is None else value for value in vars(peak).values()])
        self.start = self.now()  # the phase may go on

    def attach(self, policy, optimizer) -> None:
        """Mark phases from now on: generate -> score -> (train -> optimizer) x n -> generate ..."""
        import torch
        from accelerate.utils import is_peft_model

        def lengths(*args, **kwargs) -> list[int]:
            mask = kwargs.get("attention_mask")
            inputs = kwargs.get("input_ids", args[0] if args else None)
            return (mask.sum(1) if mask is not None else torch.full((len(inputs),), inputs.shape[1])).tolist()

        def before_forward(module, args):
            if self.inside:
                return
            if not torch.is_grad_enabled():
                if self.phase not in ("generate", "score"):
                    self.begin_rollout()  # prefix sharing computes the prompt before it calls `generate`
                    self.begun_by_forward = True
            elif self.phase != "load":
                self.enter("train")

        def before_optimizer(optimizer, args, kwargs):
            self.enter("optimizer")
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
            self.grad_norms.setdefault(self.step, []).append(norm)

        self.mark(policy, "generate", lengths)
        # A shared prompt goes past the PEFT model's forward. What goes through both only enters its phase again
        models = [policy, policy.get_base_model()] if is_peft_model(policy) else [policy]
        for model in models:
            self.marks.enter_context(model.register_forward_pre_hook(before_forward))
        self.marks.enter_context(optimizer.register_step_pre_hook(before_optimizer))
        self.marks.enter_context(optimizer.register_step_post_hook(lambda *args: self.enter("train")))

    def detach(self) -> None:
        """Mark no phases any more."""
        self.marks.close()

    def mark(self, owner, name: str, lengths) -> None:
        """`owner.name` generates completions. `lengths`, called as it is, gives the tokens of each prompt."""
        from rloo_memory.calls import put_back

        generate, before = getattr(owner, name), vars(owner).get(name)

        def marked(*args, **kwargs):
            self.begin_rollout()
            self.begun_by_forward, self.inside = False, True
            try:
                self.prompt_tokens.extend(lengths(*args, **kwargs))
                return generate(*args, **kwargs)
            finally:
                self.inside = False
                self.enter("score")
                self.reset_at_next_forward()

        def unmark():
            if vars(owner).get(name) is marked:  # else something replaced it in turn, and still calls it
                put_back(owner, name, before)

        setattr(owner, name, marked)
        self.marks.callback(unmark)

    def reset_at_next_forward(self) -> None:
        """Count the phase's peak from there on: until it returns itself, who called a marked function holds the cache
        that was filled in it."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        def reset(module, args) -> None:
            handle.remove()
            self.high_water.reset()

        handle = register_module_forward_pre_hook(reset)

    def begin_rollout(self) -> None:
        """A step starts where its rollout does. Several `generate` calls in a row belong to one rollout."""
        if self.phase == "generate":  # begun by the forward that computes the prompt
            return
        if self.phase == "score" and not self.grad_norms.get(self.step):
            self.enter("generate")
            return
        self.enter("generate", self.step + 1)
        self.rollout_starts.append(self.now())

    def step_seconds(self, end: float) -> list[float]:
        """Seconds from each rollout's start to the next one's, the last to `end`."""
        times = [*self.rollout_starts, end]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

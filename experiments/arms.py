"""The trainers that are compared. A run is one arm at one k."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One trainer to compare. `line` is a line of patches (`trl/UPSTREAM.toml`)."""

    name: str
    line: str
    patches: tuple[str, ...]  # applied to the line: () is untouched upstream
    shows: str  # what it is, as charts and tables say it
    accumulate: bool = False  # micro-batches of few completions, gradients accumulated over the batch
    shares_prefix: bool = False  # the prompt computed once, the completions in passes of some

    @property
    def in_passes(self) -> bool:
        """Whether one micro-batch goes through the model in several passes."""
        return self.shares_prefix and not self.accumulate

    def completions_per_forward(self, batch: int) -> int:
        """How many completions go through the model together, unless a run asks for another number."""
        if self.shares_prefix:
            return 2  # k is never less
        return 1 if self.accumulate else batch


COMPACT = ("0002-compact-lm-head.patch",)
ARMS = {
    arm.name: arm
    for arm in (
        Arm("classic-baseline", "classic", (), "TRL 0.21 as it is"),
        Arm("classic-string", "classic", ("0001-string-level-repeat.patch",),
            "the change published in 2025, prompts cut to 1,024 tokens"),
        Arm("classic-string-exact", "classic", ("0002-string-level-repeat-exact.patch",),
            "the same change, nothing cut"),
        Arm("classic-lean", "classic", ("0003-lean-logits.patch",), "TRL 0.21, logits only where they are read"),
        Arm("stock", "current", (), "TRL 1.16 as it is"),
        Arm("stock-accumulate", "current", (), "TRL 1.16, one completion at a time", accumulate=True),
        Arm("stock-compact", "current", COMPACT, "TRL 1.16, logits of completions only"),
        Arm("stock-compact-accumulate", "current", COMPACT,
            "TRL 1.16, logits of completions only, one completion at a time", accumulate=True),
        Arm("shared", "current", (), "TRL 1.16 with prefix sharing, two completions a pass", shares_prefix=True),
        Arm("shared-accumulate", "current", (), "TRL 1.16 with prefix sharing, two completions a micro-batch",
            accumulate=True, shares_prefix=True),
    )
}  # fmt: skip

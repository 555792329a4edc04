"""Whether a training with prefix sharing is the one without, and whether vLLM had the trainer's weights."""

from training import Trained

# All in float32
PARAMETERS = 1e-4  # of how far they moved; seen: 1.5e-5
LOG_PROBABILITIES = 1e-4  # nats; seen: 6e-6 for a token, 2.3e-5 for a completion


def moved(a: dict, b: dict) -> float:
    """The norm of the difference of two sets of parameters."""
    assert a.keys() == b.keys()
    return sum(float(((a[name] - b[name]).double() ** 2).sum()) for name in a) ** 0.5


def faults(off: Trained, on: Trained, log_probabilities: float = LOG_PROBABILITIES) -> list[str]:
    """What is wrong; empty where both agree. `log_probabilities`: how far vLLM's may be from the trainer's, nats."""
    found = []
    if on.tokens != off.tokens:
        found.append("other tokens")
    if len({tuple(ids) for generation in off.tokens for ids in generation}) < 8:
        found.append("the completions are alike")
    if not on.shared_passes or off.shared_passes:
        found.append(f"{on.shared_passes} passes shared prompts with sharing, {off.shared_passes} without")
    far, apart = moved(off.before, off.after), moved(off.after, on.after)
    if moved(off.before, on.before) or not far:
        found.append("they began apart, or nothing was trained")
    elif not apart <= PARAMETERS * far:
        found.append(f"parameters {apart / far:.1e} of their way apart")
    for name, trained in ("off", off), ("on", on):
        if not max(trained.apart, default=0.0) <= log_probabilities:
            found.append(f"{name}: vLLM's log-probabilities {max(trained.apart):.1e} from the trainer's")
    if any(abs(a - b) > LOG_PROBABILITIES for a, b in zip(off.apart, on.apart, strict=True)):
        found.append(f"vLLM's log-probabilities {off.apart} from the trainer's without sharing, {on.apart} with it")
    if any(abs(a - b) > PARAMETERS for a, b in zip(off.evaluations, on.evaluations, strict=True)):
        found.append(f"evaluations {off.evaluations} and {on.evaluations}")
    return found

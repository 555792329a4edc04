"""The smallest cards that hold a training: one, or several that share its weights with FSDP2."""

from dataclasses import replace

from rloo_memory.errors import ConfigError
from rloo_memory.plan.accuracy.cards import cards
from rloo_memory.plan.levers import is_accepted
from rloo_memory.plan.options import room_of
from rloo_memory.plan.peaks import Prediction
from rloo_memory.plan.predict import predict_all
from rloo_memory.plan.setups import Setup
from rloo_memory.sizes import GIB

NUMBERS = (1, 2, 4, 8)


def check_cards(setup: Setup) -> None:
    """Raises `ConfigError` for a training whose cards are chosen already."""
    if setup.device == "cpu" or setup.is_distributed or setup.use_vllm:
        raise ConfigError(
            "--cards looks for GPUs of a training that generates with transformers: leave out --device cpu, "
            "--accelerate and use_vllm"
        )


def on_cards(setup: Setup, number: int) -> Setup:
    """Weights are read in bfloat16, and shards of trained ones are float32."""
    return setup if number == 1 else replace(setup, num_devices=number, fully_sharded=True, dtype="bfloat16")


def in_words(predictions: list[Prediction], hf_config, say) -> list[str]:
    """A table: for each way and number of cards, the smallest that holds it with what its allocator wastes."""
    setups = {f"{p.arm} on {n}": on_cards(p.setup, n) for p in predictions for n in NUMBERS[1:]}
    setups = {label: setup for label, setup in setups.items() if is_accepted(setup, hf_config)}
    found = {f"{p.arm} on 1": p for p in predictions}
    found |= {p.arm: p for p in predict_all(setups, hf_config, say)}
    lines = [f"{'smallest card, GiB':18}{'1 card':>24}" + "".join(f"{f'{n} with FSDP2':>24}" for n in NUMBERS[1:])]
    for p in predictions:
        cells = [smallest(found.get(f"{p.arm} on {n}")) for n in NUMBERS]
        lines.append(f"{p.arm:18}" + "".join(f"{cell:>24}" for cell in cells))
    return lines


def smallest(prediction: Prediction | None) -> str:
    if prediction is None:
        return "cannot"
    for card in cards():
        size = card.seen or card.sold
        if room_of(round(size * GIB), reserve=None).holds(prediction.phases):
            return f"{size:g} ({card.names.split(',')[0]})"
    return "none"

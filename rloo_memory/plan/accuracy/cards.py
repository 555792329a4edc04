"""What PyTorch sees of the memory that a card is sold with.

`cards.json` beside this file: `sold` is the number in the card's name, `seen` the GiB that PyTorch names when memory
runs out, rounded down, `source` an issue on GitHub that quotes it. Cards without `seen` have less than `sold`, too.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from rloo_memory.sizes import GIB, parse_bytes

FILE = Path(__file__).with_name("cards.json")


@dataclass(frozen=True)
class Card:
    names: str
    sold: float
    seen: float | None = None  # GiB
    source: str | None = None


@functools.cache
def cards() -> tuple[Card, ...]:
    """The smallest first."""
    return tuple(Card(**each) for each in json.loads(FILE.read_text())["cards"])


def size_as_sold(text: str) -> str | None:
    """What to say of a size that is the number in a card's name, or is in decimal GB; None for another."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(gb|gib)\s*", text.lower())
    if not match:
        return None
    said = []
    if match[2] == "gb":
        said.append(f"{text.strip()} is {parse_bytes(text) / GIB:.2f} GiB")
    if seen := [f"{card.seen:g} on {card.names}" for card in cards() if card.sold == float(match[1]) and card.seen]:
        said.append(f"of a card that is sold with {match[1]}, PyTorch sees {'; '.join(seen)}: write that, in GiB")
    return f"--device-memory {text.strip()}: {'; '.join(said)}" if said else None

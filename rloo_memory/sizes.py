"""Sizes: GiB, and bytes from what a user types."""

import re

from rloo_memory.errors import ConfigError, shown

GIB = 2**30


def parse_bytes(text: str) -> int:
    """Bytes from "32GiB", "1.5 GB", "800MiB" or a plain number of bytes. Raises `ConfigError`."""
    units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": GIB}
    match = re.fullmatch(r"\s*([0-9]{0,20}\.?[0-9]{1,20})\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in units:
        raise ConfigError(f"cannot read the size {shown(text)}; write it like 32GiB, 800MiB or 4000000000")
    return int(float(match[1]) * units[match[2]])


def size_hint(text: str) -> str:
    """What to say of a size that is too small: most often its unit was forgotten."""
    number = text.strip()
    return f"; did you mean {number}GiB?" if number.isdigit() and 0 < int(number) <= 1024 else "; write 24GiB"

"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
    _UNITS |= {_letter: 1024**_power, f"{_letter}I": 1024**_power}


def parse_byte_size(text: str, name: str = "size") -> int:
    """`1GiB`, `512 MiB`, `1.5GB`, `2G` (powers of 1024) or plain bytes, as `legato serve` takes
    them; `name` is what an error calls it.

    Raises:
        ValueError: it is anything else.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{name} must look like 1GiB, 512MiB or 1000000, got {text!r}")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise ValueError(f"{name} must be at least 1 byte, got {text!r}")
    return size

"""Amounts of memory as people write them: sizes, and fractions of what is there."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
    _UNITS |= {_letter: 1024**_power, f"{_letter}I": 1024**_power}


def parse_byte_size(text: str, name: str = "size", or_else: str = "") -> int:
    """`1GiB`, `512 MiB`, `1.5GB`, `2G` (powers of 1024) or plain bytes, as `legato serve` takes
    them; `name` is what an error calls it, `or_else` what may be given besides.

    Raises:
        ValueError: it is anything else.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{name} must look like 1GiB, 512MiB or 1000000{or_else}, got {text!r}")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise ValueError(f"{name} must be at least 1 byte{or_else}, got {text!r}")
    return size


def parse_fraction(text: str, name: str) -> float | None:
    """A number in (0, 1] without a unit, as `0.6`; None where `text` must be a size.

    Raises:
        ValueError: it has a decimal point and no unit, and is 0 or above 1.
    """
    if re.fullmatch(r"1|\d{0,18}\.\d{1,18}", text.strip()) is None:
        return None
    fraction = float(text)
    if not 0 < fraction <= 1:
        raise ValueError(
            f"{name} without a unit must be whole bytes or a fraction in (0, 1], got {text!r}"
        )
    return fraction


def parse_byte_size_or_0(text: str, name: str) -> int:
    """`parse_byte_size`, and `0` as well.

    Raises:
        ValueError: it is anything else.
    """
    return 0 if text.strip() == "0" else parse_byte_size(text, name, ", or 0 for none")

"""parse_bytes: an amount of memory as people write it."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_UNIT = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNIT |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
    _UNIT |= {_letter: 1024**_power, f"{_letter}I": 1024**_power}


def parse_bytes(text: str) -> int | None:
    """Bytes of 1GiB, 512MiB, 2GB (powers of 1000) or a plain number; None where it is no size."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(float(match[1]) * _UNIT[(match[2] or "").upper()])


def size_text(size: int) -> str:
    """As `parse_bytes` reads it: 1GiB, 256MiB, or bytes where it is no whole number of them."""
    for power, letter in ((3, "G"), (2, "M"), (1, "K")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{letter}iB"
    return str(size)

"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


def parse_byte_size(text: str) -> int:
    """`1GiB`, `512 MiB`, `1.5GB` or plain bytes; raises ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"size must look like 1GiB, 512MiB or 1000000, got {text!r}")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise ValueError(f"size must be at least 1 byte, got {text!r}")
    return size

"""Amounts of memory on the command line: sizes, and fractions of what is there."""

from __future__ import annotations

import re

from legato.cluster.byte_size import parse_bytes

_FRACTION = re.compile(r"1|\d{0,18}\.\d{1,18}")


def parse_size(text: str, or_else: str = "") -> int:
    """Bytes from 1GiB, 512MiB, 2GB (powers of 1000) or a plain number; ValueError for others.

    `or_else`: what may stand there besides, for the message.
    """
    size = parse_bytes(text)
    if size is None:
        raise ValueError(f"must be a size such as 512MiB or 2GiB{or_else}, got {text!r}")
    if size < 1:
        raise ValueError(f"must be at least 1 byte{or_else}, got {text}")
    return size


def parse_fraction(text: str) -> float | None:
    """A number in (0, 1] without a unit, as `0.6`; None where `text` must be a size."""
    if _FRACTION.fullmatch(text.strip()) is None:
        return None
    fraction = float(text)
    if not 0 < fraction <= 1:
        raise ValueError(
            f"without a unit must be whole bytes or a fraction in (0, 1], got {text!r}"
        )
    return fraction

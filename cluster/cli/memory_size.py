"""Amounts of memory on the command line: sizes, and fractions of what is there."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_FRACTION = re.compile(r"1|\d{0,18}\.\d{1,18}")
_UNIT = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNIT |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
    _UNIT |= {_letter: 1024**_power, f"{_letter}I": 1024**_power}


def parse_size(text: str, option: str = "--kv-memory", or_else: str = "") -> int:
    """Bytes from 1GiB, 512MiB, 2GB (powers of 1000) or a plain number; BadParameter for others.

    `or_else`: what the option takes besides, for the message.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(
            f"must be a size such as 512MiB or 2GiB{or_else}, got {text!r}", param_hint=option
        )
    size = int(float(match[1]) * _UNIT[(match[2] or "").upper()])
    if size < 1:
        raise typer.BadParameter(f"must be at least 1 byte{or_else}, got {text}", param_hint=option)
    return size


def parse_size_or_0(text: str, option: str) -> int:
    """`parse_size`, and `0` as well."""
    return 0 if text.strip() == "0" else parse_size(text, option, ", or 0 for none")


def parse_fraction(text: str, option: str) -> float | None:
    """A number in (0, 1] without a unit, as `0.6`; None where `text` must be a size."""
    if _FRACTION.fullmatch(text.strip()) is None:
        return None
    fraction = float(text)
    if not 0 < fraction <= 1:
        raise typer.BadParameter(
            f"without a unit must be whole bytes or a fraction in (0, 1], got {text!r}",
            param_hint=option,
        )
    return fraction

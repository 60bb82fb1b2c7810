"""spoken_time: seconds in words for people: `0.4 s`, `506 s`, `18 min`, `28 h`, `3 days`."""

from __future__ import annotations

_UNITS = (("s", 1.0, 900.0), ("min", 60.0, 120.0), ("h", 3600.0, 48.0))  # and up to how many


def spoken_time(seconds: float) -> str:
    """Three digits at most, where a unit allows."""
    for unit, size_s, below in _UNITS:
        if seconds / size_s < below:
            return (
                f"{seconds / size_s:.3g} {unit}"
                if unit == "s"
                else f"{seconds / size_s:.0f} {unit}"
            )
    return f"{seconds / 86_400:,.0f} days"

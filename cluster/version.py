"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def legato_version() -> str:
    """As pip knows it; "uninstalled" where Legato runs from its folder alone."""
    try:
        return version("legato")
    except PackageNotFoundError:
        return "uninstalled"

"""NEVER_RETRY: the trailer of a worker's error that the request would meet on any other as well."""

from __future__ import annotations

NEVER_RETRY = ("legato-retry", "never")

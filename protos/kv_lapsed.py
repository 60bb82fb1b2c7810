"""KV_LAPSED: the trailer of a Decode call whose prefill worker was not heard again."""

from __future__ import annotations

KV_LAPSED = ("legato-cause", "kv-lapsed")

"""kv_fit: in what workers may differ whose KV fits together: one rule for router and workers."""

from __future__ import annotations

PLAIN = frozenset(("float32", "bfloat16", "float16"))


def fits(field: str, value: object, other: object, kv_wire: str) -> bool:
    """Whether a prefill and a decode worker may have these two values in a field of their
    WorkerIdentity or KvHello.

    They must be equal; but a wire that names a dtype ("float32", "int8", …) converts whatever the
    pages hold, and then weights may be the same model rounded more or less: in plain floats, not
    quantised on one side. "same" sends the pages' bytes; "", of a worker that names none, counts
    as "same".
    """
    if value == other:
        return True
    if kv_wire in ("", "same"):
        return False
    if field in ("weights", "dtype"):
        return {value, other} <= PLAIN
    return field in ("kv_layout.dtype", "layout.dtype")

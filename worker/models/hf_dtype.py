"""declared_dtype: what config.json says of the weights' dtype; apart, for it needs torch."""

from __future__ import annotations

import torch

from legato.worker.models.config_fields import ConfigFields
from legato.worker.weights.quoting import quoted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def declared_dtype(values: dict[str, object], where: str) -> torch.dtype | None:
    """The dtype that config.json says the weights are in (`dtype`, once `torch_dtype`)."""
    fields = ConfigFields(values, where)
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) is None:
            continue
        dtype = DTYPES.get(fields.text(name).removeprefix("torch."))
        if dtype is None:
            raise fields.error(
                name, f"is {quoted(fields.text(name))}; supported are {', '.join(DTYPES)}"
            )
        return dtype
    return None

"""successor: what a worker needs to go on in another role around the weights that it has loaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from legato.worker.loading import DTYPES, choose_device
from legato.worker.spare_memory import give_back_freed, let_go_of_objects

if TYPE_CHECKING:
    import weakref

    from legato.worker.config import WorkerConfig
    from legato.worker.kv.cache import KvCache
    from legato.worker.loading import LoadedModel

# For callbacks of calls that were cut off, which may refer to the engine for a moment.
FREE_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.05


def check_same_weights(before: WorkerConfig, after: WorkerConfig, loaded: LoadedModel) -> None:
    """Whether `loaded`, which was made for `before`, is what `after` asks for.

    Raises:
        ValueError: naming the field and both values.
    """
    for name in ("model", "weights", "deterministic", "context_length"):
        had, wanted = getattr(before, name), getattr(after, name)
        if had != wanted:
            raise ValueError(f"{name} is {had!r} as {before.role}, {wanted!r} as {after.role}")
    if after.dtype != before.dtype and DTYPES.get(after.dtype) is not loaded.dtype:
        raise ValueError(
            f"dtype is {before.dtype!r} as {before.role}, {after.dtype!r} as {after.role}: the "
            f"weights are loaded as {str(loaded.dtype).removeprefix('torch.')}"
        )
    if (device := choose_device(after.device)) != loaded.device:
        raise ValueError(
            f"device is {str(loaded.device)!r} as {before.role}, {str(device)!r} as {after.role}"
        )


async def freed(cache: weakref.ref[KvCache]) -> None:
    """Returns when the KV memory of the old role is free: two pools may not fit beside each other.

    Raises:
        RuntimeError: something still holds it after FREE_TIMEOUT_S, such as an engine that hangs.
    """
    deadline_s = asyncio.get_running_loop().time() + FREE_TIMEOUT_S
    while True:
        let_go_of_objects()
        if cache() is None:
            break
        if asyncio.get_running_loop().time() > deadline_s:
            raise RuntimeError(
                f"the KV memory of the old role is still in use after {FREE_TIMEOUT_S:g} s"
            )
        await asyncio.sleep(_LOOK_EVERY_S)
    give_back_freed()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

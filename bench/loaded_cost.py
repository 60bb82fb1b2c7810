"""loaded_cost: the ModelCost of a loaded model, its weights counted as they lie in memory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from legato.plan.model_cost import ModelCost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.worker.forward import Model


def loaded_cost(model: Model, kv_bytes_per_token: int) -> ModelCost:
    """Counts what `model` holds."""
    weight_bytes = sum(t.numel() * t.element_size() for t in _tensors(model))
    return ModelCost.of(model.config, weight_bytes, kv_bytes_per_token)


def _tensors(root: object) -> Iterator[torch.Tensor]:
    """Every tensor below `root` once, but for those in fields whose name says embedding.

    A tied head that is the embedding's own tensor is found under its other name.
    """
    seen: set[int] = set()
    stack: list[object] = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, dict):
            stack += [value for key, value in item.items() if "embedding" not in str(key)]
        elif dataclasses.is_dataclass(item) or type(item).__module__.startswith("legato."):
            stack += [value for name, value in _fields(item) if "embedding" not in name]


def _fields(item: object) -> list[tuple[str, object]]:
    names = {*getattr(item, "__dict__", ()), *getattr(type(item), "__slots__", ())}
    return [(name, getattr(item, name)) for name in sorted(names) if hasattr(item, name)]

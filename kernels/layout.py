"""What the kernels ask of their tensors' layout, checked before any pointer is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def require_contiguous(**tensors: Tensor) -> None:
    """Raises ValueError naming the tensor whose elements do not lie in one piece."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def require_contiguous_rows(**tensors: Tensor) -> None:
    """Raises ValueError naming the tensor [T, ...] in which one row does not lie in one piece."""
    for name, tensor in tensors.items():
        if tensor.shape[0] and not tensor[0].is_contiguous():
            raise ValueError(f"a row of {name} must be contiguous, got strides {tensor.stride()}")


def require_shape(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Raises ValueError naming both shapes where they differ."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def require_dtype(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """Raises ValueError naming both dtypes where they differ."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")

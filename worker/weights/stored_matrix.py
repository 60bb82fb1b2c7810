"""StoredMatrix: a quantised matrix as files hold it: several tensors that make up one weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from legato.kernels.weight import QuantizedWeight
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import bare, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

    from legato.worker.weights.stored_tensor import StoredTensor

SCALE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Codes:
    """w[n, k] = scales[n, g] * q[n, k] + offsets[n, g], where g is the group of column k."""

    weight: QuantizedWeight  # right where the groups follow each other
    group_of_column: Tensor | None = None  # [K] int64 where they do not (act-order)

    def dequantize(self) -> Tensor:
        """[N, K] fp32."""
        weight, groups = self.weight, self.group_of_column
        if groups is None:
            return weight.dequantize()
        one = torch.ones(weight.out_features, 1)
        plain = QuantizedWeight(
            weight.bits, weight.in_features, weight.in_features, weight.values, one, one - 1
        )
        return weight.scales[:, groups] * plain.dequantize() + weight.offsets[:, groups]


class Layout(Protocol):
    """How a method packs its matrices; one object for all that share their settings."""

    def shape(self, parts: Parts) -> tuple[int, int]:
        """[N, K], from the headers alone.

        Raises:
            CheckpointError: a part is missing, or has another shape or dtype than the others need.
        """
        ...

    def read(self, parts: Parts) -> Codes:
        """Reads the parts.

        Raises:
            CheckpointError: a scale is not finite, a zero point or group is out of range, …
        """
        ...


@dataclass(frozen=True)
class Parts:
    """The tensors of one matrix: `stem` is its layer's name, suffixes are the method's."""

    stem: str
    tensors: Mapping[str, StoredTensor]  # by suffix
    get: Callable[[StoredTensor], Tensor]

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.tensors

    def error(self, suffix: str, problem: str) -> CheckpointError:
        """An error that names file and tensor."""
        stored = self.tensors.get(suffix)
        file = next(iter(self.tensors.values())).file if stored is None else stored.file
        return CheckpointError(f"{file}: tensor {bare(self.stem)}.{suffix} {problem}")

    def stored(self, suffix: str, dtypes: Collection[str], num_dimensions: int = 2) -> StoredTensor:
        """A part that must be there."""
        tensor = self.tensors.get(suffix)
        if tensor is None:
            raise self.error(suffix, "is missing from the checkpoint")
        if tensor.dtype not in dtypes:
            raise self.error(
                suffix, f"has dtype {bare(tensor.dtype)}, must have {' or '.join(dtypes)}"
            )
        if len(tensor.shape) != num_dimensions or 0 in tensor.shape:
            raise self.error(suffix, f"has shape {quoted(list(tensor.shape))}")
        return tensor

    def require(self, suffix: str, dtypes: Collection[str], shape: tuple[int, ...]) -> StoredTensor:
        """A part that must be there with this shape."""
        tensor = self.stored(suffix, dtypes, len(shape))
        if tensor.shape != shape:
            raise self.error(
                suffix, f"has shape {quoted(list(tensor.shape))}, must have {list(shape)}"
            )
        return tensor

    def read(self, suffix: str) -> Tensor:
        """Its values as stored."""
        return self.get(self.tensors[suffix])

    def scales(self, suffix: str) -> Tensor:
        """Its values in fp32, all of them finite."""
        values = self.read(suffix).float()
        if not bool(torch.isfinite(values).all()):
            raise self.error(suffix, "holds NaN or infinity")
        return values

    def groups(self, suffix: str, width: int, group_size: int, num_groups: int) -> Tensor | None:
        """The group of each column [width]; None where they follow each other."""
        groups = self.read(suffix).long()
        if bool(((groups < 0) | (groups >= num_groups)).any()):
            raise self.error(suffix, f"names a group outside [0, {num_groups})")
        in_order = torch.arange(width) // group_size
        return None if torch.equal(groups, in_order) else groups


@dataclass(frozen=True)
class StoredMatrix:
    """One weight [N, K] of a checkpoint."""

    name: str  # "….weight"
    shape: tuple[int, int]
    layout: Layout
    parts: Parts

    @property
    def file(self) -> str:
        """One of its files."""
        return str(next(iter(self.parts.tensors.values())).file)

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return sum(tensor.num_bytes for tensor in self.parts.tensors.values())

    def read(self) -> Codes:
        """See `Layout.read`."""
        return self.layout.read(self.parts)


def packed_words(tensor: Tensor) -> Tensor:
    """int32 [R, C] as bytes [R, 4 C]: word by word, the lowest bits first."""
    return tensor.contiguous().view(torch.uint8)


def nibbles(packed: Tensor) -> Tensor:
    """Bytes [R, C] to their halves [R, 2 C] uint8, the low half first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def pack_nibbles(halves: Tensor) -> Tensor:
    """The inverse of `nibbles`."""
    return halves[:, ::2] | halves[:, 1::2] << 4


def check_width(stem: str, file: str, width: int) -> None:
    """Refuses a matrix that `QuantizedWeight` cannot hold."""
    if width % 8:
        raise CheckpointError(
            f"{file}: the weight of {bare(stem)} has {width} inputs; a quantised weight must have "
            "a multiple of 8"
        )

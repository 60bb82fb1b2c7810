"""KvCache: the tensors behind the block pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from legato.kernels import huge_pages
from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages
from legato.worker.kv.block_pool import blocks_for

if TYPE_CHECKING:
    from legato.worker.config import WorkerConfig
    from legato.worker.models.config import ModelConfig

# What --kv-cache may name besides "auto", the model's own dtype.
KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_SCALE_BYTES = 4  # fp32


def choose_kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the pages for `WorkerConfig.kv_cache`."""
    return model_dtype if name == "auto" else KV_CACHE_DTYPES[name]


@dataclass(frozen=True)
class KvShape:
    """What one token's row of KV looks like, and how rows are grouped into blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: ModelConfig, config: WorkerConfig, dtype: torch.dtype) -> KvShape:
        """What `config` asks for, of a model computed in `dtype`.

        Raises:
            ValueError: kv_memory_bytes or swap_memory_bytes, where they count, hold not one block.
        """
        shape = cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=config.block_size,
            dtype=choose_kv_dtype(config.kv_cache, dtype),
        )
        if config.kv_memory_fraction is None and shape.num_blocks(config.kv_memory_bytes) < 1:
            context_length = min(
                config.context_length or model.context_length, model.context_length
            )
            raise ValueError(
                f"kv_memory_bytes {config.kv_memory_bytes} holds no block: "
                f"{shape.least_memory(context_length)}"
            )
        swap = config.swap_memory_bytes if config.role != "prefill" else None
        if swap and shape.num_blocks(swap) < 1:
            raise ValueError(
                f"swap_memory_bytes {swap} holds no block: one of {config.block_size} tokens takes "
                f"{shape.bytes_per_block} bytes; 0 is off"
            )
        return shape

    @property
    def quantized(self) -> bool:
        """Whether rows have a scale a head."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def bytes_per_row(self) -> int:
        """K and V of one token in one layer, scales included."""
        head = self.head_dim * self.dtype.itemsize + (_SCALE_BYTES if self.quantized else 0)
        return 2 * self.num_kv_heads * head

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers, scales included."""
        return self.num_layers * self.bytes_per_row

    @property
    def bytes_per_block(self) -> int:
        """Of all layers."""
        return self.bytes_per_token * self.block_size

    def context_bytes(self, context_length: int) -> int:
        """What one sequence takes that is as long as may be, in whole blocks."""
        return blocks_for(context_length, self.block_size) * self.bytes_per_block

    def least_memory(self, context_length: int) -> str:
        """In words: what a block takes, and what a context does."""
        return (
            f"one of {self.block_size} tokens takes {self.bytes_per_block} bytes; a context of "
            f"{context_length} tokens takes {self.context_bytes(context_length)}"
        )

    def num_blocks(self, memory_bytes: int) -> int:
        """How many whole blocks fit into `memory_bytes`."""
        return memory_bytes // self.bytes_per_block


class KvCache:
    """Paged K and V of every layer; slot = block id * block size + offset in the block."""

    def __init__(self, shape: KvShape, num_blocks: int, device: torch.device) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.shape = shape
        self.num_blocks = num_blocks
        self.spare_block = num_blocks  # one more than the pool deals out: rows of no sequence
        size = ((num_blocks + 1) * shape.block_size, shape.num_kv_heads, shape.head_dim)

        # zeros, not empty: attention on CUDA multiplies masked rows by 0, and 0 * NaN is NaN.
        def rows() -> Tensor:
            return _zeros(size, shape.dtype, device)

        def scales() -> Tensor | None:
            return _zeros(size[:2], torch.float32, device) if shape.quantized else None

        self.layers = [
            KvPages(k=rows(), v=rows(), k_scale=scales(), v_scale=scales())
            for _ in range(shape.num_layers)
        ]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU they take memory only when they are written: torch's own are written at once."""
    if device.type == "cpu":
        rows = huge_pages.zeros(size, dtype)
        # The first page of each is taken now: 60 faults of 2 MB cost a first request 0.3 s.
        rows[0].zero_()
        return rows
    return torch.zeros(size, dtype=dtype, device=device)

"""Identity: who a worker is and what KV it can take over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.protos import worker_pb2
from legato.protos.kv_fit import fits
from legato.protos.prefix_hash import PrefixHasher
from legato.protos.protocol_version import PROTOCOL_VERSION

if TYPE_CHECKING:
    import torch

    from legato.protos.kv_transfer_pb2 import KvHello
    from legato.worker.config import Role
    from legato.worker.kv.cache import KvShape
    from legato.worker.models.config import ModelConfig


@dataclass(frozen=True)
class Identity:
    """Fixed from start to end of the process."""

    worker_id: str  # unique for ever: a restarted worker has another one
    role: Role
    model_fingerprint: str
    weights: str  # what the matrices are held in: see `MatrixForm.name`
    model: ModelConfig
    dtype: torch.dtype  # of the weights; the KV's is in `kv_shape`
    context_length: int
    kv_shape: KvShape
    total_blocks: int

    def kv_layout(self) -> worker_pb2.KvLayout:
        """As it goes over the wire."""
        return worker_pb2.KvLayout(
            num_layers=self.kv_shape.num_layers,
            num_kv_heads=self.kv_shape.num_kv_heads,
            head_dim=self.kv_shape.head_dim,
            block_size=self.kv_shape.block_size,
            dtype=dtype_name(self.kv_shape.dtype),
        )

    def prefix_hasher(self, cache_salt: str) -> PrefixHasher:
        """Names blocks of this worker's KV: nothing that differs in it shares one."""
        return PrefixHasher(
            self.model_fingerprint,
            self.kv_shape.block_size,
            cache_salt,
            kv_kind=f"{self.weights}/{dtype_name(self.kv_shape.dtype)}",
        )

    def mismatch(self, hello: KvHello, kv_wire: str) -> str | None:
        """One sentence naming the first field in which a sender does not fit, or None.

        `block_size` may differ: the wire's layout knows no blocks; and what
        `legato.protos.kv_fit` says.
        """
        own = self.kv_layout()
        pairs = [
            ("protocol_version", hello.protocol_version, PROTOCOL_VERSION),
            ("receiver_worker_id", hello.receiver_worker_id, self.worker_id),
            ("model_fingerprint", hello.model_fingerprint, self.model_fingerprint),
            ("kv_wire", hello.kv_wire, kv_wire),
            ("weights", hello.weights, self.weights),
            *(
                (f"layout.{name}", getattr(hello.layout, name), getattr(own, name))
                for name in ("num_layers", "num_kv_heads", "head_dim", "dtype")
            ),
        ]
        for name, theirs, ours in pairs:
            if not fits(name, theirs, ours, kv_wire):
                return f"{name} is {theirs!r}, this worker's is {ours!r}"
        if not hello.sender_worker_id:
            return "sender_worker_id is empty"
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")

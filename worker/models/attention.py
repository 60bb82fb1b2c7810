"""Attention: from a layer's normed input to its output, over the cache's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.kernels.kv_scatter import kv_scatter
from legato.kernels.paged_decode_attention import paged_decode_attention
from legato.kernels.paged_prefill_attention import paged_prefill_attention
from legato.kernels.rms_norm import rms_norm
from legato.kernels.rope import apply_rope
from legato.worker.models.projection import Projection

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.models.config import ModelConfig
    from legato.worker.models.forward_pass import ForwardPass
    from legato.worker.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class Attention:
    """One layer's; `out` follows on the heads' outputs."""

    index: int  # of the layer, whose pages it uses
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    eps: float
    qkv: Projection  # query heads, key heads, value heads
    out: Projection
    q_norm: Tensor | None = None  # [head_dim], of every query head before RoPE
    k_norm: Tensor | None = None

    @classmethod
    def read(
        cls, reader: WeightReader, config: ModelConfig, index: int, *, norm_plus: float = 0.0
    ) -> Attention:
        """Under the names that all families but GPT-2 use; `norm_plus`: see `vector`."""
        prefix = f"model.layers.{index}.self_attn."
        qkv = Projection.read(reader, *(f"{prefix}{part}_proj" for part in "qkv"))
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = reader.vector(prefix + "q_norm.weight", plus=norm_plus)
            k_norm = reader.vector(prefix + "k_norm.weight", plus=norm_plus)
        out = Projection.read(reader, prefix + "o_proj")
        return cls.of(config, index, qkv, out, q_norm, k_norm)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        index: int,
        qkv: Projection,
        out: Projection,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Attention:
        """With the config's sizes."""
        return cls(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale or config.head_dim**-0.5,
            window=config.window(index),
            eps=config.norm_eps,
            qkv=qkv,
            out=out,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def __call__(self, run: ForwardPass, tables: Tensor | None) -> None:
        """Replaces `run.hidden`; the new rows of K and V go into the cache first.

        `tables` are those of `kernels.rope`; None: no RoPE.
        """
        heads = self.qkv(run.hidden, run.qkv).view(run.qkv.shape[0], -1, self.head_dim)
        rotated = self.num_heads + self.num_kv_heads
        q, k, v = heads[:, : self.num_heads], heads[:, self.num_heads : rotated], heads[:, rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            rms_norm(q, self.q_norm, self.eps, out=q)
            rms_norm(k, self.k_norm, self.eps, out=k)
        if tables is not None:
            apply_rope(heads[:, :rotated], tables)
        pages, plan = run.cache.layers[self.index], run.batch.plan
        kv_scatter(k, v, pages, run.batch.slots)
        if run.batch.reports is not None:
            run.batch.reports.note(self.index)
        attend = paged_decode_attention if plan.one_query_each else paged_prefill_attention
        attend(q, pages, plan, self.scale, window=self.window, out=run.attended)
        self.out(run.attended.flatten(1), run.hidden)

"""ModelConfig: the shape of a model, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn"]
Activation: TypeAlias = Literal["silu", "gelu_tanh"]

MAX_CONTEXT_LENGTH = 2**31 - 1  # positions are 32-bit integers on the wire and in kernels
MAX_SIZE = 2**31 - 1  # of a dimension: kernels index rows with 32 bits
MAX_LAYERS = 10_000  # a file that claims more is broken; per-layer settings are made in full


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the fields behind `kind` apply to scaled kinds only."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context_length: int = 8192  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whether the bounds of its ramp are whole numbers
    attention_factor: float = 1.0  # yarn: of cos and sin

    def __post_init__(self) -> None:
        _check_size("original_context_length", self.original_context_length, MAX_CONTEXT_LENGTH)


@dataclass(frozen=True)
class ModelConfig:
    """Complete and validated at construction; sizes are counts of elements."""

    architecture: str  # whose code and tensors: see `worker.models.build`
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float  # of RMSNorm or LayerNorm
    tie_word_embeddings: bool
    attention_bias: bool = False  # of q, k and v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head before RoPE
    activation: Activation = "silu"
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    num_learned_positions: int = 0  # instead of RoPE; at least context_length
    local_rope: RopeConfig | None = None  # of layers with a window, where they have their own
    layer_windows: tuple[int | None, ...] = ()  # of each layer; (): none has one
    attention_scale: float | None = None  # of the scores, above 0; None: 1 / sqrt(head_dim)

    def __post_init__(self) -> None:
        for name, most in (
            ("num_layers", MAX_LAYERS),
            ("hidden_size", MAX_SIZE),
            ("intermediate_size", MAX_SIZE),
            ("num_heads", MAX_SIZE),
            ("num_kv_heads", MAX_SIZE),
            ("head_dim", MAX_SIZE),
            ("vocab_size", MAX_SIZE),
            ("context_length", MAX_CONTEXT_LENGTH),
        ):
            _check_size(name, getattr(self, name), most)
        if not 0 <= self.num_learned_positions <= MAX_SIZE:
            raise ValueError(
                f"num_learned_positions must be from 0 to {MAX_SIZE}, got "
                f"{self.num_learned_positions}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.rope is None and self.num_learned_positions < self.context_length:
            raise ValueError(
                f"context_length {self.context_length} is beyond the "
                f"{self.num_learned_positions} learned positions"
            )
        if len(self.layer_windows) not in (0, self.num_layers):
            raise ValueError(
                f"layer_windows must have one entry for each of {self.num_layers} layers, got "
                f"{len(self.layer_windows)}"
            )
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise ValueError(f"a window must be at least 1, got {window}")
        # A window beyond every context hides nothing, however large; kernels take 32 bits.
        bounded = (w if w is None else min(w, MAX_CONTEXT_LENGTH) for w in self.layer_windows)
        object.__setattr__(self, "layer_windows", tuple(bounded))

    def window(self, layer: int) -> int | None:
        """How many positions up to its own a token of this layer sees; None: all."""
        return self.layer_windows[layer] if self.layer_windows else None


def _check_size(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        limit = f"at least 1, got {value}" if value < 1 else f"at most {most}, got {value}"
        raise ValueError(f"{name} must be {limit}")

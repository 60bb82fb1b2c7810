"""GatedMlp: down(activation(gate(x)) * up(x)), the MLP of all families but GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.kernels.gated import gelu_mul, silu_mul
from legato.worker.models.projection import Projection

if TYPE_CHECKING:
    from legato.worker.models.config import Activation, ModelConfig
    from legato.worker.models.forward_pass import ForwardPass
    from legato.worker.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class GatedMlp:
    """One layer's."""

    gate_up: Projection  # gate, then up
    down: Projection
    activation: Activation

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, index: int) -> GatedMlp:
        """Of layer `index`."""
        prefix = f"model.layers.{index}.mlp."
        return cls(
            gate_up=Projection.read(reader, prefix + "gate_proj", prefix + "up_proj"),
            down=Projection.read(reader, prefix + "down_proj"),
            activation=config.activation,
        )

    def __call__(self, run: ForwardPass) -> None:
        """Replaces `run.hidden`."""
        activate = silu_mul if self.activation == "silu" else gelu_mul
        for hidden, inner, activated in run.pieces():
            self.gate_up(hidden, inner)
            activate(inner, out=activated)
            self.down(activated, hidden)

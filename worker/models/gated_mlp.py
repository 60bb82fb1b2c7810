"""GatedMlp: down(activation(gate(x)) * up(x)), the MLP of all families but GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.kernels.gated_linear import gated_linear
from legato.worker.models.projection import Projection

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.weight import Weight
    from legato.worker.models.config import Activation, ModelConfig
    from legato.worker.models.forward_pass import ForwardPass
    from legato.worker.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class GatedMlp:
    """One layer's."""

    gate_up: Weight  # [2 * intermediate_size, hidden_size], gate, then up, for `gated_linear`
    gate_up_bias: Tensor | None
    down: Projection
    activation: Activation

    @classmethod
    def read(cls, reader: WeightReader, config: ModelConfig, index: int) -> GatedMlp:
        """Of layer `index`."""
        prefix = f"model.layers.{index}.mlp."
        gate_up = (prefix + "gate_proj", prefix + "up_proj")
        return cls(
            gate_up=reader.matrix(*gate_up, gated=True),
            gate_up_bias=reader.bias(*gate_up),
            down=Projection.read(reader, prefix + "down_proj"),
            activation=config.activation,
        )

    def __call__(self, run: ForwardPass) -> None:
        """Replaces `run.hidden`."""
        for hidden, inner in run.pieces():
            gated_linear(hidden, self.gate_up, self.activation, self.gate_up_bias, out=inner)
            self.down(inner, hidden)

"""Quantization: which method a folder's weights were quantised with, and its matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.worker.models.config_fields import ConfigFields
from legato.worker.models.hf_config import read_json_object
from legato.worker.weights import awq, compressed_tensors, gptq
from legato.worker.weights.awq import Awq
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.compressed_tensors import CompressedTensors
from legato.worker.weights.gptq import Gptq
from legato.worker.weights.quoting import bare, quoted
from legato.worker.weights.stored_matrix import Parts, StoredMatrix

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from legato.worker.weights.stored_matrix import Layout
    from legato.worker.weights.stored_tensor import StoredTensor

SUPPORTED = "supported are gptq and awq of 4 bits (gptq also 8), and compressed-tensors of integers"
# Where config.json says nothing: what the first versions of two libraries wrote beside it.
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True)
class Quantization:
    """Read from a folder's config; `matrices` finds what it says among the tensors."""

    method: Gptq | Awq | CompressedTensors
    where: str
    settings: dict[str, object]

    @classmethod
    def of_folder(cls, folder: Path, config: dict[str, object]) -> Quantization | None:
        """None where the weights are not quantised.

        Raises:
            CheckpointError: the method or a setting of it is not served.
        """
        file = folder / "config.json"
        for name in ("quantization_config", "compression_config", "quantization"):
            settings = config.get(name)
            if settings is None:
                continue
            top = ConfigFields(config, str(file))
            if not isinstance(settings, dict) or name == "quantization":
                raise top.error(name, f"says that the weights are quantised; {SUPPORTED}")
            default = "compressed-tensors" if name == "compression_config" else None
            method = settings.get("quant_method", default)
            return cls._read(settings, method, f"{file}: {name}")
        for name, method in _OLD_FILES.items():
            if (folder / name).exists():
                settings = read_json_object(folder / name)
                return cls._read(settings, method, str(folder / name))
        return None

    @classmethod
    def _read(cls, settings: dict[str, object], method: object, where: str) -> Quantization:
        fields = ConfigFields(settings, where)
        match method:
            case "gptq":
                return cls(Gptq.from_config(fields), where, settings)
            case "awq":
                return cls(Awq.from_config(fields), where, settings)
            case "compressed-tensors":
                return cls(CompressedTensors.from_config(fields), where, settings)
            case None:
                raise fields.error("quant_method", f"is missing; {SUPPORTED}")
        raise fields.error("quant_method", f"is {quoted(method)}; {SUPPORTED}")

    def matrices(
        self, tensors: dict[str, StoredTensor], get: Callable[[StoredTensor], Tensor]
    ) -> dict[str, StoredMatrix]:
        """Takes the parts of quantised matrices out of `tensors`; the matrices by name.

        Which layers are quantised the tensors themselves say: lists of exceptions in the config
        are not needed.

        Raises:
            CheckpointError: naming file and tensor that is missing or of a wrong shape or dtype.
        """
        markers, others = self._suffixes()
        stems = {
            stem
            for stem, _, suffix in (name.rpartition(".") for name in tensors)
            if suffix in markers
        }
        matrices = {}
        for stem in sorted(stems):
            parts = {}
            for suffix in (*markers, *others):
                tensor = tensors.pop(f"{stem}.{suffix}", None)
                if tensor is not None:
                    parts[suffix] = tensor
            taken = Parts(stem, parts, get)
            layout = self._layout(stem, taken)
            name = f"{stem}.weight"
            if name in tensors:
                raise CheckpointError(
                    f"{tensors[name].file}: tensor {bare(name)} is here both quantised and plain"
                )
            matrices[name] = StoredMatrix(name, layout.shape(taken), layout, taken)
        if not matrices:
            raise CheckpointError(
                f"{self.where}: says that the weights are quantised, but there are no tensors "
                f"called {', '.join(f'*.{marker}' for marker in markers)}"
            )
        return matrices

    def _suffixes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those that make a layer a quantised one, and those that belong to one."""
        if isinstance(self.method, Gptq):
            return gptq.SUFFIXES, ()
        if isinstance(self.method, Awq):
            return awq.SUFFIXES, ()
        names = compressed_tensors
        return names.SUFFIXES, ("weight", *names.ACTIVATION_SUFFIXES)

    def _layout(self, stem: str, parts: Parts) -> Layout:
        if not isinstance(self.method, CompressedTensors):
            return self.method
        layout = self.method.layout(stem)
        if layout is None:
            suffix = next(iter(parts.tensors))
            raise parts.error(
                suffix, f"belongs to a layer that no scheme of {self.where}.config_groups names"
            )
        return layout

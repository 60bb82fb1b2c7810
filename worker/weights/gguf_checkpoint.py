"""GgufCheckpoint: a llama.cpp file, served under Hugging Face's names and with its values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from legato.worker.models.gguf_config import gguf_model_config
from legato.worker.weights.byte_file import ByteFile
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.convert import convert, convert_rows, row_pieces
from legato.worker.weights.fingerprint import fingerprint
from legato.worker.weights.gguf_blocks import KEPT_TYPES, concatenated, read_blocks
from legato.worker.weights.gguf_header import GgufHeader
from legato.worker.weights.gguf_names import GGUF_NAMES, halves_from_pairs
from legato.worker.weights.quoting import bare, join_names
from legato.worker.weights.tensor_table import check_shapes, shape_error

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from legato.kernels.weight import QuantizedWeight
    from legato.worker.weights.stored_tensor import StoredTensor

FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
QUANTISED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
ROPE_FREQS = "rope_freqs.weight"


class GgufCheckpoint:
    """Everything that the header can tell is checked at construction; weights are read lazily."""

    def __init__(self, file: Path) -> None:
        """Reads the header and, where there is one, the little tensor rope_freqs.weight.

        Raises:
            CheckpointError: naming file, tensor or key, and what is wrong.
        """
        self._file = file
        header = GgufHeader.read(file)
        by_gguf_name = {tensor.name: tensor for tensor in header.tensors}
        for tensor in header.tensors:
            if tensor.dtype not in FLOAT_DTYPES and tensor.dtype not in QUANTISED_TYPES:
                raise CheckpointError(
                    f"{file}: tensor {bare(tensor.name)} has type {tensor.dtype}; supported are "
                    f"{', '.join((*FLOAT_DTYPES, *QUANTISED_TYPES))}"
                )
        if "token_embd.weight" not in by_gguf_name:
            raise CheckpointError(f"{file}: tensor token_embd.weight is missing")
        self._bytes = ByteFile(file)
        rope_freqs = by_gguf_name.get(ROPE_FREQS)
        self.config = self._file_config = gguf_model_config(
            header.metadata,
            tensor_names=by_gguf_name.keys(),
            vocab_size=by_gguf_name["token_embd.weight"].shape[0],
            rope_freqs=None if rope_freqs is None else self._divisors(rope_freqs),
            where=str(file),
        )
        self._all_tensors = header.tensors
        self._names = GGUF_NAMES[self.config.architecture]
        unknown = []
        self._tensors: dict[str, StoredTensor] = {}
        for tensor in header.tensors:
            name = self._names.hugging_face_name(tensor.name)
            if name is not None:
                self._tensors[name] = tensor
            elif tensor.name != ROPE_FREQS:  # now part of the config
                unknown.append(tensor.name)
        if unknown:
            raise CheckpointError(
                f"{file}: a {self.config.architecture} has no place for tensor "
                f"{join_names(unknown)}"
            )
        check_shapes(
            self.config,
            {name: self._names.shape(name, t.shape) for name, t in self._tensors.items()},
            dict.fromkeys(self._tensors, str(file)),
            str(file),
        )
        self._read: set[str] = set()
        self._fingerprint: str | None = None

    @property
    def native_dtype(self) -> torch.dtype:
        """That of the matrices; bfloat16 where one of them is quantised."""
        types = {tensor.dtype for tensor in self._tensors.values() if len(tensor.shape) > 1}
        if types <= {"F16"}:
            return torch.float16
        return torch.float32 if types <= {"F32"} else torch.bfloat16

    @property
    def fingerprint(self) -> str:
        """See `legato.worker.weights.fingerprint`; taken at first use."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._file_config, self._all_tensors)
        return self._fingerprint

    @property
    def can_keep(self) -> bool:
        """See `Checkpoint`."""
        return any(tensor.dtype in KEPT_TYPES for tensor in self._tensors.values())

    @property
    def auto_keeps(self) -> bool:
        """See `Checkpoint`: blocks are kept on request only."""
        return False

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """See `Checkpoint`."""
        stored = self._found(name, shape)
        if stored.dtype not in KEPT_TYPES or self._names.is_transposed(name):
            return None
        try:
            weight = concatenated(
                read_blocks(self._raw_rows(stored, start, stop), stored.dtype)
                for start, stop in row_pieces(stored.shape)
            )
        except ValueError as error:
            raise CheckpointError(f"{self._file}: tensor {name} ({stored.name}) {error}") from error
        self._read.add(name)
        num_heads = self._names.num_interleaved_heads(name, self.config)
        if num_heads is None:
            return weight
        order = torch.arange(weight.out_features)
        return weight.rows(halves_from_pairs(order, num_heads))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Reads and dequantises one tensor on the CPU, as `Checkpoint.tensor` says."""
        stored = self._found(name, shape)
        where = {"file": str(self._file), "name": f"{name} ({stored.name})"}
        if len(stored.shape) == 1:  # a norm's: what was added to it is taken off in fp32
            whole = self._names.restored(name, self._dequantized(stored), self.config)
            values = convert(whole, dtype, **where)
        else:
            whole = convert_rows(
                lambda start, stop: self._dequantized(stored, start, stop),
                stored.shape,
                dtype,
                **where,
            )
            values = self._names.restored(name, whole, self.config).contiguous()
        self._read.add(name)
        return values

    def finish(self) -> None:
        """Raises CheckpointError naming tensors that were never read."""
        unread = self._tensors.keys() - self._read
        if unread:
            raise CheckpointError(f"{self._file}: the model never read tensor {join_names(unread)}")

    def _found(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self._file}: tensor {name} is missing from the checkpoint")
        found = self._names.shape(name, stored.shape)
        if found != shape:
            raise shape_error(str(self._file), name, found, shape)
        return stored

    def _divisors(self, rope_freqs: StoredTensor) -> list[float]:
        values = self._dequantized(rope_freqs).float()
        if values.dim() != 1 or not bool(((values >= 1) & values.isfinite()).all()):
            raise CheckpointError(
                f"{self._file}: tensor {ROPE_FREQS} must be a list of finite numbers of at least 1"
            )
        return values.tolist()

    def _dequantized(self, stored: StoredTensor, start: int = 0, stop: int | None = None) -> Tensor:
        """The tensor's values in float32, or in its own dtype where that is a float; of a matrix
        the rows `start : stop`.
        """
        rows = self._raw_rows(stored, start, stop)
        shape = (-1, *stored.shape[1:])
        float_dtype = FLOAT_DTYPES.get(stored.dtype)
        if float_dtype is not None:
            return rows.view(float_dtype).reshape(shape)
        ggml_type = GGMLQuantizationType[stored.dtype]
        return torch.from_numpy(dequantize(rows.numpy(), ggml_type)).reshape(shape)

    def _raw_rows(self, stored: StoredTensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Its bytes, [rows, bytes of a row] uint8, all or those of some."""
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored.dtype]]
        row_bytes = stored.shape[-1] // block_elements * block_bytes
        first = stored.start + start * row_bytes
        last = stored.stop if stop is None else stored.start + stop * row_bytes
        return self._bytes.read(first, last, stored.name).view(-1, row_bytes)

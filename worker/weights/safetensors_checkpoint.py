"""SafetensorsCheckpoint: a Hugging Face folder with config.json and safetensors files."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from legato.worker.models.hf_config import model_config, read_json_object
from legato.worker.models.hf_dtype import declared_dtype
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.convert import convert, convert_rows
from legato.worker.weights.fingerprint import fingerprint
from legato.worker.weights.hf_names import canonical_name
from legato.worker.weights.quantization import Quantization
from legato.worker.weights.quoting import bare, join_names
from legato.worker.weights.safetensors_files import stored_tensors
from legato.worker.weights.tensor_file import TensorFile
from legato.worker.weights.tensor_table import (
    HEAD,
    check_shapes,
    embedding_name,
    is_harmless,
    model_tensors,
    shape_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from legato.kernels.weight import QuantizedWeight
    from legato.worker.weights.stored_matrix import Codes, StoredMatrix
    from legato.worker.weights.stored_tensor import StoredTensor

_log = logging.getLogger(__name__)

# safetensors' names of the dtypes we read.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsCheckpoint:
    """Everything that headers can tell is checked at construction; weights are read lazily."""

    def __init__(self, folder: Path) -> None:
        """Reads config.json, the index and the headers, but no weight.

        Raises:
            CheckpointError: naming file, tensor or field, and what is wrong.
        """
        self._folder = folder
        config_file = folder / "config.json"
        values = read_json_object(config_file)
        self.config = self._file_config = model_config(values, str(config_file))
        self._embedding = embedding_name(self.config)
        self._tensors = self._by_canonical_name(stored_tensors(folder))
        self._stored = list(self._tensors.values())
        self._quantization = Quantization.of_folder(folder, values)
        self._matrices = self._quantized_matrices()
        names = self._tensors.keys()
        if self.config.tie_word_embeddings and HEAD in names and self._embedding not in names:
            # The tied matrix was saved under its other name.
            self._tensors[self._embedding] = self._tensors.pop(HEAD)
        if HEAD in self._matrices:
            self.config = replace(self.config, tie_word_embeddings=False)
        self._handles: dict[Path, TensorFile] = {}
        self._open_files()
        self._drop_empty_biases()
        everything = self._tensors | self._matrices
        check_shapes(
            self.config,
            {name: tensor.shape for name, tensor in everything.items()},
            {name: str(tensor.file) for name, tensor in everything.items()},
            str(folder),
        )
        for name, tensor in self._tensors.items():
            # A head that the config calls a copy may turn out to differ, and is used then.
            harmless = name != HEAD and is_harmless(name, self.config)
            if tensor.dtype not in DTYPES and not harmless:
                raise CheckpointError(
                    f"{tensor.file}: tensor {bare(name)} has dtype {bare(tensor.dtype)}; supported "
                    f"are {', '.join(DTYPES)}"
                )
        declared = declared_dtype(values, str(config_file))
        self._native_dtype = declared or DTYPES[self._tensors[self._embedding].dtype]
        self._use_a_differing_head()
        self._act_order_found = False
        self._read: set[str] = set()
        self._fingerprint: str | None = None

    @property
    def native_dtype(self) -> torch.dtype:
        """What config.json declares, else the embedding's."""
        return self._native_dtype

    @property
    def fingerprint(self) -> str:
        """See `legato.worker.weights.fingerprint`; taken at first use."""
        if self._fingerprint is None:
            settings = None if self._quantization is None else self._quantization.settings
            self._fingerprint = fingerprint(self._file_config, self._stored, settings)
        return self._fingerprint

    @property
    def can_keep(self) -> bool:
        """See `Checkpoint`."""
        return bool(self._matrices)

    @property
    def auto_keeps(self) -> bool:
        """See `Checkpoint`."""
        return bool(self._matrices)

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        """See `Checkpoint`."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return None
        codes = self._codes(matrix, shape)
        if codes.group_of_column is not None:
            if not self._act_order_found:
                _log.warning(
                    "%s: the groups of %s are out of order (act-order): such matrices are "
                    "dequantised",
                    matrix.file,
                    name,
                )
            self._act_order_found = True
            return None
        self._read.add(name)
        return codes.weight

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Reads one tensor on the CPU, as `Checkpoint.tensor` says."""
        if name in self._matrices:
            matrix = self._matrices[name]
            wide = self._codes(matrix, shape).dequantize()
            self._read.add(name)
            return convert(wide, dtype, file=matrix.file, name=name)
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing from the checkpoint")
        if stored.shape != shape:
            raise shape_error(str(stored.file), name, stored.shape, shape)
        file = str(stored.file)
        if DTYPES[stored.dtype] == dtype or len(shape) < 2:
            values = convert(self._stored_values(stored), dtype, file=file, name=name)
        else:
            handle = self._handles[stored.file]
            values = convert_rows(
                lambda start, stop: handle.get_rows(stored.name, start, stop),
                shape,
                dtype,
                file=file,
                name=name,
            )
        self._read.add(name)
        return values

    def finish(self) -> None:
        """Closes the files; raises CheckpointError naming tensors that were never read."""
        self._handles.clear()
        everything = self._tensors | self._matrices
        unread = [
            name
            for name in everything
            if name not in self._read and not is_harmless(name, self.config)
        ]
        if unread:
            file = everything[min(unread)].file
            raise CheckpointError(f"{file}: the model never read tensor {join_names(unread)}")

    def _quantized_matrices(self) -> dict[str, StoredMatrix]:
        """Takes their parts out of the plain tensors."""
        if self._quantization is None:
            return {}
        matrices = self._quantization.matrices(self._tensors, self._stored_values)
        if matrices and self.config.architecture == "gpt2":
            raise CheckpointError(
                f"{self._quantization.where}: quantised weights of GPT-2 are not supported"
            )
        if self._embedding in matrices:
            matrix = matrices[self._embedding]
            raise CheckpointError(
                f"{matrix.file}: tensor {matrix.name} is quantised, which is not supported for the "
                "embedding"
            )
        return matrices

    def _codes(self, matrix: StoredMatrix, shape: tuple[int, ...]) -> Codes:
        if matrix.shape != shape:
            raise shape_error(matrix.file, matrix.name, matrix.shape, shape)
        return matrix.read()

    def _open_files(self) -> None:
        for file in {tensor.file for tensor in self._stored}:
            self._handles[file] = TensorFile(file)

    def _stored_values(self, stored: StoredTensor) -> Tensor:
        # By the file's own name: a tied embedding may be stored as the head.
        return self._handles[stored.file].get_tensor(stored.name)

    def _drop_empty_biases(self) -> None:
        """Early versions of AutoGPTQ store a bias of zeros for layers that have none."""
        wanted = {name for name, _ in model_tensors(self.config)}
        for matrix in self._matrices:
            name = f"{matrix.removesuffix('.weight')}.bias"
            bias = self._tensors.get(name)
            if bias is not None and name not in wanted and not self._stored_values(bias).any():
                del self._tensors[name]

    def _by_canonical_name(self, stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
        """Without the tensors of parts that are not served."""
        tensors: dict[str, StoredTensor] = {}
        for tensor in stored:
            name = canonical_name(tensor.name, self.config)
            if name is None:
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{tensor.file}: tensor {bare(tensor.name)} is the same as "
                    f"{bare(tensors[name].name)}"
                )
            tensors[name] = tensor
        return tensors

    def _use_a_differing_head(self) -> None:
        """A file may hold a head of its own although the config says that it is tied.

        transformers takes the file's word then: the head is used as it is, with a warning.
        """
        head, embedding = self._tensors.get(HEAD), self._tensors[self._embedding]
        if head is None or not self.config.tie_word_embeddings:
            return
        if (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and torch.equal(
            self._handles[head.file].get_tensor(head.name),
            self._handles[embedding.file].get_tensor(embedding.name),
        ):
            return
        self.config = replace(self.config, tie_word_embeddings=False)
        _log.warning(
            "%s: config.json says tie_word_embeddings: true, but tensor %s differs from %s; "
            "it is used as the head",
            head.file,
            HEAD,
            self._embedding,
        )

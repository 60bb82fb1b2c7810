"""SafetensorsCheckpoint: a Hugging Face folder with config.json and safetensors files."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from legato.worker.models.hf_config import declared_dtype, model_config, read_json_object
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.convert import convert
from legato.worker.weights.fingerprint import fingerprint
from legato.worker.weights.hf_names import canonical_name
from legato.worker.weights.safetensors_files import stored_tensors
from legato.worker.weights.tensor_file import TensorFile
from legato.worker.weights.tensor_table import (
    HEAD,
    check_shapes,
    embedding_name,
    is_harmless,
    join_names,
    shape_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

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
        names = self._tensors.keys()
        if self.config.tie_word_embeddings and HEAD in names and self._embedding not in names:
            # The tied matrix was saved under its other name.
            self._tensors[self._embedding] = self._tensors.pop(HEAD)
        check_shapes(
            self.config,
            {name: tensor.shape for name, tensor in self._tensors.items()},
            {name: str(tensor.file) for name, tensor in self._tensors.items()},
            str(folder),
        )
        for name, tensor in self._tensors.items():
            if tensor.dtype not in DTYPES and not is_harmless(name, self.config):
                raise CheckpointError(
                    f"{tensor.file}: tensor {name} has dtype {tensor.dtype}; supported are "
                    f"{', '.join(DTYPES)}"
                )
        declared = declared_dtype(values, str(config_file))
        self._native_dtype = declared or DTYPES[self._tensors[self._embedding].dtype]
        self._handles: dict[Path, TensorFile] = {}
        for file in {tensor.file for tensor in self._tensors.values()}:
            self._handles[file] = TensorFile(file)
        self._use_a_differing_head()
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
            self._fingerprint = fingerprint(self._file_config, self._tensors.values())
        return self._fingerprint

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Reads one tensor on the CPU, as `Checkpoint.tensor` says."""
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing from the checkpoint")
        if stored.shape != shape:
            raise shape_error(str(stored.file), name, stored.shape, shape)
        # By the file's own name: a tied embedding may be stored as the head.
        read = self._handles[stored.file].get_tensor(stored.name)
        self._read.add(name)
        return convert(read, dtype, file=str(stored.file), name=name)

    def finish(self) -> None:
        """Closes the files; raises CheckpointError naming tensors that were never read."""
        self._handles.clear()
        unread = [
            name
            for name in self._tensors
            if name not in self._read and not is_harmless(name, self.config)
        ]
        if unread:
            file = self._tensors[min(unread)].file
            raise CheckpointError(f"{file}: the model never read tensor {join_names(unread)}")

    def _by_canonical_name(self, stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
        """Without the tensors of parts that are not served."""
        tensors: dict[str, StoredTensor] = {}
        for tensor in stored:
            name = canonical_name(tensor.name, self.config)
            if name is None:
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name} is the same as {tensors[name].name}"
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

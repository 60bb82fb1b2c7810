"""EngineFlags: what `legato serve` takes for its engines: model settings, KV memory and batches."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from legato.cluster.cli.service_forms import KvMemory, SizeOrNone
from legato.cluster.cli.setting_forms import Choice, Matching, Number, Real, Switch
from legato.cluster.config import ADMISSIONS, DTYPES, KV_CACHES, KV_LANES, KV_WIRES, WEIGHTS
from legato.cluster.config import EngineOptions as Options

_DEVICE = Matching(
    r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu or cuda", "auto|cpu|cuda", ("auto", "cpu", "cuda")
)

MAX_THREADS = 1024  # of a worker, on any machine


class EngineFlags(BaseModel):
    """Each is an option, a variable and a key of the file; what most mean: see EngineOptions."""

    engine_title: ClassVar[str] = "Engines"

    device: Annotated[str, _DEVICE] = Field(
        Options.device, description="auto is cuda where Ray has GPUs."
    )
    dtype: Annotated[str, Choice(DTYPES)] = Field(
        Options.dtype,
        description="Of weights and activations; auto is float32 on a CPU, else the checkpoint's.",
    )
    kv_cache: Annotated[str, Choice(KV_CACHES)] = Field(
        Options.kv_cache,
        description="fp8 or int8: 8 bits an element of K and V, for up to twice or four times the "
        "tokens; auto is the weights' dtype.",
    )
    decode_dtype: Annotated[str | None, Choice(DTYPES)] = Field(
        None, description="Of the decode workers, where it is not --dtype; with a --kv-wire."
    )
    decode_kv_cache: Annotated[str | None, Choice(KV_CACHES)] = Field(
        None, description="Of the decode workers, where it is not --kv-cache; with a --kv-wire."
    )
    kv_lane: Annotated[str, Choice(KV_LANES)] = Field(
        Options.kv_lane,
        description="auto: KV goes through shared memory between workers of one machine; "
        "grpc: never.",
    )
    kv_wire: Annotated[str, Choice(KV_WIRES)] = Field(
        Options.kv_wire,
        description="What KV is sent as between workers: same (as it is held), float32, bfloat16, "
        "float16, or int8 or fp8 with a scale a head.",
    )
    weights: Annotated[str, Choice(WEIGHTS)] = Field(
        Options.weights,
        description="Of the matrices: auto, keep (GGUF's blocks as they are), int8, or int4 in "
        "groups.",
    )
    deterministic: Annotated[bool, Switch()] = Field(
        Options.deterministic,
        description="The same bits for a request alone and in company on CUDA too, at some speed.",
    )
    kv_memory: Annotated[int | float, KvMemory()] = Field(
        Options.kv_memory_bytes,
        description="KV cache of each worker: a size (4GiB, or plain bytes), or a number in (0, 1] "
        "without a unit: that fraction of what is free after the weights and a step, shared by "
        "the workers on one machine or GPU.",
    )
    swap_memory: Annotated[int | None, SizeOrNone()] = Field(
        None,
        description="Host memory of each decode worker for the KV of preempted sequences; 0 is "
        "off. Without it as much as its KV cache, at most a quarter of the machine's memory.",
    )
    admission: Annotated[str, Choice(ADMISSIONS)] = Field(
        Options.admission,
        description="expected: a sequence enters where its expected answer fits beside the "
        "others'; reserve: where its max_tokens do, and nobody is preempted.",
    )
    admission_risk: Annotated[float, Real(0, 1)] = Field(
        Options.admission_risk,
        description="The share of answers that may get longer than expected.",
    )
    block_size: Annotated[int, Number(1)] = Field(
        Options.block_size, description="Tokens of a KV block."
    )
    context_length: Annotated[int | None, Number(1)] = Field(
        None, description="In tokens; lower than the model's own."
    )
    threads: Annotated[int | None, Number(1, MAX_THREADS)] = Field(
        None, description="Of each worker. Without it the cores, divided by the workers."
    )
    max_batch_size: Annotated[int, Number(1)] = Field(
        Options.max_batch_size, description="Sequences of a decode step."
    )
    prefill_chunk_tokens: Annotated[int, Number(1)] = Field(
        Options.prefill_chunk_tokens,
        description="Prompt tokens of a step in which nothing is decoded.",
    )
    prefix_cache: Annotated[bool, Switch()] = Field(
        Options.prefix_cache,
        description="Keep the KV of prompts' beginnings while there is room.",
    )

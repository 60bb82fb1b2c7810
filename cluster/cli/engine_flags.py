"""What `legato serve` takes for its engines: model settings, KV memory and batches."""

from __future__ import annotations

from typing import Annotated

import typer

DeviceOption = Annotated[
    str, typer.Option(help="auto, cpu or cuda; auto is cuda where Ray has GPUs.")
]

DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]

KvCacheOption = Annotated[
    str,
    typer.Option(
        help="auto, fp8 or int8: 8 bits an element of K and V, for up to twice or four times "
        "the tokens; auto is the weights' dtype."
    ),
]

DecodeDtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Of the decode workers, where it is not --dtype; with a --kv-wire.",
        show_default=False,
    ),
]

DecodeKvCacheOption = Annotated[
    str | None,
    typer.Option(
        help="Of the decode workers, where it is not --kv-cache; with a --kv-wire.",
        show_default=False,
    ),
]

KvLaneOption = Annotated[
    str,
    typer.Option(
        help="auto: KV goes through shared memory between workers of one machine; grpc: never."
    ),
]

KvWireOption = Annotated[
    str,
    typer.Option(
        help="What KV is sent as between workers: same (as it is held), float32, bfloat16, "
        "float16, or int8 or fp8 with a scale a head."
    ),
]

WeightsOption = Annotated[
    str,
    typer.Option(
        help="Of the matrices: auto, keep (GGUF's blocks as they are), int8, int4, "
        "or int4-g64, -g128, -g64-sym, -g128-sym."
    ),
]

DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="The same bits for a request alone and in company on CUDA too, at some speed.",
    ),
]

KvMemoryOption = Annotated[
    str,
    typer.Option(
        help="KV cache of each worker: a size (4GiB, or plain bytes), or a number in (0, 1] "
        "without a unit: that fraction of what is free after the weights and a step, shared "
        "by the workers on one machine or GPU."
    ),
]

SwapMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Host memory of each decode worker for the KV of preempted sequences; 0 is off. "
        "Default: as much as its KV cache, at most a quarter of the machine's memory.",
        show_default=False,
    ),
]

AdmissionOption = Annotated[
    str,
    typer.Option(
        help="expected: a sequence enters where its expected answer fits beside the others'; "
        "reserve: where its max_tokens do, and nobody is preempted."
    ),
]

AdmissionRiskOption = Annotated[
    float,
    typer.Option(help="The share of answers, in [0, 1), that may get longer than expected."),
]

BlockSizeOption = Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")]

ContextLengthOption = Annotated[int | None, typer.Option(min=1, help="Lower than the model's own.")]

ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Of each worker. Default: the cores, divided by the workers."),
]

MaxBatchSizeOption = Annotated[int, typer.Option(min=1, help="Sequences of a decode step.")]

PrefillChunkTokensOption = Annotated[
    int, typer.Option(min=1, help="Prompt tokens of a step in which nothing is decoded.")
]

PrefixCacheOption = Annotated[
    bool,
    typer.Option(help="Keep the KV of prompts' beginnings while there is room."),
]

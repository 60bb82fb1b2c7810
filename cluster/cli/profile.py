"""`legato profile`: measures a machine with a model, for `legato plan`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.connection import sentences
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from legato.bench.profiling.settings import ProfiledSettings
    from legato.plan.profile import Profile

_SIZES = "512MiB, 4GiB or plain bytes"


def profile(
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, a hub id, a .gguf file, or `demo`.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", dir_okay=False, help="Where the profile goes.")
    ] = Path("profile.json"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As of `legato serve`.")] = "auto",
    weights: Annotated[str, typer.Option(help="As of `legato serve`.")] = "auto",
    kv_cache: Annotated[str, typer.Option(help="As of `legato serve`.")] = "auto",
    kv_memory: Annotated[str, typer.Option(help=f"Of each of the two workers: {_SIZES}.")] = "1GiB",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of each worker. Without it, on a CPU, half of the cores.",
            show_default=False,
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option(min=2, max=4096, help="Sequences of a decode step.")
    ] = 256,
    seconds: Annotated[
        float,
        typer.Option(
            min=1,
            max=3600,
            help="For the measurements, start and end of the workers apart: what is left then is "
            "left out, the largest batches first.",
        ),
    ] = 120.0,
) -> None:
    """Measure this machine with a model: what prefill, decode and hand-off take.

    Starts a prefill and a decode worker, without Ray, and sends them prompts. Nothing else
    should run meanwhile.

    Examples:

        legato profile --model demo -o profile.json

        legato profile --model ./my-model --weights int8 --kv-memory 8GiB --seconds 300
    """
    from rich.console import Console

    from legato.bench.profiling.settings import ProfiledSettings
    from legato.cluster.cli.memory_size import parse_size

    try:
        kv_memory_bytes = parse_size(kv_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-memory") from None
    if threads is None and device != "cuda" and not device.startswith("cuda:"):
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
    settings = ProfiledSettings(
        model, device, dtype, weights, kv_cache, kv_memory_bytes, threads, max_batch_size
    )
    measured = _measure(settings, seconds)
    try:
        measured.write(output)
    except ValueError as error:
        raise ServiceError(str(error)) from error
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{output}: {_summary(measured)}", markup=False)


def _measure(settings: ProfiledSettings, seconds: float) -> Profile:
    from legato.bench.profiling.run import measure_profile
    from legato.bench.profiling.settings import ProfileWorkload
    from legato.cluster.cli.progress import TerminalProgress

    progress = TerminalProgress()
    workload = ProfileWorkload(budget_s=seconds)
    try:
        with sentences("the measured service"):
            return asyncio.run(measure_profile(settings, workload, progress.state))
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise ServiceError(f"the profile could not be measured: {error}") from error
    finally:
        progress.close()


def _summary(profile: Profile) -> str:
    longest = max(profile.prefill, key=lambda p: p.num_tokens)
    alone = min(profile.decode, key=lambda p: (p.num_sequences, p.context_tokens))
    most = max(profile.decode, key=lambda p: (p.num_sequences, -p.context_tokens))
    return (
        f"prefill {longest.num_tokens / longest.seconds:,.0f} tokens/s at {longest.num_tokens:,}; "
        f"a decode step {alone.seconds * 1000:.3g} ms of {alone.num_sequences}, "
        f"{most.seconds * 1000:.3g} ms of {most.num_sequences} sequences; "
        f"link {profile.link_bytes_per_s / 1e9:.2g} GB/s"
    )

"""BenchRun: one load on one target, with its bar and its Ctrl-C, and what came of it."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.load.grpc_target import GrpcTarget
from legato.bench.load.http_target import HttpTarget
from legato.bench.load.run import send_load
from legato.cluster.cli.bench_progress import BenchProgress
from legato.cluster.cli.client_flags import chosen_access
from legato.cluster.cli.connection import open_targets, sentences
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from legato.bench.load.sample import Sample
    from legato.bench.load.target import Served, ServerTimes, Target
    from legato.bench.load.workload import LoadWorkload


@dataclass(frozen=True)
class BenchRun:
    """`samples`: at least one, but where it was interrupted before."""

    samples: list[Sample]
    served: Served
    server: ServerTimes
    interrupted: bool


def run_bench(
    workload: LoadWorkload, urls: Sequence[str], model: str | None, address: str, timeout_s: float
) -> BenchRun:
    """On `urls`, or where there are none on the service at `address`.

    Raises:
        ServiceError: there is none, or a request is longer than its context.
    """
    with sentences(",".join(urls) or address), BenchProgress(workload) as progress:
        try:
            access = chosen_access()
            target: Target = (
                HttpTarget(urls, access, model)
                if urls
                else GrpcTarget(open_targets(address), access)
            )
            return asyncio.run(_run(workload, target, timeout_s, progress))
        except ValueError as error:
            raise ServiceError(str(error)) from error


async def _run(
    workload: LoadWorkload, target: Target, timeout_s: float, progress: BenchProgress
) -> BenchRun:
    stop = asyncio.Event()
    async with target:
        with _interrupts_set(stop):
            samples = await send_load(
                workload, target, timeout_s=timeout_s, stop=stop, on_change=progress.take
            )
        counted = [sample for sample in samples if not sample.is_warmup]
        server = await target.server_times(counted)
        return BenchRun(samples, target.served, server, stop.is_set())


@contextmanager
def _interrupts_set(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C ends the load, the second one the program."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        print("legato: no more is sent; what was measured follows", file=sys.stderr)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)

"""`legato demo`: the whole way of one prompt, started, shown and ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.answer import read_answer
from legato.cluster.cli.connection import connect_client
from legato.cluster.cli.generate import make_request, write_text
from legato.cluster.cli.service_run import run_service
from legato.cluster.cli.timing_table import timing_table
from legato.cluster.config import EngineOptions, RouterOptions, ServiceConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.cli.progress import TerminalProgress
    from legato.cluster.owner import Owner

PROMPT = "Explain in three sentences why the sky is blue."
KV_MEMORY_BYTES = 256 << 20
ANSWER_TIMEOUT_S = 120.0


def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 96,
) -> None:
    """Start a pair, ask something, show where the time went.

    One prefill and one decode worker of the demo model; all of it ends with the answer.

    Example:

        legato demo --prompt "Write a haiku about the sea."
    """
    config = ServiceConfig(
        model="demo",
        engine=EngineOptions(kv_memory_bytes=KV_MEMORY_BYTES),
        router=RouterOptions(port=0),
    )

    def ask(owner: Owner, address: str, progress: TerminalProgress) -> float:
        progress.stage(f"ready at {address}: one prefill worker, one decode worker")

        def write(text: str) -> None:
            if owner.stop_asked:
                raise KeyboardInterrupt
            write_text(text)

        _ask(address, prompt, max_tokens, write)
        return 0.0

    sys.exit(run_service(config, ask))


def _ask(address: str, prompt: str, max_tokens: int, write: Callable[[str], None]) -> None:
    from rich.console import Console

    from legato.protos import common_pb2

    console = Console(highlight=False)
    console.print(f"\n> {prompt}\n", markup=False, style="bold")
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    request = make_request(prompt, sampling, chat=True, system=None)
    with (
        connect_client(address) as client,
        client.stream(request, timeout_s=ANSWER_TIMEOUT_S) as stream,
    ):
        answer = read_answer(stream, write)
    print("\n")
    console.print(timing_table(answer), soft_wrap=True)
    print()

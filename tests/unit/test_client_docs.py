"""The Python examples of the documents run, as they stand, on two routers over fake workers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fake_worker import FakeWorker
from router_service import Service, another_router

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
ROUTERS = ("127.0.0.1:50051", "127.0.0.1:50052")  # as the documents have them


def examples(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


async def run(example: str) -> None:
    prefill = FakeWorker("prefill", total_blocks=1024)
    decode = FakeWorker("decode", total_blocks=1024)
    async with Service([prefill], [decode]) as service, another_router(service) as (_, address):
        for written, real in zip(ROUTERS, (service.address, address), strict=True):
            example = example.replace(written, real)
        names = {"__name__": "__main__"}
        await asyncio.to_thread(exec, compile(example, "example", "exec"), names)
        await service.settle()


async def test_the_blocking_example(capsys: pytest.CaptureFixture[str]) -> None:
    await run(examples("docs/client.md")[0])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" length")
    assert re.fullmatch("[a-z]{64}", lines[1])
    assert lines[2] == " length 64"


async def test_the_asyncio_example(capsys: pytest.CaptureFixture[str]) -> None:
    await run(examples("docs/client.md")[1])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(len(texts_in(line)) == 2 for line in lines)


async def test_the_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = examples("README.md")
    await run(example)
    out = capsys.readouterr().out
    assert len(out.splitlines()[0]) == 64
    assert "queue_s: " in out


def texts_in(line: str) -> list[str]:
    return re.findall(r"'([a-z]{16})'", line)

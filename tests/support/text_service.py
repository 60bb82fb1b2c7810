"""TextService: a router that reads requests as in use, with a real tokenizer, over fake workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from fake_worker import FakeWorker
from raw_client import RawClient
from router_service import FakeControl, until
from tiny_models import write_byte_tokenizer

from legato.cluster.config import RouterOptions
from legato.cluster.router import Router
from legato.cluster.text.model_text import ModelText

if TYPE_CHECKING:
    from pathlib import Path


class TextService:
    """`async with TextService(folder) as service:` is ready to be asked."""

    def __init__(self, folder: Path, options: RouterOptions | None = None) -> None:
        write_byte_tokenizer(folder)
        self.text = ModelText.load(folder)
        self.options = options or RouterOptions(port=0, local_prefill_tokens=0)
        self.workers = [
            FakeWorker("prefill", total_blocks=256),
            FakeWorker("decode", total_blocks=256),
        ]
        self.control = FakeControl()

    async def __aenter__(self) -> Self:
        self.router = Router(
            self.options,
            self.text,
            self.control,
            model_name="fake",
            version="test",
            owner_pid=1,
            owner_host="here",
        )
        self.address = await self.router.start()
        await self.router.set_workers([await worker.start() for worker in self.workers])
        await until(lambda: self.router.ready)
        self.client = RawClient(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.router.stop()
        for worker in self.workers:
            await worker.die()

    async def settle(self) -> None:
        """Within a bound nobody holds anything."""
        await until(
            lambda: (
                all(w.used_blocks == 0 and w.open_calls == 0 for w in self.workers)
                and self.router.num_in_flight == 0
                and self.router.admission.num_queued == 0
            ),
            10.0,
        )

"""Learnt: what a router has come to know of its workers: prefixes, speeds of prefill and paths."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from legato.cluster.path_speeds import PathSpeeds
from legato.cluster.policies import Knowledge
from legato.cluster.prefill_speeds import PrefillSpeeds
from legato.cluster.prefix_map import PrefixMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from legato.cluster.prompt_hashes import PromptHashes
    from legato.cluster.worker_view import WorkerView
    from legato.protos import worker_pb2


class Learnt:
    """`now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.prefixes = PrefixMap()
        self.speeds = PrefillSpeeds(now)
        self.paths = PathSpeeds(now)

    def note_report(self, view: WorkerView, report: worker_pb2.WorkerReport) -> None:
        """A worker tells."""
        if view.endpoint.role == "prefill":
            has_prompts = view.backlog_tokens > 0
            self.speeds.note_report(view.worker_id, report.load, has_prompts=has_prompts)
        if report.HasField("prefix_changes"):
            self.prefixes.note(view.worker_id, report.prefix_changes)

    def forget(self, worker_id: str) -> None:
        """The worker has gone for good."""
        self.prefixes.forget(worker_id)
        self.speeds.forget(worker_id)
        self.paths.forget(worker_id)

    def about(
        self, prompt: PromptHashes | None, views: Iterable[WorkerView], expected_output: int
    ) -> Knowledge:
        """What speaks for and against these workers, for one prompt. Once a request, not a token:
        0.2 ms for 2,048 tokens in blocks of 16 and 16 workers that hold all of it.
        """
        held: dict[str, int] = {}
        speeds: dict[str, float] = {}
        for view in views:
            worker_id = view.worker_id
            if prompt is not None and self.prefixes.holds_any(worker_id):
                assert view.identity is not None, "it has reported"
                blocks = self.prefixes.held_blocks(worker_id, prompt.of(view.identity))
                held[worker_id] = blocks * view.identity.kv_layout.block_size
            speed = self.speeds.tokens_s(worker_id)
            if speed is not None:
                speeds[worker_id] = speed
        return Knowledge(held, speeds, self.paths.rows_s(), expected_output)

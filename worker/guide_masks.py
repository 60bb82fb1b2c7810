"""GuideMasks: which tokens the guides of a step's answers allow, found while the model runs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from legato.text.guide_matcher import GuideError

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf
    from concurrent.futures import Future

    from llguidance import LLExecutor, LLMatcher
    from numpy.typing import NDArray

    from legato.text.guide_matcher import GuideMatcher
    from legato.worker.sequence import Sequence

_MAX_THREADS = 4


class GuideMasks:
    """Of one engine. Its thread feeds the matchers what was emitted and fills the masks, without
    Python's lock for the most part; nothing of it exists before the first guide.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def begin(self, sequences: SequenceOf[Sequence]) -> PendingMasks | None:
        """Those of the sequences that have a guide; None where none has. Their tokens must stay as
        they are until `PendingMasks.collect`.
        """
        guided = [(s, s.guide) for s in sequences if s.guide is not None]
        if not guided:
            return None
        if self._thread is None:
            from llguidance import LLExecutor

            self._thread = ThreadPoolExecutor(1, thread_name_prefix="legato-guides")
            self._executor = LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        return PendingMasks(self._thread.submit(self._masks, guided))

    def close(self) -> None:
        """Ends the thread, where there is one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _masks(
        self, guided: list[tuple[Sequence, GuideMatcher]]
    ) -> dict[Sequence, NDArray[np.int32] | GuideError]:
        masks: dict[Sequence, NDArray[np.int32] | GuideError] = {}
        ready: list[tuple[Sequence, GuideMatcher]] = []
        for sequence, guide in guided:
            try:
                guide.advance(sequence.output_token_ids)
            except GuideError as error:
                masks[sequence] = error
            else:
                ready.append((sequence, guide))
        if not ready:
            return masks
        words = np.zeros((len(ready), ready[0][1].num_words), np.int32)
        self._fill(words, [guide.source for _, guide in ready])
        for row, (sequence, guide) in enumerate(ready):
            try:
                guide.finish(words[row])
            except GuideError as error:
                masks[sequence] = error
            else:
                masks[sequence] = words[row]
        return masks

    def _fill(self, words: NDArray[np.int32], sources: list[LLMatcher]) -> None:
        address, size = words.ctypes.data, words.itemsize * words.shape[1]
        if len(sources) == 1:
            sources[0].unsafe_compute_mask_ptr(address, size)
            return
        assert self._executor is not None, "made with the thread"
        pairs = [(source, row) for row, source in enumerate(sources)]
        self._executor.unsafe_compute_mask_ptr(pairs, address, size, len(sources))


class PendingMasks:
    """Masks that are being filled."""

    def __init__(self, future: Future[dict[Sequence, NDArray[np.int32] | GuideError]]) -> None:
        self._future = future

    def collect(self) -> dict[Sequence, NDArray[np.int32] | GuideError]:
        """Waits for them: of each sequence that has a guide the mask, or why it has none. The work
        is bounded by the limits that the guides were compiled with.
        """
        return self._future.result()

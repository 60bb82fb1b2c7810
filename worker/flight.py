"""Flight: a step that was started and whose tokens are still to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.worker.scheduling.decision import Decision
from legato.worker.unread import UnreadTokens

if TYPE_CHECKING:
    from legato.worker.kv.block_lease import BlockLease
    from legato.worker.kv.progress import KvProgress
    from legato.worker.layer_reports import LayerReports
    from legato.worker.prompt_scores import ScoredRows
    from legato.worker.sampler import PendingTokens, Sampled
    from legato.worker.scheduling.step import Step
    from legato.worker.sequence import Sequence


@dataclass(eq=False)
class Flight:
    """Where steps overlap, the next one is launched before this one is read."""

    step: Step
    sequences: list[Sequence]  # those of the parts that sample
    sampled: PendingTokens | None  # None: no part samples
    leases: list[BlockLease]  # pinned until it is finished
    started_at_s: float
    model_s: float  # until the logits were there, or were on their way
    reports: LayerReports | None  # None: nobody waits for its rows
    watched: list[KvProgress]  # those whose rows it writes, or may have written for another
    scores: ScoredRows | None = None  # of prompts that want them
    finished: bool = False  # its tokens were read and handed out

    @property
    def reads_output(self) -> bool:
        """Whether the next step cannot be sampled before the tokens of this one are known."""
        return any(sequence.params.reads_output for sequence in self.sequences)

    @property
    def returned(self) -> list[Sequence]:
        """Those that left the schedule with this step, for want of blocks."""
        return self.step.returned if isinstance(self.step, Decision) else []

    @property
    def num_prompt_tokens(self) -> int:
        """Of prompts that a decode worker computes itself."""
        return self.step.num_prompt_tokens if isinstance(self.step, Decision) else 0

    def unread(self) -> UnreadTokens | None:
        """The tokens where the device has them; None where it samples none."""
        if self.sampled is None:
            return None
        return UnreadTokens(self.sequences, self.sampled.token_ids)

    def collect(self) -> list[tuple[Sequence, list[Sampled | None]]]:
        """Waits for the tokens: of each sequence, one for each of its answers."""
        tokens = self.sampled.collect() if self.sampled is not None else []
        if self.scores is not None:
            self.scores.collect()
        collected, start = [], 0
        for sequence in self.sequences:
            end = start + sequence.num_answers
            collected.append((sequence, tokens[start:end]))
            start = end
        assert start == len(tokens), "the sampler lost a row"
        return collected

    def unpin(self) -> None:
        """The device writes there no more."""
        for lease in self.leases:
            lease.drop()

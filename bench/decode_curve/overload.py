"""Overload: KV occupancy and decode rate of each admission rule, on one trace that does not fit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as SequenceOf

    from legato.bench.decode_curve.capacity_engine import CapacityEngine
    from legato.bench.decode_curve.capacity_run import Progress, RunRecord, StepRecord
    from legato.bench.decode_curve.trace import Request

_SAY_EVERY_S = 10.0


class AnswersDifferError(Exception):
    """A request has another answer under another rule: something is wrong with its KV."""


@dataclass(frozen=True)
class OverloadRow:
    """One rule. Means are over the steps at which requests waited, the warm-up left out."""

    admission: str
    risk: float | None  # None: reserve takes none
    blocks_held: float  # mean share of the pool's blocks that sequences hold
    rows_in_use: float  # mean share of the pool's rows with KV in them
    mean_batch: float
    tokens_per_s: float  # of decode, swaps included
    steps_measured: int
    steps: int  # of the whole run, as are the next
    preemptions: int
    swaps: int
    returns: int
    blocks_moved: int


@dataclass(frozen=True)
class Overload:
    """What is measured: every rule on the same requests."""

    risks: tuple[float, ...] = (0.5, 0.7, 0.8)
    # Answers that end before the measuring begins: by then the ledger knows how long they are.
    warm_up_answers: int = 32

    def rules(self) -> list[AdmissionRule]:
        """The strict one first."""
        expected = (AdmissionRule(AdmissionMode.EXPECTED, risk) for risk in self.risks)
        return [AdmissionRule(AdmissionMode.RESERVE), *expected]

    def measure(
        self, engine: CapacityEngine, requests: SequenceOf[Request], say: Callable[[str], None]
    ) -> tuple[list[OverloadRow], dict[int, list[int]]]:
        """The rows, and the answers, which are the same under every rule.

        Raises:
            ValueError: there are too few requests for the pool to overflow.
            AnswersDifferError: with the first request that differs.
        """
        rows: list[OverloadRow] = []
        answers: dict[int, list[int]] = {}
        for rule in self.rules():
            name = rule_name(rule)
            record = engine.run(requests, rule, on_step=_Progress(name, say))
            answers = answers or record.answers
            check_same(answers, record.answers, name)
            rows.append(self.row(rule, record))
            say(
                f"{name}: {rows[-1].blocks_held:.1%} of the blocks held, "
                f"{rows[-1].preemptions} preemptions"
            )
        return rows, answers

    def row(self, rule: AdmissionRule, record: RunRecord) -> OverloadRow:
        """The figures of one run.

        Raises:
            ValueError: nobody waited any more when the warm-up was over.
        """
        steps = self._measured(record)
        if not steps:
            raise ValueError(
                f"{rule_name(rule)}: no request waited once {self.warm_up_answers} answers had "
                "ended; more requests or less KV memory are needed"
            )
        num_tokens = sum(step.num_sequences for step in steps)
        held = sum(step.held_blocks for step in steps) / len(steps)
        in_use = sum(step.rows_in_use for step in steps) / len(steps)
        strict = rule.mode is AdmissionMode.RESERVE
        return OverloadRow(
            admission=rule.mode.value,
            risk=None if strict else rule.risk,
            blocks_held=held / record.total_blocks,
            rows_in_use=in_use / record.total_rows,
            mean_batch=num_tokens / len(steps),
            tokens_per_s=num_tokens / sum(step.seconds for step in steps),
            steps_measured=len(steps),
            steps=len(record.steps),
            preemptions=record.num_preemptions,
            swaps=record.num_preemptions - record.num_returns,
            returns=record.num_returns,
            blocks_moved=record.blocks_moved,
        )

    def _measured(self, record: RunRecord) -> list[StepRecord]:
        return [
            step
            for step in record.steps
            if step.num_waiting > 0 and step.num_ended >= self.warm_up_answers
        ]


def check_same(
    expected: Mapping[int, list[int]], found: Mapping[int, list[int]], name: str
) -> None:
    """Raises AnswersDifferError where the answers of two runs are not the same."""
    for number in sorted(expected.keys() | found.keys()):
        first, second = expected.get(number), found.get(number)
        if first != second:
            pairs = enumerate(zip(first or [], second or [], strict=False))
            place = next((i for i, (ours, other) in pairs if ours != other), None)
            raise AnswersDifferError(
                f"{name}: the answer to request {number} is not that of the first run: "
                f"{_length(second)} against {_length(first)} tokens, "
                f"{'one begins with the other' if place is None else f'other ones from {place} on'}"
            )


def rule_name(rule: AdmissionRule) -> str:
    """For people."""
    if rule.mode is AdmissionMode.RESERVE:
        return f"{rule.mode.value}"
    return f"{rule.mode.value} {rule.risk:g}"


def _length(answer: list[int] | None) -> str:
    return "no" if answer is None else str(len(answer))


class _Progress:
    """Says how far a run is, every few seconds."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._said_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            self._say(f"{self._name}: {progress.num_ended} of {progress.num_requests} answers")

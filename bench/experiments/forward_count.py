"""ForwardCount: claim 1, which forwards an answer takes, and for which tokens there is KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.bench.decode_curve.trace import alike
from legato.bench.experiments.experiment import Experiment
from legato.bench.experiments.finding import Answer, Check, Outcome, Table
from legato.worker.kv.block_pool import blocks_for
from legato.worker.model_runner import ModelRunner
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule

if TYPE_CHECKING:
    from legato.bench.decode_curve.capacity_engine import CapacityEngine
    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget
    from legato.worker.layer_reports import LayerReports
    from legato.worker.logits import Logits
    from legato.worker.scheduling.step import Step
    from legato.worker.unread import UnreadTokens

PROMPT_TOKENS = 24
ANSWER_TOKENS = (1, 2, 17, 64)


@dataclass(frozen=True)
class CountedAnswer:
    """One answer of the engine into an empty pool."""

    prompt_tokens: int
    answer_tokens: int
    forward_tokens: tuple[int, ...]  # new tokens of each forward, in order
    rows_written: tuple[int, ...]  # of KV in each layer: those that are not zero

    @property
    def one_prefill(self) -> bool:
        """The first forward, and no other, has the prompt; each of the rest has one token."""
        first, *rest = self.forward_tokens
        return first == self.prompt_tokens and all(tokens == 1 for tokens in rest)


def checks(answers: list[CountedAnswer]) -> tuple[Check, Check]:
    """In the order of `criteria`."""
    forwards = ", ".join(str(len(a.forward_tokens)) for a in answers)
    counted = all(len(a.forward_tokens) == a.answer_tokens and a.one_prefill for a in answers)
    rows = ", ".join("/".join(map(str, sorted(set(a.rows_written)))) for a in answers)
    written = all(set(a.rows_written) == {a.prompt_tokens + a.answer_tokens - 1} for a in answers)
    return (
        Check(ForwardCount.criteria[0], f"{forwards} forwards", _answer(counted)),
        Check(ForwardCount.criteria[1], f"{rows} rows", _answer(written)),
    )


class ForwardCount(Experiment):
    """Counts the calls of the model, and the rows of the pool that are not zero afterwards."""

    number, name = 1, "forward-count"
    claim = (
        "N tokens take one prefill and N − 1 decode forwards; the last token's KV is never written."
    )
    criteria = (
        f"for N of {', '.join(map(str, ANSWER_TOKENS))} there are exactly N forwards: one of the "
        "whole prompt, then N − 1 of one token",
        f"each layer then has exactly {PROMPT_TOKENS} + N − 1 rows of KV, after a prompt of "
        f"{PROMPT_TOKENS} tokens",
    )
    weight = 0.2

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """Counts: one run of each is enough, whatever else the machine does."""
        del budget
        answers = [_count(lab.engine, num_tokens) for num_tokens in ANSWER_TOKENS]
        rows = tuple(
            (
                str(a.answer_tokens),
                str(len(a.forward_tokens)),
                str(a.forward_tokens[0]),
                str(a.forward_tokens.count(1)),
                str(a.prompt_tokens + a.answer_tokens),
                "/".join(map(str, sorted(set(a.rows_written)))),
            )
            for a in answers
        )
        head: tuple[str, ...] = ("N", "forwards", "tokens of the first", "of one token")
        head += ("prompt and answer, tokens", "rows of KV in a layer")
        return Outcome(
            checks(answers),
            Table(head, rows),
            notes=(
                "The pool is new for each answer and holds zeros; a row that is not zero was "
                "written. EOS is ignored, so that every answer has N tokens.",
            ),
        )


class _CountingRunner(ModelRunner):
    """Notes how many tokens each forward has."""

    def __init__(self, engine: CapacityEngine) -> None:
        super().__init__(engine.model, engine.cache, engine.device, engine.max_batch_size)
        self.forward_tokens: list[int] = []

    def forward(
        self,
        step: Step,
        unread: UnreadTokens | None = None,
        reports: LayerReports | None = None,
    ) -> Logits:
        self.forward_tokens.append(step.num_tokens)
        return super().forward(step, unread, reports)


def _count(whole: CapacityEngine, answer_tokens: int) -> CountedAnswer:
    rows = PROMPT_TOKENS + answer_tokens
    engine = whole.with_blocks(blocks_for(rows, whole.cache.shape.block_size))
    runner = _CountingRunner(engine)
    engine.runner = runner
    requests = alike(1, PROMPT_TOKENS, answer_tokens, engine.model.config.vocab_size)
    engine.run(requests, AdmissionRule(AdmissionMode.RESERVE))
    # Behind the pool's rows there is a block of no sequence.
    pool_rows = engine.cache.num_blocks * engine.cache.shape.block_size
    written = [
        int(pages.k[:pool_rows].view(torch.uint8).flatten(1).any(1).sum())
        for pages in engine.cache.layers
    ]
    return CountedAnswer(PROMPT_TOKENS, answer_tokens, tuple(runner.forward_tokens), tuple(written))


def _answer(yes: bool) -> Answer:
    return Answer.YES if yes else Answer.NO

"""Sampler: from logits to the next token of every row, independent of the row's neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from legato.kernels.choose import Choices, argmax, choose
from legato.kernels.counter_rng import signed_seed
from legato.kernels.logprobs import logprobs
from legato.kernels.penalties import RowChanges, change_logits, row_changes
from legato.kernels.rows import take_rows
from legato.kernels.token_mask import mask_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from legato.worker.logits import Logits
    from legato.worker.sampling_params import SamplingParams
    from legato.worker.sequence import Sequence as RunningSequence


@dataclass(frozen=True)
class SamplingRow:
    """One row of a sampling batch: a request at one output position."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # emitted so far, as far as they are known
    banned_token_ids: frozenset[int]  # EOS and stop tokens while min_tokens is not reached
    num_unread: int = 0  # sampled tokens whose values have not come back from the device
    allowed: NDArray[np.int32] | None = None  # by its guide, as `mask_tokens` takes it; None: all

    @classmethod
    def of(
        cls,
        sequence: RunningSequence,
        answer: int = 0,
        allowed: NDArray[np.int32] | None = None,
    ) -> SamplingRow:
        """The row of a sequence as it stands, for one of its answers."""
        return cls(
            params=sequence.params.for_answer(answer),
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            banned_token_ids=sequence.banned_token_ids,
            num_unread=sequence.num_unread,
            allowed=allowed,
        )

    @property
    def index(self) -> int:
        """The next token's place in the answer."""
        return len(self.output_token_ids) + self.num_unread


@dataclass(frozen=True)
class Sampled:
    """The chosen token, and its logprobs where the request asked for them."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


class PendingTokens(Protocol):
    """Sampled tokens, on a device that may not have computed them yet."""

    @property
    def token_ids(self) -> Tensor:
        """[R] int64 on the device; -1 where a row is broken."""
        ...

    def collect(self) -> list[Sampled | None]:
        """Waits for them. None: the row is broken, its logits hold NaN or no finite maximum."""
        ...


def sample(logits: Logits, rows: Sequence[SamplingRow]) -> list[Sampled | None]:
    """`launch_sample`, and at once the tokens."""
    return launch_sample(logits, rows).collect()


def launch_sample(logits: Logits, rows: Sequence[SamplingRow]) -> PendingTokens:
    """Chooses one token a row.

    A row is worked on in this order: its guide's mask, bias, repetition penalty, presence and
    frequency penalties, bans; then the most likely token where the request is greedy, else a draw
    with the number that (seed, output index) names. Logprobs are those of the untouched logits.
    Where the bans would leave no token at all (a tiny vocabulary, or a guide that allows nothing
    else), they are lifted for that token. All rows are worked on at once; a row's result has the
    same bits in any company.

    Args:
        logits: [R, vocab_size]; left as they are, and free when this returns.
        rows: R of them.
    """
    values = logits.values
    if values.shape[0] != len(rows):
        raise ValueError(f"logits have {values.shape[0]} rows for {len(rows)} requests")
    changes = {r: change for r, row in enumerate(rows) if (change := _changes(row)) is not None}
    masks = {r: row.allowed for r, row in enumerate(rows) if row.allowed is not None}
    changed_rows = bool(changes or masks)
    greedy = all(row.params.greedy for row in rows) and not changed_rows
    if greedy or changed_rows:
        best = argmax(values) if logits.best is None else logits.best.clone()
    if greedy:
        tokens = best
    else:
        changed = values
        if changed_rows:
            changed = _rows(values, range(len(rows)))
            mask_tokens(changed, masks)
            change_logits(changed, changes)
        tokens = choose(changed, _choices(rows, values.device))
        if changed_rows:  # a mask or a ban may have hidden what is broken
            tokens = tokens.where(best >= 0, -1)
    return _Launched(tokens, _Logprobs.of(values, tokens, rows))


class _Launched:
    """Tokens that are on their way to the CPU, where they are not there already.

    Waiting for them must not mean waiting for the step that was queued behind them: they are
    copied to pinned memory, and an event tells when.
    """

    def __init__(self, tokens: Tensor, logprobs: _Logprobs | None) -> None:
        self.token_ids = tokens
        self._logprobs = logprobs
        tensors = [tokens, *(() if logprobs is None else logprobs.tensors)]
        self._event: torch.cuda.Event | None = None
        self._copies = tensors
        if tokens.is_cuda:
            self._copies = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            ]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type
            self._event.record()

    def collect(self) -> list[Sampled | None]:
        """See `PendingTokens`."""
        if self._event is not None:
            self._event.synchronize()
        values = [copy.tolist() for copy in self._copies]
        token_ids: list[int] = values[0]
        sampled = [Sampled(token_id, None, ()) for token_id in token_ids]
        if self._logprobs is not None:
            own, best, ids = values[1:]
            for i, (r, count) in enumerate(self._logprobs.rows):
                top = tuple(zip(ids[i][:count], best[i][:count], strict=True))
                sampled[r] = Sampled(token_ids[r], own[i], top)
        return [token if token.token_id >= 0 else None for token in sampled]


@dataclass(frozen=True)
class _Logprobs:
    """Of the rows that asked for them, from the model's own logits."""

    rows: list[tuple[int, int]]  # (row, how many of the best)
    tensors: tuple[Tensor, Tensor, Tensor]  # as `kernels.logprobs` returns them, a line a row

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> _Logprobs | None:
        """None where no row asked."""
        asked = [
            (r, row.params.logprobs)
            for r, row in enumerate(rows)
            if row.params.logprobs is not None
        ]
        if not asked:
            return None
        if len(asked) < len(rows):
            places = [r for r, _ in asked]
            logits = _rows(logits, places)
            tokens = tokens[torch.tensor(places, device=logits.device)]
        best = max(count for _, count in asked)
        # `collect` throws away what comes of a broken row; its -1 must only not be an index.
        return cls(asked, logprobs(logits, tokens.clamp(min=0), best))


def _choices(rows: Sequence[SamplingRow], device: torch.device) -> Choices:
    settings = [(row.params, row.index) for row in rows]
    reals = [(0.0 if p.greedy else p.temperature, p.top_p, p.min_p) for p, _ in settings]
    integers = [(p.top_k, signed_seed(p.seed), index) for p, index in settings]
    return Choices(
        torch.tensor(reals, dtype=torch.float64).to(device, non_blocking=True),
        torch.tensor(integers, dtype=torch.int64).to(device, non_blocking=True),
    )


def _changes(row: SamplingRow) -> RowChanges | None:
    """None where nothing changes the row's logits."""
    params = row.params
    penalizes_output = bool(
        row.output_token_ids and (params.presence_penalty or params.frequency_penalty)
    )
    repetition = params.repetition_penalty != 1.0
    if not (params.logit_bias or repetition or penalizes_output or row.banned_token_ids):
        return None
    return row_changes(
        bias=params.logit_bias,
        seen_ids=[*row.prompt_token_ids, *row.output_token_ids] if repetition else (),
        repetition=params.repetition_penalty,
        output_ids=row.output_token_ids if penalizes_output else (),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        banned_ids=row.banned_token_ids,
    )


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of these rows, without torch's threads: two teams on the same cores get in the way
    of each other.
    """
    out = logits.new_empty((len(rows), logits.shape[1]))
    return take_rows(logits.contiguous(), torch.tensor(rows, device=logits.device), out)

"""DecodeRequest: what one Decode call asks for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.worker.handoff.tickets import TicketRequest
from legato.worker.scheduling.claim import Newcomer
from legato.worker.sequence import Sequence
from legato.worker.services.errors import invalid
from legato.worker.services.validation import (
    MAX_ANSWERS,
    check_cache_salt,
    check_lengths,
    check_token_ids,
    read_num_answers,
    read_priority,
    read_sampling,
)

if TYPE_CHECKING:
    from legato.protos import worker_pb2
    from legato.protos.prefix_hash import PrefixHasher
    from legato.worker.identity import Identity
    from legato.worker.sampling_params import SamplingParams
    from legato.worker.services.errors import CallError


@dataclass(frozen=True)
class DecodeRequest:
    """The rows that all answers go on from, and how each of them goes on."""

    ticket: TicketRequest
    num_prompt_tokens: int
    params: SamplingParams  # of answer 0; see `SamplingParams.for_answer`
    eos_token_ids: frozenset[int]
    hasher: PrefixHasher | None  # None: blocks are not to be found again
    block_hashes: list[bytes]  # of the rows' full blocks; [] without a hasher
    vocab_size: int

    @classmethod
    def read(
        cls, reserve: worker_pb2.Reserve, identity: Identity, *, prefix_cache: bool
    ) -> DecodeRequest:
        """Raises CallError naming field, value and limit."""
        vocab_size = identity.model.vocab_size
        params = read_sampling(reserve.sampling, vocab_size)
        rows, num_prompt = len(reserve.token_ids), reserve.num_prompt_tokens
        check_lengths(rows, num_prompt, params.max_tokens, identity.context_length)
        num_emitted = rows - num_prompt
        if identity.role == "decode" and num_emitted + 1 >= params.max_tokens:
            raise _nothing_left(num_emitted, params.max_tokens)
        check_token_ids("token_ids", reserve.token_ids, vocab_size)
        check_token_ids("eos_token_ids", reserve.eos_token_ids, vocab_size)
        check_cache_salt(reserve.cache_salt)
        num_answers = read_num_answers(reserve.num_answers)
        if num_answers > 1 and num_emitted > 0:
            raise invalid(
                f"num_answers is {num_answers} where token_ids holds {num_emitted} emitted tokens: "
                f"limit 1, for each answer has its own"
            )
        if reserve.num_preemptions < 0:
            raise invalid(f"num_preemptions must not be negative, got {reserve.num_preemptions}")
        newcomer = Newcomer(
            rows=rows,
            max_rows=num_prompt + params.max_tokens - 1,
            max_tokens=params.max_tokens,
            priority=read_priority(reserve.priority),
            num_preemptions=reserve.num_preemptions,
            num_answers=num_answers,
        )
        token_ids = list(reserve.token_ids)
        hasher = identity.prefix_hasher(reserve.cache_salt) if prefix_cache else None
        hashes = hasher.block_hashes(token_ids) if hasher is not None else []
        # A prompt whose tokens' logprobs are wanted is computed as a whole: of what is found there
        # would be no logits.
        shared = hashes if params.prompt_logprobs is None else []
        return cls(
            ticket=TicketRequest(newcomer, reserve.arrival, token_ids, shared),
            num_prompt_tokens=num_prompt,
            params=params,
            eos_token_ids=frozenset(reserve.eos_token_ids),
            hasher=hasher,
            block_hashes=hashes,
            vocab_size=vocab_size,
        )

    def sequences(self, start: worker_pb2.Start) -> dict[int, Sequence]:
        """The answers that go on, by their number; raises CallError as `read` does.

        With `local_prefill` the only one, of whose rows none is computed yet.
        """
        num_answers = self.ticket.newcomer.num_answers
        if start.local_prefill:
            if num_answers != 1:
                raise invalid(f"local_prefill is set and num_answers is {num_answers}, limit 1")
            if start.answers:
                raise invalid(
                    f"local_prefill is set and answers holds {len(start.answers)}, limit 0: "
                    f"the first token is sampled here"
                )
            return {0: self._sequence(0, [])}
        num_emitted = len(self.ticket.token_ids) - self.num_prompt_tokens
        if num_emitted + 1 >= self.params.max_tokens:
            raise _nothing_left(num_emitted, self.params.max_tokens)
        if not start.answers:
            raise invalid("answers is empty: end the call where no answer goes on")
        sequences: dict[int, Sequence] = {}
        before = -1
        for each in start.answers:
            if not before < each.answer < num_answers:
                raise invalid(
                    f"answers holds answer {each.answer} after {before}, limit "
                    f"({before}, {num_answers}): each once, in order"
                )
            check_token_ids("answers.token_id", [each.token_id], self.vocab_size)
            sequences[each.answer] = self._sequence(each.answer, [each.token_id])
            before = each.answer
        return sequences

    def _sequence(self, answer: int, first_token: list[int]) -> Sequence:
        """Goes on with prefill's token, whose KV is not among the rows."""
        token_ids = self.ticket.token_ids
        return Sequence(
            token_ids=[*token_ids, *first_token],
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.params.for_answer(answer),
            eos_token_ids=self.eos_token_ids,
            num_computed=len(token_ids) if first_token else 0,
            block_hashes=list(self.block_hashes),
            hasher=self.hasher,
            # The router counts requests; of one request's answers the last yields first.
            arrival=self.ticket.arrival * MAX_ANSWERS + answer,
        )


def _nothing_left(num_emitted: int, max_tokens: int) -> CallError:
    return invalid(
        f"token_ids holds {num_emitted} emitted tokens and prefill gives one more: of "
        f"sampling.max_tokens {max_tokens} nothing is left to decode"
    )

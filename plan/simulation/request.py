"""SimulatedRequest: one request's way from its client through the workers, as `Attempt` goes it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from legato.cluster.attempt import MEASURED_TOKENS
from legato.cluster.deadline import Deadline
from legato.cluster.errors import RequestError
from legato.cluster.policies import Demand, prefills_locally
from legato.plan.simulation.decode_worker import Left, Stay
from legato.worker.handoff.tickets import AttemptKey, TicketRequest
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.claim import Newcomer, NoRoomNowError
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from legato.cluster.attempt_placement import Placement
    from legato.plan.simulation.arrivals import Arrival
    from legato.plan.simulation.cluster import SimulatedCluster
    from legato.plan.simulation.decode_worker import DecodeWorker
    from legato.plan.simulation.prefill_worker import FirstToken, PrefillWorker
    from legato.plan.simulation.router import SimulatedRouter
    from legato.worker.handoff.tickets import Ticket

# Messages before a first token: to the router, for the ticket, to prefill, and back.
NUM_HOPS = 4


class SimulatedRequest:
    """One answer to one prompt, with as many tokens as its client asks for."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        router: SimulatedRouter,
        arrival: Arrival,
        *,
        measured: bool,
    ) -> None:
        self._cluster = cluster
        self._router = router
        self._arrival = arrival
        self._measured = measured
        self._hop_s = cluster.service.times.request_overhead_s / NUM_HOPS
        self._emitted = 0
        self._last_token_s = 0.0
        self._tries = 0
        self._num_preemptions = 0
        self._has_begun = False

    async def live(self) -> None:
        """Until its last token, or until it is refused."""
        admission, arrival = self._router.admission, self._arrival
        now = asyncio.get_running_loop().time
        arrived_s = now()
        await asyncio.sleep(self._hop_s)
        deadline = Deadline(now() + self._router.options.default_deadline_s)
        try:
            admission.check_arrival(self._demand(), self._demand(), deadline)
            [entry] = admission.enter(1, deadline)
            while self._emitted < arrival.output_tokens:
                placement = await admission.place(entry, self._demand(), first=not self._has_begun)
                self._tries += 1
                try:
                    await self._attempt(placement, entry.arrival, arrived_s)
                finally:
                    placement.release()
        except RequestError:
            if self._measured:
                self._cluster.measures.note_refused(arrived_s)
            return
        admission.times.note_length(arrival.output_tokens, arrival.output_tokens)
        if self._measured:
            self._cluster.measures.note_end(arrived_s, self._last_token_s + self._hop_s - arrived_s)
        await asyncio.sleep(self._hop_s)  # to its client

    @property
    def _num_tokens(self) -> int:
        """Of the prompt and of what was emitted."""
        return self._arrival.prompt_tokens + self._emitted

    def _demand(self) -> Demand:
        arrival = self._arrival
        goes_on = arrival.output_tokens - self._emitted > 1
        most = arrival.prompt_tokens + arrival.output_tokens - 1
        return Demand(self._num_tokens, most if goes_on else 0)

    async def _attempt(self, placement: Placement, arrival: int, arrived_s: float) -> None:
        """Returns where the answer has ended, had to leave, or got no ticket."""
        loop, cluster = asyncio.get_running_loop(), self._cluster
        placed_s = loop.time()
        await asyncio.sleep(self._hop_s)
        worker: DecodeWorker | None = None
        ticket: Ticket | None = None
        if placement.decode is not None:
            worker = cluster.decode[placement.decode.worker_id]
            try:
                ticket = worker.tickets.reserve(
                    AttemptKey(str(self._arrival.number), self._tries), self._ticket(arrival)
                )
            except NoRoomNowError:
                placement.decode.note_refusal(placement.demand)
                return
            placement.granted()
        try:
            ticket_s = loop.time()
            self._has_begun = True
            if worker is not None and ticket is not None and self._is_local(placement):
                placement.handed_over()
                await self._compute_there(placement, worker, ticket, placed_s, arrived_s)
            else:
                await self._compute(placement, worker, ticket, placed_s, ticket_s, arrived_s)
        finally:
            if worker is not None and ticket is not None:
                worker.tickets.close(ticket)

    def _ticket(self, arrival: int) -> TicketRequest:
        rows = self._num_tokens
        newcomer = Newcomer(
            rows=rows,
            max_rows=self._arrival.prompt_tokens + self._arrival.output_tokens - 1,
            max_tokens=self._arrival.output_tokens,
            num_preemptions=self._num_preemptions,
        )
        return TicketRequest(newcomer, arrival, [0] * rows)

    def _is_local(self, placement: Placement) -> bool:
        assert placement.decode is not None, "it has given a ticket"
        load = placement.decode.load
        return prefills_locally(
            self._num_tokens,
            placement.prefill.backlog_tokens - placement.prefill_share.backlog_tokens,
            self._router.costs.costs(load.local_prefill_token_s if load is not None else 0.0),
            self._router.options.local_prefill_tokens,
        )

    # Computed on a prefill worker.

    async def _compute(
        self,
        placement: Placement,
        worker: DecodeWorker | None,
        ticket: Ticket | None,
        placed_s: float,
        ticket_s: float,
        arrived_s: float,
    ) -> None:
        prefill = self._cluster.prefill[placement.prefill.worker_id]
        await asyncio.sleep(self._hop_s)
        num_tokens = self._num_tokens
        prompt = prefill.compute([0] * num_tokens, self._arrival.output_tokens)
        try:
            first = await prefill.first_token(prompt)
            landed_s = first.at_s
            if worker is not None and ticket is not None:
                worker.tickets.begin_landing(ticket)
                landed_s = self._hand_off(prefill, worker, first, num_tokens)
            await asyncio.sleep(self._hop_s)
            placement.computed()
            self._router.costs.note_prefill(first.model_s, num_tokens)
            self._note_first(first.at_s, placed_s, arrived_s)
            if worker is None or ticket is None:
                return
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, landed_s - now))
        finally:
            prefill.release(prompt)
        placement.handed_over()
        worker.tickets.finish_landing(ticket)
        stay = self._enter(worker, ticket, num_computed=num_tokens)
        joined_s = await stay.joined
        if num_tokens <= max(self._router.options.local_prefill_tokens, MEASURED_TOKENS):
            spent_s = joined_s - ticket_s - first.wait_s - first.model_s
            self._router.costs.note_overhead(max(0.0, spent_s))
        await self._stay(stay)

    def _hand_off(
        self, prefill: PrefillWorker, worker: DecodeWorker, first: FirstToken, num_tokens: int
    ) -> float:
        """When the KV is there: not before it would be with links that nobody else uses."""
        service = self._cluster.service
        return self._cluster.links.carry(
            prefill.link,
            worker.link,
            num_tokens * service.kv_bytes_per_token,
            first.at_s + service.times.handoff_s(num_tokens),
        )

    # Computed on the decode worker.

    async def _compute_there(
        self,
        placement: Placement,
        worker: DecodeWorker,
        ticket: Ticket,
        placed_s: float,
        arrived_s: float,
    ) -> None:
        await asyncio.sleep(self._hop_s)
        stay = self._enter(worker, ticket, num_computed=0)
        either: set[asyncio.Future[Any]] = {stay.first, stay.left}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not stay.first.done():  # it had to leave for want of blocks: nothing came of it
            assert placement.decode is not None, "it has given a ticket"
            placement.decode.note_refusal(placement.demand)
            return
        first_s = stay.first.result()
        await asyncio.sleep(self._hop_s)
        self._note_first(first_s, placed_s, arrived_s)
        await self._stay(stay)

    # Decode.

    def _enter(self, worker: DecodeWorker, ticket: Ticket, num_computed: int) -> Stay:
        """The answer's sequence goes to the engine."""
        there = num_computed > 0
        [landed] = (
            worker.tickets.hand_over(ticket) if there else [worker.tickets.prefill_here(ticket)]
        )
        sequence = Sequence(
            [0] * self._num_tokens,
            self._arrival.prompt_tokens,
            SamplingParams.greedy_for(self._arrival.output_tokens, ignore_eos=True),
            frozenset(),
            num_computed=num_computed,
            arrival=ticket.request.arrival,
        )
        sequence.claim, sequence.lease = landed.claim, landed.lease
        stay = Stay(sequence, self._last_token_s if there else None)
        worker.enter(stay)
        return stay

    async def _stay(self, stay: Stay) -> None:
        """Until it has left the worker."""
        before, began_s = self._emitted, self._last_token_s
        left = await stay.left
        sequence = stay.sequence
        self._emitted = sequence.num_output_tokens
        assert stay.last_token_s is not None, "it has left behind its first token"
        self._last_token_s = stay.last_token_s
        self._router.admission.times.note_output(
            self._emitted - before, self._last_token_s - began_s
        )
        if left is Left.PREEMPTED:
            assert sequence.claim is not None, "it was admitted"
            self._num_preemptions = sequence.claim.num_preemptions

    def _note_first(self, at_s: float, placed_s: float, arrived_s: float) -> None:
        """A token that a prompt's computation gave: the first, or after a preemption the next."""
        now_s = at_s + self._hop_s
        self._router.admission.times.note_start(now_s - placed_s)
        if self._emitted == 0 and self._measured:
            self._cluster.measures.note_first(arrived_s, now_s - arrived_s)
        elif self._emitted:
            self._cluster.measures.note_gaps(at_s, at_s - self._last_token_s, 1)
        self._emitted += 1
        self._last_token_s = at_s

"""Who had which request when, by the routers' request log: one live owner, and none after the end.

Pure: reads parsed lines, and returns sentences about what is wrong, or counts. Several routers may
have written them; what one of them had ends with its process.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Line = Mapping[str, Any]

CANCEL_BOUND_S = 2.0  # from a client's cancel until the router has let go of everything
# What a worker of the role can be hit in. Once decode has begun, prefill has no part in it.
HIT_PHASES = {
    "prefill": ("prefill", "handoff"),
    "decode": ("ticket", "prefill", "handoff", "decode"),
}


@dataclass(frozen=True)
class RouterEnd:
    """A router's process has ended, or was stopped for a while. Its clients may go elsewhere."""

    at_s: float  # Unix time: it did nothing more after that
    router: int  # pid
    until_s: float = math.inf  # of one that was only stopped


@dataclass
class Request:
    """As the log of one router has it so far."""

    router: int
    received: int = 0
    ended: str = ""
    owners: dict[int, int] = field(default_factory=dict)  # by answer: the attempt that has it
    workers: dict[int, dict[str, str]] = field(default_factory=dict)  # by answer, by role
    phases: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def is_hit(self, answer: int, role: str, worker_id: str) -> bool:
        """Whether that worker has a part in the answer now."""
        has = answer in self.owners and self.workers[answer].get(role) == worker_id
        return has and self.phases.get(answer, "") in HIT_PHASES[role]


class Ledger:
    """Takes line by line what happened, and keeps the requests' present state: of each router its
    own. `ends`, as they are passed, leave the requests of that router to others.
    """

    def __init__(self, ends: Iterable[RouterEnd] = ()) -> None:
        self._ends_to_come = sorted(ends, key=lambda end: end.at_s)
        self._ends: dict[int, RouterEnd] = {}
        self._by_name: dict[str, dict[int, Request]] = {}
        self.wrong: list[str] = []

    @property
    def requests(self) -> dict[str, Request]:
        """As the last router that received it has it."""
        return {name: [*by_router.values()][-1] for name, by_router in self._by_name.items()}

    def take(self, line: Line) -> None:
        """The next line."""
        while self._ends_to_come and self._ends_to_come[0].at_s < line["at_s"]:
            end = self._ends_to_come.pop(0)
            self._ends[end.router] = end
        if "request" not in line:
            return
        name, event, router = line["request"], line["event"], line.get("router", 0)
        self._check_alive(name, router, line)
        by_router = self._by_name.setdefault(name, {})
        if event == "received":
            self._check_received(name, router, line["at_s"])
            by_router.setdefault(router, Request(router)).received += 1
            return
        request = by_router.setdefault(router, Request(router))
        if not request.received:
            self.wrong.append(f"{name}: {event} before it was received")
        if request.ended:
            self.wrong.append(f"{name}: {event} after it had ended ({request.ended})")
        if event == "ended":
            request.ended = line["outcome"]
            for answer, attempt in request.owners.items():
                self.wrong.append(f"{name}[{answer}]: ended while attempt {attempt} had it")
            return
        self._take_of_answer(request, line)

    def _check_received(self, name: str, router: int, at_s: float) -> None:
        """Nobody else has had it but a router that is gone, or was stopped just now."""
        for other, request in self._by_name[name].items():
            end = self._ends.get(other)
            if other != router and end is not None and at_s <= end.until_s + CANCEL_BOUND_S:
                continue
            self.wrong.append(f"{name}: received a second time")
            if not request.ended:
                self.wrong.append(f"{name}: router {router} takes it while router {other} has it")

    def _check_alive(self, name: str, router: int, line: Line) -> None:
        """One that was stopped has a moment to let go of what its clients have taken elsewhere."""
        if (end := self._ends.get(router)) is None:
            return
        if math.isinf(end.until_s):
            self.wrong.append(f"{name}: {line['event']} of router {router}, which has ended")
            return
        is_elsewhere = [*self._by_name.get(name, {router: None})][-1] != router
        late_s = line["at_s"] - end.until_s
        if is_elsewhere and late_s > CANCEL_BOUND_S:
            self.wrong.append(
                f"{name}: {line['event']} {late_s:.1f} s after router {router} ran on"
            )

    def unended(self) -> list[str]:
        """Requests that no end was told of, but for those that ended with their router."""
        return [
            name
            for name, by_router in self._by_name.items()
            for request in by_router.values()
            if not request.ended and not self._is_gone(request.router)
        ]

    def running_on(self, router: int) -> Counter[str]:
        """By phase: answers that workers have from that router at this moment."""
        return Counter(
            request.phases[answer]
            for by_router in self._by_name.values()
            for request in by_router.values()
            if request.router == router
            for answer in request.owners
        )

    def _is_gone(self, router: int) -> bool:
        return router in self._ends and math.isinf(self._ends[router].until_s)

    def _take_of_answer(self, request: Request, line: Line) -> None:
        answer, event = line["answer"], line["event"]
        name = f"{line['request']}[{answer}]"
        owner = request.owners.get(answer)
        match event:
            case "begun":
                if owner is not None:
                    self.wrong.append(
                        f"{name}: attempt {line['attempt']} begins while attempt {owner} has it"
                    )
                request.owners[answer] = line["attempt"]
                request.workers[answer] = {"prefill": line["prefill"], "decode": line["decode"]}
            case "left" | "retargeted":
                if owner != line["attempt"]:
                    self.wrong.append(
                        f"{name}: {event} attempt {line['attempt']}, but {owner} has it"
                    )
                elif event == "left":
                    del request.owners[answer]
                    self._check_tokens(request, name, line)
                else:
                    request.workers[answer]["decode"] = line["decode"]
            case "phase":
                if owner is None and line["phase"] not in ("queue", "delivery"):
                    self.wrong.append(f"{name}: in phase {line['phase']}, and nobody has it")
                request.phases[answer] = line["phase"]
                self._check_tokens(request, name, line)

    def _check_tokens(self, request: Request, name: str, line: Line) -> None:
        before = request.tokens.get(line["answer"], 0)
        if line["tokens"] < before:
            self.wrong.append(f"{name}: has {line['tokens']} tokens where it had {before} before")
        request.tokens[line["answer"]] = line["tokens"]

    def hits(self, role: str, worker_id: str) -> Counter[str]:
        """By phase: the answers that worker has a part in at this moment."""
        return Counter(
            request.phases[answer]
            for request in self.requests.values()
            for answer in request.owners
            if request.is_hit(answer, role, worker_id)
        )

    def num_queued(self) -> int:
        """Answers that wait in the router."""
        return sum(
            phase == "queue" and answer not in request.owners
            for request in self.requests.values()
            if not request.ended
            for answer, phase in request.phases.items()
        )


def check_owners(
    lines: Iterable[Line], cancels: Mapping[str, float], router_ends: Iterable[RouterEnd] = ()
) -> list[str]:
    """One live owner of each answer at any moment, no owner and no token after the end, an end of
    everything, and of a request that its client cancelled (when, in Unix time) soon after that.

    A request that is resumed has one router at a time: another takes it only where its router is
    among `router_ends`.
    """
    ledger, ends = Ledger(router_ends), dict[str, float]()
    for line in lines:
        ledger.take(line)
        if line["event"] == "ended":
            ends[line["request"]] = line["at_s"]
    wrong = ledger.wrong
    wrong += [f"{name}: never ended" for name in ledger.unended()]
    for name, cancelled_at_s in cancels.items():
        late_s = ends.get(name, cancelled_at_s) - cancelled_at_s
        if late_s > CANCEL_BOUND_S:
            wrong.append(f"{name}: ended {late_s:.1f} s after its client had cancelled it")
    return wrong


@dataclass(frozen=True)
class Strike:
    """A worker was killed, or stopped, or told to go."""

    at_s: float  # Unix time
    worker_id: str
    role: str
    pid: int


def running_at(lines: Iterable[Line], end: RouterEnd) -> tuple[set[str], Counter[str]]:
    """What workers had from a router when it ended: requests, and their answers by phase."""
    ledger = Ledger()
    for line in lines:
        if line["at_s"] <= end.at_s:
            ledger.take(line)
    names = {name for name, r in ledger.requests.items() if r.router == end.router and r.owners}
    return names, ledger.running_on(end.router)


def hits_of(lines: Sequence[Line], strikes: Iterable[Strike]) -> Counter[str]:
    """What was under way on each worker when it was struck, as role and phase, such as
    "decode/handoff"; "queued" are the answers that waited in the router then.
    """
    ledger, counts = Ledger(), Counter[str]()
    left = sorted(strikes, key=lambda strike: strike.at_s)
    for line in lines:
        while left and left[0].at_s <= line["at_s"]:
            strike = left.pop(0)
            for phase, number in ledger.hits(strike.role, strike.worker_id).items():
                counts[f"{strike.role}/{phase}"] += number
            counts["queued"] += ledger.num_queued()
        ledger.take(line)
    return counts

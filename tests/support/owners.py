"""Who had which request when, by the router's request log: one live owner, and none after the end.

Pure: reads parsed lines, and returns sentences about what is wrong, or counts.
"""

from __future__ import annotations

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


@dataclass
class Request:
    """As the log has it so far."""

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
    """Takes line by line what happened, and keeps the requests' present state."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.wrong: list[str] = []

    def take(self, line: Line) -> None:
        """The next line."""
        if "request" not in line:
            return
        name, event = line["request"], line["event"]
        request = self.requests.setdefault(name, Request())
        if event == "received":
            request.received += 1
            if request.received > 1:
                self.wrong.append(f"{name}: received a second time")
            return
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


def check_owners(lines: Iterable[Line], cancels: Mapping[str, float]) -> list[str]:
    """One live owner of each answer at any moment, no owner and no token after the end, an end of
    everything, and of a request that its client cancelled (when, in Unix time) soon after that.
    """
    ledger, ends = Ledger(), dict[str, float]()
    for line in lines:
        ledger.take(line)
        if line["event"] == "ended":
            ends[line["request"]] = line["at_s"]
    wrong = ledger.wrong
    wrong += [f"{name}: never ended" for name, r in ledger.requests.items() if not r.ended]
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

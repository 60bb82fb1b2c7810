"""ControllerLink: the controller, as the owner of the service sees and keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError

from legato.cluster.actors.calls import CALL_TIMEOUT_S, outcome
from legato.cluster.actors.controller_actor import HEAD_LOST, ControllerActor
from legato.cluster.actors.orphan_watch import CONTROLLER_NAME
from legato.cluster.actors.worker_process import end_process
from legato.cluster.owner_watch import BEAT_PERIOD_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.actors.plans import WorkerPlan
    from legato.cluster.actors.worker_process import WorkerProcess
    from legato.cluster.control_plane import Role
    from legato.cluster.owner_watch import OwnerProcess
    from legato.cluster.pool import ControllerOptions

# Without an answer for so long its process hangs, and is ended. It may have to load first, on a
# busy machine.
SILENCE_S = 20.0


class ControllerLink:
    """Starts the controller as a detached actor, which Ray restarts, and beats for its owner."""

    def __init__(
        self,
        plan: WorkerPlan,
        targets: Mapping[Role, int],
        options: ControllerOptions,
        owner: OwnerProcess,
        settings: Mapping[str, Any],
    ) -> None:
        actor: Any = ray.remote(ControllerActor).options(
            **settings,
            name=CONTROLLER_NAME,
            lifetime="detached",  # to end the workers where the owner could not
            max_restarts=-1,
            max_task_retries=0,
        )
        self.handle = actor.remote(plan, targets, options, owner)
        self.failure = ""  # why it is gone for good
        self.head_lost = False  # as it says itself
        self._process: WorkerProcess | None = None
        self._beat_call = self.handle.beat.remote()
        self._answered_at_s: float | None = None
        self._next_beat_s = 0.0

    def look(self, now_s: float) -> str:
        """Beats; returns what a person should know, or nothing. A few times a second."""
        if self._answered_at_s is None:
            self._answered_at_s = now_s
        if self.failure or now_s < self._next_beat_s:
            return ""
        news = ""
        done, _ = ray.wait([self._beat_call], timeout=0)
        if done:
            news = self._note_answer(now_s)
            self._next_beat_s = now_s + BEAT_PERIOD_S
            self._beat_call = self.handle.beat.remote()
        elif self._process is not None and now_s - self._answered_at_s > SILENCE_S:
            end_process(self._process)
            self._answered_at_s = now_s
            news = f"the controller has not answered for {SILENCE_S:g} s; it is ended"
        return news

    def ask(self, method: str, bound_s: float = CALL_TIMEOUT_S) -> Any:  # noqa: ANN401  # any answer
        """What a call to it gives; None where there is no answer, such as while it restarts."""
        try:
            return ray.get(getattr(self.handle, method).remote(), timeout=bound_s)
        except (RayActorError, GetTimeoutError):
            return None

    def _note_answer(self, now_s: float) -> str:
        try:
            answer: tuple[WorkerProcess, bool, list[str]] = ray.get(self._beat_call)
        except ActorUnavailableError:
            return ""
        except ActorDiedError:
            self.failure = f"the controller ended: {outcome(self._beat_call)}"
            return ""
        self._answered_at_s = now_s
        process, head_lost, news = answer
        if self._process not in (None, process):
            news.append("the controller ended and was started again")
        if head_lost is not self.head_lost:
            news.append(HEAD_LOST if head_lost else "Ray's head answers again")
        self._process, self.head_lost = process, head_lost
        return "; ".join(news)

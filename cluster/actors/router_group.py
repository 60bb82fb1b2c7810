"""RouterGroup: the routers of one service, as their owner sees and keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from legato.cluster.actors.calls import outcome
from legato.cluster.actors.router_actor import RouterActor
from legato.cluster.actors.worker_process import end_process
from legato.cluster.heartbeat import SILENCE_S, Heartbeat, dial_address
from legato.cluster.security_rules import own_access

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.cluster.actors.plans import RouterPlan
    from legato.cluster.actors.router_actor import RouterPlace
    from legato.cluster.client_access import ClientAccess

RETURN_TIMEOUT_S = 60.0  # with no router serving for so long, the service ends
RETRY_S = 0.5


class RouterLink:
    """One router: where it serves, whether it lives, what it was asked."""

    def __init__(self, handle: Any, number: int, access: ClientAccess) -> None:  # noqa: ANN401  # an actor handle has no static type
        self.handle = handle
        self.number = number
        self._access = access
        self.place: RouterPlace | None = None  # while it serves
        self.address = ""  # once known, the same for ever
        self.http_address = ""  # so is this one
        self.failure = ""  # why it will never serve (again)
        self.asked_to_end: float | None = None  # by whom nobody has listened to yet
        self._heartbeat: Heartbeat | None = None
        self._next_ask_s = 0.0
        self._place_call = handle.place.remote()
        self._end_call = handle.end_asked.remote()

    def look(self, now_s: float) -> str:
        """Takes note of what happened since the last look; returns it in words, or nothing."""
        if self.failure or now_s < self._next_ask_s:
            return ""
        return self._look_at_end(now_s) or self._look_at_place(now_s) or self._look_at_silence()

    def stop_listening(self) -> None:
        """From now on its silence is right."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _look_at_end(self, now_s: float) -> str:
        """The call that lives as long as the process."""
        if not _done(self._end_call):
            return ""
        try:
            self.asked_to_end = ray.get(self._end_call)
            self._end_call = self.handle.end_asked.remote()
        except ActorUnavailableError:
            was_serving, self.place = self.place is not None, None
            self._next_ask_s = now_s + RETRY_S
            self._end_call = self.handle.end_asked.remote()
            self._place_call = self.handle.place.remote()
            return f"router {self.address} ended; it is started again" if was_serving else ""
        except RayActorError:
            self._fail(f"ended: {outcome(self._end_call)}")
        return ""

    def _look_at_place(self, now_s: float) -> str:
        if self.place is not None or not _done(self._place_call):
            return ""
        try:
            self.place = place = ray.get(self._place_call)
        except ActorUnavailableError:
            self._next_ask_s = now_s + RETRY_S
            self._place_call = self.handle.place.remote()
            return ""
        except RayTaskError as error:
            self._fail(str(error.cause) or repr(error.cause))
            return ""
        except RayActorError:
            self._fail(f"ended: {outcome(self._place_call)}")
            return ""
        is_back, self.address = bool(self.address), place.address
        self.http_address = place.http_address
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(dial_address(self.address), self._access)
        self._heartbeat.forgive()
        return f"router {self.address} serves again" if is_back else ""

    def _look_at_silence(self) -> str:
        """A process that has ended is told by Ray; one that hangs, by nobody else."""
        if self.place is None or self._heartbeat is None:
            return ""
        if self._heartbeat.silent_for_s <= SILENCE_S:
            return ""
        end_process(self.place.process)
        self._heartbeat.forgive()
        return f"router {self.address} has not answered for {SILENCE_S:g} s; it is ended"

    def _fail(self, reason: str) -> None:
        self.place, self.failure = None, reason


class RouterGroup:
    """All of them. One that dies or hangs is started again, at the address that it had."""

    def __init__(self, controller: Any, plan: RouterPlan, settings: Mapping[str, Any]) -> None:  # noqa: ANN401  # an actor handle has no static type
        """`settings` are Ray's, of each. The routers end with this process."""
        # Health is open to all: what asks for it shows no token.
        access = replace(own_access(plan.options), token=None)
        router = ray.remote(RouterActor).options(**settings, max_restarts=-1, max_task_retries=0)
        self._links = [
            RouterLink(router.remote(controller, plan, number), number, access)
            for number in range(plan.num_routers)
        ]
        self._all_gone_since_s: float | None = None
        self._failure = ""

    def look(self, now_s: float) -> list[str]:
        """Takes note of what happened; returns what a person should know. A few times a second."""
        news = [text for link in self._links if (text := link.look(now_s))]
        if any(link.place is not None for link in self._links) or not all(
            link.address for link in self._links
        ):
            self._all_gone_since_s = None
        elif self._all_gone_since_s is None:
            self._all_gone_since_s = now_s
        elif now_s - self._all_gone_since_s > RETURN_TIMEOUT_S:
            self._failure = f"no router has served for {RETURN_TIMEOUT_S:g} s"
        return news

    def failure(self) -> str:
        """Why the service cannot go on; empty while it can."""
        failed = [link for link in self._links if link.failure]
        if failed and len(failed) == len(self._links):
            return f"the router {failed[0].failure}"
        return self._failure

    def start_failure(self) -> str:
        """Why one of them cannot serve, before the first has."""
        return next((link.failure for link in self._links if link.failure), "")

    def addresses(self) -> list[str]:
        """Of all, in order, once all have served; before that empty."""
        addresses = [link.address for link in self._links]
        return addresses if all(addresses) else []

    def http_addresses(self) -> list[str]:
        """Of the HTTP endpoints of those that have served, in order."""
        return [link.http_address for link in self._links if link.http_address]

    def end_asked(self) -> float | None:
        """The seconds given to running requests, each time that somebody asked any of them for the
        end.
        """
        for link in self._links:
            seconds, link.asked_to_end = link.asked_to_end, None
            if seconds is not None:
                return seconds
        return None

    def begin_drain(self, drain_timeout_s: float) -> list[Any]:
        """Closes them to new requests; the calls end with the running ones. May be called again,
        with another time.
        """
        for link in self._links:
            link.stop_listening()
        return [link.handle.drain.remote(drain_timeout_s) for link in self._links]

    def begin_close(self, num_cut: int) -> list[Any]:
        """Closes their ports, after the drain; whoever waits for it is told how many were cut."""
        return [link.handle.close.remote(num_cut) for link in self._links]

    def kill(self) -> None:
        """Ends them for good, at once."""
        for link in self._links:
            link.stop_listening()
            ray.kill(link.handle, no_restart=True)


def _done(call: Any) -> bool:  # noqa: ANN401  # Ray's references have no static type
    done, _ = ray.wait([call], timeout=0)
    return bool(done)

"""StopMatcher: finds stop strings in a stream of text and holds back what may become one."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """One answer's. Text that may be the start of a stop string is held until that is decided.

    The stop string that is complete first, counted in characters, ends the text, however the text
    is cut into pieces; of several that complete at the same character, the longest. So nothing
    has to be waited for once one is complete. The text ends where that string begins.

    An Aho-Corasick automaton: each character costs constant time on average, whatever the number,
    length and overlap of the stop strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not text for text in stop):
            raise ValueError("a stop string must not be empty")
        # Node 0 is the root; a node is the text on the way to it.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends here
        self._fail = [0]  # the longest proper suffix that is a node too
        for text in stop:
            self._insert(text)
        self._link()
        self._node = 0
        self._held = ""  # text not delivered; its last `depth` characters are the node's
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matched

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Takes new text; returns what may be delivered. After a match it returns nothing more.

        With `may_stop` false (min_tokens not reached), text passes and a match that completes in
        it is ignored. One that begins in it and completes later counts, and is held back.
        """
        if self._matched is not None:
            return ""
        offset = len(self._held)
        for position, char in enumerate(text):
            self._step(char)
            match = self._match[self._node]
            if match is None:
                continue
            if may_stop:
                self._matched = match
                whole = self._held + text
                self._held = ""
                return whole[: offset + position + 1 - len(match)]
            # Ignored: what is over cannot become a stop string again, its tail can.
            while self._node and not self._next[self._node]:
                self._node = self._fail[self._node]
        whole = self._held + text
        certain = len(whole) - self._depth[self._node]
        self._held = whole[certain:]
        return whole[:certain]

    def flush(self) -> str:
        """What was held back, at an end that is no stop string."""
        rest, self._held, self._node = self._held, "", 0
        return rest

    def _step(self, char: str) -> None:
        node = self._node
        while node and char not in self._next[node]:
            node = self._fail[node]
        self._node = self._next[node].get(char, 0)

    def _insert(self, text: str) -> None:
        node = 0
        for char in text:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
                self._fail.append(0)
            node = child
        self._match[node] = text

    def _link(self) -> None:
        """Sets `fail` and inherits matches, shortest nodes first."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                fail = self._fail[node]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)

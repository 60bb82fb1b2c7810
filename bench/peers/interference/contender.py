"""Contender: who is compared, and with which chunk of prompts where it is tuned."""

from __future__ import annotations

from dataclasses import dataclass

PAIR = "legato"  # one prefill and one decode worker, a core each
PINNED = "legato-pinned"  # the same, with a core that the decode worker shares with nobody
COLOCATED = "legato-colocated"  # one worker on all cores
ENGINE = "engine"  # ours too: one engine on all cores, driven in its own process
OURS = (PAIR, PINNED, COLOCATED, ENGINE)
SERVERS = ("vllm", "llamacpp")
ENGINES = ("openvino", "transformers", "onnxgenai")
PEERS = (*SERVERS, *ENGINES)


@dataclass(frozen=True)
class Contender:
    """`chunk`: most prompt tokens of a step, by the peer's own setting; None: as it comes."""

    peer: str
    chunk: int | None = None

    @classmethod
    def of(cls, text: str) -> Contender:
        """From `NAME` or `NAME:CHUNK`.

        Raises:
            ValueError: nobody is called so, ours has no such setting, or it is no number.
        """
        name, colon, number = text.partition(":")
        if name not in (*OURS, *PEERS):
            raise ValueError(f"{name!r} is none of {', '.join((*OURS, *PEERS))}")
        if not colon:
            return cls(name)
        if name in OURS or name == "onnxgenai":
            raise ValueError(f"{text!r}: {name} is not tuned by a chunk")
        if not number.isdigit() or int(number) < 1:
            raise ValueError(f"{text!r}: the chunk must be a number of at least 1")
        return cls(name, int(number))

    @property
    def label(self) -> str:
        """As it was written."""
        return self.peer if self.chunk is None else f"{self.peer}:{self.chunk}"

    @property
    def is_peer(self) -> bool:
        """False: ours."""
        return self.peer in PEERS

"""HandoffError: why KV was not handed over, and whose fault it was."""

from __future__ import annotations

import socket

from legato.protos.printable import printable


class HandoffError(Exception):
    """The KV was not handed over; the message says why. `decode_lost`: the decode side `refused`,
    or does not come within reach, another one may take it; else the fault is this worker's.
    """

    def __init__(self, message: str, *, decode_lost: bool, refused: bool = False) -> None:
        super().__init__(printable(message))
        self.decode_lost = decode_lost
        self.refused = refused


def out_of_reach(address: str, why: str) -> HandoffError:
    """For good."""
    return HandoffError(f"decode worker at {address} is out of reach: {why}", decode_lost=True)


def check_own_sockets() -> None:
    """gRPC tells of a want of this process as if the other side were not there.

    Raises:
        HandoffError: it has no file descriptor left, or may make no socket for another reason.
    """
    try:
        socket.socket().close()
    except OSError as error:
        raise own_fault(error) from None


def own_fault(error: OSError) -> HandoffError:
    """This machine does not give what a link needs."""
    return HandoffError(f"this worker can open no link: {error}", decode_lost=False)

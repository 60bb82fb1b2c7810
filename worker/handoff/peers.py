"""PeerChannels: connections to the decode workers that KV is sent to."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from legato.worker.channel import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Idle connections kept open. Decode workers come and go; their old addresses must not pile up.
MAX_IDLE_CHANNELS = 16


@dataclass(eq=False)
class _Peer:
    channel: grpc.aio.Channel
    users: int = 0
    broken: bool = False


class PeerChannels:
    """One channel an address, shared by its transfers. One that failed is not used again."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}  # the least recently used first

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Lends a channel; an exception in the `with` block marks it as broken."""
        peer = self._peers.pop(address, None)
        if peer is None:
            peer = _Peer(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
        self._peers[address] = peer
        peer.users += 1
        try:
            yield peer.channel
        except Exception:
            peer.broken = True
            if self._peers.get(address) is peer:
                del self._peers[address]
            raise
        finally:
            peer.users -= 1
            if peer.broken and peer.users == 0:
                await peer.channel.close()
            await self._close_surplus()

    async def close(self) -> None:
        """Closes all; transfers under way on them fail."""
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            await peer.channel.close()

    async def _close_surplus(self) -> None:
        idle = [address for address, peer in self._peers.items() if peer.users == 0]
        surplus = [self._peers.pop(address) for address in idle[:-MAX_IDLE_CHANNELS]]
        for peer in surplus:
            await peer.channel.close()

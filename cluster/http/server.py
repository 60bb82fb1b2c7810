"""HttpServer: the endpoint's port and its server, in the router's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Any

import uvicorn

from legato.cluster.http.app import create_app
from legato.cluster.http.bounded_connection import bounded_connections
from legato.cluster.http.idle_connections import HEAD_TIMEOUT_S, IdleConnections, most_idle
from legato.cluster.http.rare_lines import write_rarely
from legato.cluster.open_files import PORT_SHARE, share_of_open_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.cluster.http.front_door import Authorize
    from legato.cluster.router import Router
    from legato.protos.tls_files import TlsFiles

BACKLOG = 2048
# Of the files that the process may open, how many connections the event loop takes in one turn: a
# few turns pass before what is beyond the bound is closed again.
AT_ONCE_SHARE = 1 / 64
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2  # for connections to take what has been written; uvicorn counts whole seconds
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, which would meet the closing
# A client that is gone without a word: its host has been switched off, or a cable is cut.
IDLE_BEFORE_PROBE_S, PROBE_PERIOD_S, SILENCE_MS = 10, 5, 30_000
IDLE_CHECK_S = 1.0
TLS_CHECK_S = 10.0

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Without signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Has its port from construction on.

    Raises:
        OSError: naming the address, where nobody can listen there.
    """

    def __init__(
        self,
        router: Router,
        host: str,
        port: int,
        *,
        authorize: Authorize | None = None,
        tls: TlsFiles | None = None,
        most_idle_connections: int | None = None,
        most_connections: int | None = None,
    ) -> None:
        """`tls`: as gRPC's port has it; with a CA clients need a certificate of it. By default
        shares of the files that the process may open bound connections, and those that are idle.
        """
        write_rarely(logging.getLogger("uvicorn.error"))  # which has a line for each wrong request
        self._socket = _listen(host, port)
        bound_host, bound_port = self._socket.getsockname()[:2]
        url_host = f"[{bound_host}]" if ":" in bound_host else bound_host
        self.address = f"{url_host}:{bound_port}"
        self._tls = tls
        self._idle = IdleConnections(
            most_idle() if most_idle_connections is None else most_idle_connections
        )
        if most_connections is None:
            most_connections = share_of_open_files(PORT_SHARE)
        self._connection = bounded_connections(most_connections, self._idle)
        self._stamp = None if tls is None else tls.stamp()
        self._server = _Server(
            uvicorn.Config(
                create_app(router, authorize=authorize),
                http=self._connection,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_TIMEOUT_S,
                **_tls_settings(tls),
            )
        )
        self._tasks: list[asyncio.Task[None]] = []

    def close(self) -> None:
        """Gives the port back, before `start`."""
        self._socket.close()

    async def start(self) -> None:
        """Returns when it serves."""
        serving = asyncio.create_task(self._server.serve([]))
        self._tasks = [
            serving,
            asyncio.create_task(self._end_idle()),
            asyncio.create_task(self._keep_tls()),
        ]
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:  # it tells nobody
                if serving.done():
                    serving.result()
                await asyncio.sleep(0.001)
        await self._listen()

    async def _listen(self) -> None:
        """As uvicorn would, which has no bound on TLS handshakes and one number for two: what
        waits in the kernel takes no files of ours, what is accepted does.
        """
        config, state = self._server.config, self._server.server_state

        def new_connection() -> asyncio.Protocol:
            return self._connection(
                config=config, server_state=state, app_state=self._server.lifespan.state
            )

        accepting = await asyncio.get_running_loop().create_server(
            new_connection,
            sock=self._socket,
            ssl=config.ssl,
            ssl_handshake_timeout=None if config.ssl is None else HEAD_TIMEOUT_S,
            backlog=max(1, min(BACKLOG, share_of_open_files(AT_ONCE_SHARE))),
        )
        self._server.servers.append(accepting)  # it closes them when it stops
        self._socket.listen(BACKLOG)

    async def stop(self) -> None:
        """Closes the port; requests that still run are cancelled."""
        self._server.should_exit = True
        serving, *others = self._tasks
        for task in others:
            task.cancel()
        _, running = await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S + 1)
        for task in running:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=1)
        if serving.done() and not serving.cancelled():
            serving.result()

    async def _end_idle(self) -> None:
        """Connections that never send a request's head whole would stay for ever, and those without
        a request could take the place of all others.
        """
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            for connection in self._idle.to_end(self._server.server_state.connections):
                connection.transport.abort()

    async def _keep_tls(self) -> None:
        while True:
            await asyncio.sleep(TLS_CHECK_S)
            self._renew_tls()

    def _renew_tls(self) -> None:
        """New files count for new connections; where they are wrong those before go on."""
        context, tls = self._server.config.ssl, self._tls
        if context is None or tls is None:
            return
        try:
            stamp = tls.stamp()
            if stamp != self._stamp:
                tls.check()
                context.load_cert_chain(tls.cert_file, tls.key_file)
                self._stamp = stamp
        except (OSError, ValueError) as error:
            log.warning("the HTTP endpoint's certificate stays as it was: %s", error)


def _tls_settings(tls: TlsFiles | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
        "ssl_ca_certs": tls.ca_file,
        "ssl_cert_reqs": ssl.CERT_NONE if tls.ca_file is None else ssl.CERT_REQUIRED,
    }


def _listen(host: str, port: int) -> socket.socket:
    """A socket that nobody shares: a second service on the port fails to start."""
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise OSError(f"cannot listen on {at}: {error.strerror}") from error
    try:
        # Connections that linger from before do not count, listeners do.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The connections have these of it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_BEFORE_PROBE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_PERIOD_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = "the port is taken by another process"
        raise OSError(f"cannot listen on {at} for HTTP: {reason}") from error
    return listener

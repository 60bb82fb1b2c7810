"""main: where the program `legato` begins; Ctrl-C ends it quietly from the first moment on."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130  # exit code


def main() -> None:
    """Runs the command line; one line on stderr and a non-zero code where something is wrong."""
    # While modules load there is nothing to tidy up, and an exception in there would be told with
    # their code. Who ignores the signal, as in the background of a shell, goes on ignoring it.
    before = signal.getsignal(signal.SIGINT)
    quiet = before is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, _leave)
    if sys.argv[1:2] not in (
        ["serve"],
        ["demo"],
    ):  # their workers' words are for whoever mends them
        # gRPC's C part writes lines of its own where a handshake fails, beside ours.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from legato.cluster.cli.app import load_app

        app = load_app()
    finally:
        if quiet:
            signal.signal(signal.SIGINT, before)
    try:
        code = app()
    except KeyboardInterrupt:  # between the commands' own handling and here
        code = INTERRUPTED
    sys.exit(code)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

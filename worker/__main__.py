"""`python -m legato.worker`: one worker process without Ray."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import get_args

from legato.protos.internal_access import InternalAccess
from legato.protos.tls_files import TlsFiles
from legato.worker.byte_size import parse_byte_size, parse_byte_size_or_0, parse_fraction
from legato.worker.config import KV_WIRES, WEIGHTS, KvLane, WorkerConfig

EXIT_CANNOT_START = 2
EXIT_SECOND_SIGNAL = 130
_PR_SET_PDEATHSIG = 1
_STOP_GRACE_S = 1.0


def main() -> int:
    """Serves until a signal; returns the exit status."""
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if arguments.die_with_parent:
        _die_with_parent()
    try:
        config = _config(arguments)
    except ValueError as error:
        return _cannot_start(error)
    if config.num_threads is not None:
        # Before torch is imported: OpenMP reads it once.
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
    return asyncio.run(_serve(config, arguments.drain_timeout))


def _config(arguments: argparse.Namespace) -> WorkerConfig:
    fraction = parse_fraction(arguments.kv_memory, "--kv-memory")
    kv_memory_bytes = WorkerConfig.kv_memory_bytes
    if fraction is None:
        kv_memory_bytes = parse_byte_size(
            arguments.kv_memory, "--kv-memory", ", or a fraction in (0, 1]"
        )
    swap_memory_bytes = None
    if arguments.swap_memory is not None:
        swap_memory_bytes = parse_byte_size_or_0(arguments.swap_memory, "--swap-memory")
    return WorkerConfig(
        model=arguments.model,
        role=arguments.role,
        host=arguments.host,
        port=arguments.port,
        device=arguments.device,
        dtype=arguments.dtype,
        kv_cache=arguments.kv_cache,
        kv_lane=arguments.kv_lane,
        kv_wire=arguments.kv_wire,
        deterministic=arguments.deterministic,
        weights=arguments.weights,
        kv_memory_bytes=kv_memory_bytes,
        kv_memory_fraction=fraction,
        swap_memory_bytes=swap_memory_bytes,
        admission=arguments.admission,
        admission_risk=arguments.admission_risk,
        block_size=arguments.block_size,
        prefill_chunk_tokens=arguments.prefill_chunk_tokens,
        prefix_cache=arguments.prefix_cache,
        otlp_endpoint=arguments.otlp_endpoint,
        max_batch_size=arguments.max_batch_size,
        context_length=arguments.context_length,
        num_threads=arguments.threads,
        access=_access(arguments),
    )


def _access(arguments: argparse.Namespace) -> InternalAccess:
    given = [arguments.tls_cert, arguments.tls_key, arguments.tls_ca]
    if any(given) and not all(given):
        raise ValueError("--tls-cert, --tls-key and --tls-ca go together")
    secret = ""
    if arguments.secret_file is not None:
        try:
            secret = Path(arguments.secret_file).read_text().strip()
        except OSError as error:
            raise ValueError(f"--secret-file {arguments.secret_file}: {error.strerror}") from error
        if not secret:
            raise ValueError(f"--secret-file {arguments.secret_file} is empty")
    return InternalAccess(TlsFiles(*given) if any(given) else None, secret)


async def _serve(config: WorkerConfig, drain_timeout_s: float) -> int:
    from legato.worker.server import WorkerServer  # imports torch: see main
    from legato.worker.spare_memory import keep_objects

    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_SECOND_SIGNAL)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    server = WorkerServer(config)
    start = loop.create_task(server.start())
    stopping = loop.create_task(stop.wait())
    await asyncio.wait((start, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        os._exit(
            0
        )  # asked to end while loading: nothing is served, and loading cannot be cancelled
    try:
        address = await start
    except (ValueError, OSError) as error:
        return _cannot_start(error)
    keep_objects()
    ready = {
        "event": "ready",
        "worker_id": server.worker_id,
        "address": address,
        "pid": os.getpid(),
    }
    print(json.dumps(ready), flush=True)
    await stopping
    if not await server.drain(drain_timeout_s):
        logging.getLogger(__name__).warning("calls were cut off after %g s", drain_timeout_s)
    await server.stop(_STOP_GRACE_S)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m legato.worker", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, a .gguf file, a hub id or demo")
    parser.add_argument("--role", required=True, choices=("prefill", "decode", "colocated"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache", default="auto", help="auto, fp8 or int8")
    parser.add_argument(
        "--kv-lane",
        default="auto",
        choices=get_args(KvLane),
        help="auto: KV goes through shared memory to decode workers on this host; grpc: never",
    )
    parser.add_argument(
        "--kv-wire",
        default="same",
        help=f"what KV is sent as between workers, the same on all: {', '.join(KV_WIRES)}",
    )
    parser.add_argument("--weights", default="auto", help=", ".join(WEIGHTS))
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits for a request alone and in company on CUDA too, at some speed",
    )
    parser.add_argument(
        "--kv-memory",
        default="1GiB",
        help="a size, as 4GiB or plain bytes; or a number in (0, 1] without a unit: that fraction "
        "of what is free after the weights and a step",
    )
    parser.add_argument(
        "--swap-memory",
        default=None,
        help="of the host, for the KV of preempted sequences; 0: none. Default: as much as the "
        "KV pool, and at most a quarter of the machine's memory",
    )
    parser.add_argument("--admission", default="expected", choices=("expected", "reserve"))
    parser.add_argument(
        "--admission-risk",
        type=float,
        default=WorkerConfig.admission_risk,
        help="in [0, 1): the share of answers that may get longer than expected",
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prefill-chunk-tokens", type=int, default=2048)
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV of prompts' beginnings while there is room",
    )
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument(
        "--otlp-endpoint", default=None, help="an OTLP collector for what routers trace: host:port"
    )
    parser.add_argument("--context-length", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tls-cert", help="this worker's certificate, for routers and workers")
    parser.add_argument("--tls-key", help="its key")
    parser.add_argument("--tls-ca", help="who signed the routers' and other workers' certificates")
    parser.add_argument("--secret-file", help="holds what callers have to know")
    parser.add_argument("--drain-timeout", type=float, default=30.0, help="seconds")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end when the starting process ends (Linux)"
    )
    return parser


def _die_with_parent() -> None:
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the call took effect
        os._exit(EXIT_CANNOT_START)


def _cannot_start(error: Exception) -> int:
    print(f"legato worker cannot start: {error}", file=sys.stderr, flush=True)
    return EXIT_CANNOT_START


if __name__ == "__main__":
    sys.exit(main())

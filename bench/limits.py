"""Limits: what this machine can do at most, measured: memory reads and matrix products.

    python -m legato.bench.limits --threads 2

Cloud machines change from hour to hour, so a figure means something only beside limits that were
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels import huge_pages
from legato.worker.loading import choose_device

if TYPE_CHECKING:
    from collections.abc import Callable

BUFFER_BYTES = 512 << 20  # far beyond any L3
MATRIX_SIZE = 2048
_FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Rate:
    """The fastest and the middle one of several tries, in units a second."""

    best: float
    median: float


@dataclass(frozen=True)
class Limits:
    """What was measured; operations are multiplications and additions, counted apart."""

    num_threads: int
    read_bytes_per_s: Rate
    matmul_ops_per_s: dict[str, Rate | None]  # by dtype; None: this torch or device has none


def best_of(first: Limits, second: Limits) -> Limits:
    """The better of each rate: of what was measured before and after a run."""
    return Limits(
        num_threads=first.num_threads,
        read_bytes_per_s=_better(first.read_bytes_per_s, second.read_bytes_per_s),
        matmul_ops_per_s={
            name: None if rate is None or other is None else _better(rate, other)
            for (name, rate), other in zip(
                first.matmul_ops_per_s.items(), second.matmul_ops_per_s.values(), strict=True
            )
        },
    )


def _better(first: Rate, second: Rate) -> Rate:
    return Rate(max(first.best, second.best), max(first.median, second.median))


def measure_limits(
    num_threads: int,
    device: torch.device | None = None,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    matrix_size: int = MATRIX_SIZE,
    num_tries: int = 7,
) -> Limits:
    """Takes about two seconds. Sets torch's number of threads back afterwards.

    float16 is left out: CPUs without instructions for it take a minute for one product.
    """
    device = device or torch.device("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        products: dict[str, Rate | None] = {
            name: _float_product(dtype, device, matrix_size, num_tries)
            for name, dtype in _FLOAT_DTYPES.items()
        }
        products["int8"] = _int8_product(device, matrix_size, num_tries)
        read = _memory_read(num_threads, device, buffer_bytes, num_tries)
    finally:
        torch.set_num_threads(before)
    return Limits(num_threads, read, products)


def _memory_read(num_threads: int, device: torch.device, num_bytes: int, tries: int) -> Rate:
    # One row a thread: a sum of all at once was 10 % slower on two cores.
    rows = num_threads if device.type == "cpu" else 1024
    width = num_bytes // 4 // rows
    if device.type == "cpu":  # pages of 4 KB cost a fifth of the bandwidth
        buffer = huge_pages.empty((rows, width), torch.float32).fill_(1)
    else:
        buffer = torch.ones(rows, width, device=device)
    return _rate(lambda: buffer.sum(1), buffer.nbytes, device, tries)


def _float_product(dtype: torch.dtype, device: torch.device, size: int, tries: int) -> Rate:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _rate(lambda: a @ b, 2 * size**3, device, tries)


def _int8_product(device: torch.device, size: int, tries: int) -> Rate | None:
    a = torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device)
    b = torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device)
    try:
        return _rate(lambda: torch._int_mm(a, b), 2 * size**3, device, tries)
    except (NotImplementedError, RuntimeError):  # not built for this device
        return None


def _rate(run: Callable[[], object], units: int, device: torch.device, tries: int) -> Rate:
    run()
    seconds = []
    for _ in range(tries):
        started_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    return Rate(best=units / min(seconds), median=units / statistics.median(seconds))


def main() -> None:
    """Prints the limits as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m legato.bench.limits", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")
    try:
        device = choose_device(args.device)
    except ValueError as error:
        parser.error(f"--{error}")
    print(json.dumps(asdict(measure_limits(args.threads, device))))


if __name__ == "__main__":
    main()

"""What must be set before the first test module is imported, and what holds for every test.

Triton kernels run in Triton's interpreter where there is no CUDA device; Triton reads the variable
when it is imported, which any test module may do through transformers. And torch takes one thread,
here and in the processes that tests start: the models of tests are so small that more threads spend
most of their time waiting for each other, the longer the more of them run beside each other. Tests
of many threads say how many.
"""

from __future__ import annotations

import os
import signal
import zlib
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No bound on one example's time: it would tell of the machine's other work.
settings.register_profile("legato", deadline=None)
settings.load_profile("legato")
# A shell without job control starts its background jobs with Ctrl-C ignored, and children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


SEED = int(os.environ.get("LEGATO_SEED", "0"))


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Torch draws the same in each run, and its own for each test."""
    torch.manual_seed(SEED ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def signals_left_alone() -> Iterator[None]:
    """A handler that a test left behind would swallow the signals of those after it."""
    yield
    for number in (signal.SIGINT, signal.SIGTERM):
        expected = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        assert signal.getsignal(number) is expected, f"{number.name} is handled by others now"

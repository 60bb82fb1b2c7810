"""Runs Triton kernels in Triton's interpreter where there is no CUDA device.

Triton reads the variable when it is imported, which any test module may do through transformers:
so it is set here, before the first of them.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell without job control starts its background jobs with Ctrl-C ignored, and children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def signals_left_alone() -> Iterator[None]:
    """A handler that a test left behind would swallow the signals of those after it."""
    yield
    for number in (signal.SIGINT, signal.SIGTERM):
        expected = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        assert signal.getsignal(number) is expected, f"{number.name} is handled by others now"

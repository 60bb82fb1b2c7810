"""Capture: a forward pass taken down once, to be run again on the same memory in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from legato.kernels import native
from legato.kernels.choose import argmax

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Captured(Protocol):
    """A captured pass. Its results are valid from one `replay` to the next of any pass."""

    logits: Tensor  # [R, vocab_size] fp32
    best: Tensor  # [R] int64, their `argmax`: computed here it costs no call of its own

    def replay(self) -> None:
        """Runs it; on a device, queues it."""
        ...


class CpuProgram:
    """By `kernels.native`."""

    def __init__(self, forward: Callable[[], Tensor]) -> None:
        with native.record() as self._program:
            self.logits = forward()
            self.best = argmax(self.logits)

    def replay(self) -> None:
        """Blocks, without the interpreter lock."""
        self._program.run(torch.get_num_threads())


class CudaGraph:
    """By CUDA. All graphs of an engine share one memory pool: only one runs at a time."""

    def __init__(self, forward: Callable[[], Tensor], pool: Any) -> None:  # noqa: ANN401  # torch keeps the handle's type to itself
        """`pool`: from `torch.cuda.graph_pool_handle`."""
        # Once without capturing: Triton compiles and loads its kernels at their first launch.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no type for it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self.logits = forward()
            self.best = argmax(self.logits)

    def replay(self) -> None:
        """Queues it on the current stream."""
        self._graph.replay()

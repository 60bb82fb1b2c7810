"""native: the CPU kernels in C, called one by one or recorded into a program and run at once.

An operation is a C function and its sizes, scalars and tensors. Called from Python, each costs
some microseconds; a decode step has hundreds. So a forward pass is recorded once (`record`) and
then run in one call, without the interpreter lock, by a team of threads that sleeps in between.

The best library for this CPU is used; `LEGATO_CPU_LEVEL=avx2` (or another level's name) in the
environment takes that one, to look for errors and for tests.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Best first: a library, and the CPU features (as Linux names them) that it needs.
_LEVELS = (
    (
        "avx512_bf16",
        {
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512dq",
            "avx512_vnni",
            "avx512_bf16",
            "avx512vbmi",
        },
    ),
    ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    ("avx2", {"avx2", "fma", "f16c", "bmi2"}),
    ("base", set[str]()),
)
_MAX_SIZES, _MAX_SCALARS, _MAX_POINTERS = 16, 4, 14
_LAYOUT = struct.Struct(f"P{_MAX_SIZES}q{_MAX_SCALARS}d{_MAX_POINTERS}P")
_recording = threading.local()


@dataclass
class Program:
    """A recorded sequence of operations. It keeps every tensor that it touches alive; running it
    again reads and writes the same memory, so new inputs are copied into the old tensors.
    """

    num_ops: int = 0
    _code: bytearray = field(default_factory=bytearray, repr=False)
    _buffer: ctypes.Array[ctypes.c_char] | None = field(default=None, repr=False)
    _tensors: list[Tensor] = field(default_factory=list, repr=False)

    def add(
        self,
        name: str,
        tensors: Sequence[Tensor | None],
        sizes: Sequence[int],
        scalars: Sequence[float],
    ) -> None:
        """Appends one operation; see `launch`."""
        self._code += _encode(name, tensors, sizes, scalars)
        self._tensors += [tensor for tensor in tensors if tensor is not None]
        self.num_ops += 1

    def run(self, num_threads: int) -> None:
        """Runs all operations in order. Blocks, without the interpreter lock."""
        if self._buffer is None:
            self._buffer = _buffer(self._code)
        _run(self._buffer, self.num_ops, num_threads)


def level() -> str | None:
    """The instruction level of the library in use; None: there is none for this CPU."""
    library = _library()
    return None if library is None else library[0]


def available() -> bool:
    """Whether the CPU kernels were compiled for this machine."""
    return _library() is not None


def takes(*tensors: Tensor | None) -> bool:
    """Whether an operation on these fp32 activations goes to the C kernels.

    Raises:
        RuntimeError: a program is being recorded, and it cannot.
    """
    fits = available() and all(
        t is None or (t.device.type == "cpu" and t.dtype == torch.float32) for t in tensors
    )
    if not fits and recording():
        raise RuntimeError(
            "a recorded program holds C kernels only; got tensors of "
            f"{[(t.device.type, t.dtype) for t in tensors if t is not None]}"
        )
    return fits


def recording() -> bool:
    """Whether this thread is recording a program."""
    return getattr(_recording, "program", None) is not None


@contextmanager
def record() -> Iterator[Program]:
    """Operations launched by this thread inside are recorded, not run."""
    if recording():
        raise RuntimeError("a program is being recorded already")
    program = Program()
    _recording.program = program
    try:
        yield program
    finally:
        _recording.program = None


def launch(
    name: str,
    tensors: Sequence[Tensor | None],
    sizes: Sequence[int],
    scalars: Sequence[float] = (),
    *,
    num_tasks: int | None = None,
) -> None:
    """Runs, or records, the C function `name` on at most 14 tensors, 16 sizes and 4 scalars.

    Shapes, strides and dtypes are the caller's to check: C does not. `num_tasks`: into how many
    the operation can be divided; when it is run at once, no more threads are woken.
    """
    program: Program | None = getattr(_recording, "program", None)
    if program is not None:
        program.add(name, tensors, sizes, scalars)
        return
    num_threads = torch.get_num_threads()
    if num_tasks is not None:
        num_threads = min(num_threads, num_tasks)
    _run(_buffer(_encode(name, tensors, sizes, scalars)), 1, num_threads)


@cache
def direct(
    name: str, result: type[ctypes._SimpleCData[int]], *arguments: type
) -> Callable[..., int]:
    """The C function `name`, to be called as it is: by the caller's thread alone, without the
    interpreter lock, and without waiting for a program that runs.
    """
    library = _library()
    assert library is not None, "called without a library"
    function = library[1][name]  # an object of its own: attributes are shared
    function.restype, function.argtypes = result, arguments
    return cast("Callable[..., int]", function)


def _encode(
    name: str, tensors: Sequence[Tensor | None], sizes: Sequence[int], scalars: Sequence[float]
) -> bytes:
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return _LAYOUT.pack(
        _function(name),
        *sizes, *(0,) * (_MAX_SIZES - len(sizes)),
        *scalars, *(0.0,) * (_MAX_SCALARS - len(scalars)),
        *pointers, *(0,) * (_MAX_POINTERS - len(pointers)),
    )  # fmt: skip


def _buffer(code: bytes | bytearray) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * len(code)).from_buffer_copy(code)


def _run(buffer: ctypes.Array[ctypes.c_char], num_ops: int, num_threads: int) -> None:
    library = _library()
    assert library is not None, "launched without a library"
    library[1].lg_run(buffer, num_ops, num_threads)


@cache
def _function(name: str) -> int:
    library = _library()
    assert library is not None, "launched without a library"
    address = ctypes.cast(getattr(library[1], name), ctypes.c_void_p).value
    assert address is not None
    return address


def levels() -> list[str]:
    """The levels that were built and that this CPU can run, best first."""
    features = _cpu_features()
    return [name for name, needed in _LEVELS if needed <= features and _file(name).exists()]


def _file(level_name: str) -> Path:
    return Path(__file__).with_name(f"native_{level_name}{EXTENSION_SUFFIXES[0]}")


@cache
def _library() -> tuple[str, ctypes.CDLL] | None:
    names = levels()
    wanted = os.environ.get("LEGATO_CPU_LEVEL")
    if wanted is not None:
        if wanted not in names:
            raise ImportError(f"LEGATO_CPU_LEVEL={wanted}: this CPU and build have {names}")
        names = [wanted]
    if not names:
        return None
    file = _file(names[0])
    library = ctypes.CDLL(str(file))
    library.lg_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.lg_run.restype = None
    library.lg_op_size.restype = ctypes.c_int64
    if library.lg_op_size() != _LAYOUT.size:
        raise ImportError(f"{file} was built from other sources; install legato again")
    return names[0], library


def _cpu_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())

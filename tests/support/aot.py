"""Compiles Triton kernels ahead of time for GPUs that are not here, and reads what they take.

A test file names its launches in a list `AOT_CASES`. A second process, without the interpreter,
runs them: the launchers are the real ones, on CPU tensors, but every kernel launch is written down
instead of made. What was written down is then compiled as a launch on the GPU would compile it
(same constants, warps and divisibility), and registers, stack and shared memory are read from the
binary by the tools that Triton's wheel carries. No GPU is needed.

In a kernel, annotate pointers as `tl.tensor`: the compiler evaluates the annotations of parameters,
and names that only type checkers import do not exist for it (the interpreter does not mind).

A test file named test_aot_*.py holds:

    AOT_CASES = [AotCase("silu fp32", lambda: gated_triton.activate("silu_mul", x, out))]

    @pytest.fixture(scope="module")
    def compiled(tmp_path_factory):
        return compile_file(Path(__file__), tmp_path_factory.mktemp("aot"))

    @pytest.mark.parametrize("case", chosen(AOT_CASES), ids=str)
    def test_aot_fits(case, compiled):
        check(case, compiled)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triton.runtime.jit import JITFunction

    Grid = Sequence[int] | Callable[[dict[str, object]], Sequence[int]]

ROOT = Path(__file__).parents[2]
ARCHES = (80, 90, 100)  # compute capability × 10
# Bytes a block may have. 8.0 and 8.7 have 163 KiB, but 8.6 and 8.9 have 99: what is compiled for
# 8.0 has to run on those as well.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTERS_PER_MULTIPROCESSOR = 65536
PROCESSES = 2
FULL = os.environ.get("LEGATO_AOT") == "full"


@dataclass(frozen=True)
class AotCase:
    """One or more launches, and for which GPUs they are compiled."""

    name: str
    launch: Callable[[], object]  # calls a launcher with CPU tensors
    arches: tuple[int, ...] = ARCHES
    full: bool = False  # compiled only with LEGATO_AOT=full
    max_stack_bytes: int = 0  # more than 0 where spilling is cheaper than what prevents it

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes on one GPU; `error` where it did not compile."""

    case: str
    kernel: str  # module.function
    arch: int
    grid: tuple[int, ...] = ()
    threads: int = 0  # of a block
    registers: int = 0  # of a thread
    stack_bytes: int = 0  # of a thread; more than 0: registers were spilled
    shared_bytes: int = 0  # of a block
    error: str | None = None


def chosen(cases: Sequence[AotCase]) -> list[AotCase]:
    """The cases of this run: all with LEGATO_AOT=full."""
    return [case for case in cases if FULL or not case.full]


def compile_file(test_file: Path, cache: Path) -> list[Compiled]:
    """Compiles the chosen AOT_CASES of a test file in a process of its own, two at a time."""
    return [Compiled(**fields) for fields in _run("compile", [test_file], cache)]


def missing_kernels(test_files: list[Path], cache: Path) -> tuple[list[str], list[str]]:
    """The kernels in kernels/*_triton.py that no case of these files launches, and all of them."""
    (names,) = _run("missing", test_files, cache)
    return names["missing"], names["all"]


def check(case: AotCase, compiled: Sequence[Compiled]) -> None:
    """Asserts that each kernel of a case compiled, does not spill and fits each of its GPUs."""
    mine = [result for result in compiled if result.case == case.name]
    assert {result.arch for result in mine} == set(case.arches), "a GPU was left out"
    for result in mine:
        where = f"{result.kernel} on sm_{result.arch}"
        assert result.error is None, f"{where}:\n{result.error}"
        where = f"{where}: {result}"
        assert result.stack_bytes <= case.max_stack_bytes, f"spills: {where}"
        assert result.shared_bytes <= SHARED_BYTES[result.arch], f"shared memory: {where}"
        assert result.registers * result.threads <= REGISTERS_PER_MULTIPROCESSOR, where
        assert len(result.grid) <= 3, where
        assert all(size <= 65535 for size in result.grid[1:]), where


def _run(verb: str, test_files: list[Path], cache: Path) -> list[Any]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        "TRITON_CACHE_DIR": str(cache),
    }
    environment.pop("TRITON_INTERPRET", None)
    process = subprocess.run(
        [sys.executable, __file__, verb, *map(str, test_files)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        pytest.fail(f"the compiling process failed:\n{process.stderr}")
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


# From here on: the second process.


@dataclass(frozen=True)
class _Launch:
    case: AotCase
    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    options: dict[str, object]


_LAUNCHES: list[_Launch] = []  # the workers that are forked after recording read it


class _Target:
    """Stands in for Triton's CUDA driver: the current device is an `arch` that is not here."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps compiled kernels by device

    def get_current_stream(self, _device: int) -> int:
        return 0


def _record(cases: Sequence[AotCase]) -> None:
    """Fills _LAUNCHES."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    for case in cases:

        def record(
            kernel: JITFunction,
            *arguments: object,
            grid: Grid,
            warmup: bool,
            case: AotCase = case,
            **options: object,
        ) -> None:
            assert not warmup
            grid = grid(options) if callable(grid) else grid
            _LAUNCHES.append(_Launch(case, kernel, tuple(grid), arguments, options))

        JITFunction.run = record
        try:
            before = len(_LAUNCHES)
            case.launch()
            assert len(_LAUNCHES) > before, f"{case.name} launched nothing"
        finally:
            JITFunction.run = run


def _compile(task: tuple[int, int]) -> Compiled:
    """Launch number and arch to what the kernel takes there."""
    from triton.runtime.driver import driver

    launch, arch = _LAUNCHES[task[0]], task[1]
    result = Compiled(launch.case.name, _name(launch.kernel), arch, launch.grid)
    driver.set_active(_Target(arch))
    try:
        kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
        registers, stack_bytes = _resources(kernel.asm["cubin"], kernel.hash)
    except Exception:  # whatever the compiler raises is the test's message
        return dataclasses.replace(result, error=traceback.format_exc(limit=-3))
    return dataclasses.replace(
        result,
        threads=32 * kernel.metadata.num_warps,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=kernel.metadata.shared,
    )


def _resources(cubin: bytes, name: str) -> tuple[int, int]:
    """Registers and bytes of stack (spilled registers and local arrays) of the one function."""
    import triton

    path = Path(os.environ["TRITON_CACHE_DIR"]) / f"{name}.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True
    ).stdout
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    return int(registers), int(stack) + int(local)


def _name(kernel: JITFunction) -> str:
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"


def _all_kernels() -> Iterator[str]:
    """Every kernel of kernels/*_triton.py; a jitted function that another one calls is none."""
    from triton.runtime.jit import JITFunction

    functions = {}
    for path in sorted((ROOT / "kernels").glob("*_triton.py")):
        module = importlib.import_module(f"legato.kernels.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.__module__ == module.__name__:
                functions[_name(value)] = value
    for name, function in functions.items():
        call = re.compile(rf"\b{function.__name__}\(")
        others = (other.src for other in functions.values() if other is not function)
        if not any(call.search(source) for source in others):
            yield name


def _cases(test_file: str) -> list[AotCase]:
    specification = importlib.util.spec_from_file_location(Path(test_file).stem, test_file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    cases = chosen(module.AOT_CASES)
    assert len({case.name for case in cases}) == len(cases), "two cases have one name"
    return cases


def _main(verb: str, test_files: list[str]) -> None:
    # The cases' AotCase is that of the module `aot`, not of `__main__`: work there.
    import aot

    for test_file in test_files:
        aot._record(aot._cases(test_file))
    if verb == "missing":
        missing = set(_all_kernels()) - {_name(launch.kernel) for launch in aot._LAUNCHES}
        print(json.dumps({"missing": sorted(missing), "all": sorted(_all_kernels())}))
        return
    tasks = [(i, arch) for i, launch in enumerate(aot._LAUNCHES) for arch in launch.case.arches]
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        for result in pool.imap_unordered(aot._compile, tasks):
            print(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])

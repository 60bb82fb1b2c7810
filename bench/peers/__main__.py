"""Our bare engine against its peers on this machine: interleaved rounds, medians, ratios.

    python -m legato.bench.peers --model DIR --venv openvino=DIR --venv llamacpp=DIR \\
        --venv vllm=DIR --precision bf16 --precision int8 --work-dir build/peers

Each peer lives in an environment of its own (docs/benchmarks.md says how to make them). A round
measures the machine's limits, then each contender in turn at each precision: its process is
started, warmed up, runs the workloads, and is ended before the next one starts. A run that had
to share the machine is repeated; the table says how much others took of it at worst. JSON lines
go to standard output as they come; the table goes last, to standard error. The exit status is 1
where a contender failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.bench.engine import DEFAULT_WORKLOADS, fractions
from legato.bench.limits import Limits, Rate
from legato.bench.peers.comparison import OURS, Turn, row_json, rows, table
from legato.bench.peers.machine_load import MachineLoad
from legato.bench.peers.peer_process import PeerError, PeerProcess
from legato.bench.workload import WORKLOADS, RequestTimes, Workload, summarise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from legato.bench.workload import Figures

PRECISIONS = ("fp32", "bf16", "int8", "int4")
RUNNERS = {
    OURS: "legato_runner.py",
    "llamacpp": "llama_cpp_runner.py",
    "onnxgenai": "onnxgenai_runner.py",
    "openvino": "openvino_runner.py",
    "transformers": "transformers_runner.py",
    "transformers-cb": "transformers_cb_runner.py",
    "vllm": "vllm_runner.py",
}
_LIMITS_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Plan:
    """What to compare."""

    model: Path
    vocab_size: int
    pythons: dict[str, str]  # by contender
    precisions: tuple[str, ...]
    workloads: tuple[Workload, ...]
    num_rounds: int
    num_threads: int
    work_dir: Path
    timeout_s: float  # for one answer: a load, a conversion, or one run of a workload
    max_others_share: float  # a run during which others took more of the machine is repeated
    num_tries: int  # at most; the one with the least is kept


@dataclass(frozen=True)
class Failure:
    """What a contender could not do."""

    contender: str
    precision: str
    error: str


async def compare(plan: Plan) -> tuple[list[Turn], list[Failure]]:
    """Runs all rounds. A contender that fails at a precision is left out of it from then on."""
    turns: list[Turn] = []
    failures: list[Failure] = []
    paths: dict[tuple[str, str], str] = {}
    for precision in plan.precisions:
        for name in plan.pythons:
            try:
                if (path := await _prepare(plan, name, precision)) is not None:
                    paths[name, precision] = path
            except PeerError as error:
                failures.append(Failure(name, precision, str(error)))
                _print({"failure": asdict(failures[-1])})
    for round_number in range(plan.num_rounds):
        limits = await _limits(plan.num_threads)
        _print({"round": round_number, "limits": asdict(limits)})
        for name, precision in list(paths):
            try:
                async for turn in _turns(plan, round_number, name, precision, paths, limits):
                    turns.append(turn)
                    _print({"turn": asdict(turn) | {"limits": None}})
            except (PeerError, ValueError) as error:  # ValueError: tokens are missing
                del paths[name, precision]
                failures.append(Failure(name, precision, str(error)))
                _print({"failure": asdict(failures[-1])})
    return turns, failures


async def _prepare(plan: Plan, name: str, precision: str) -> str | None:
    """What the contender will load; None where it has no such precision."""
    async with _process(plan, name) as peer:
        answer = await peer.ask(
            plan.timeout_s,
            op="prepare",
            model=str(plan.model),
            precision=precision,
            work_dir=str(plan.work_dir),
        )
    return None if answer["path"] is None else str(answer["path"])


async def _turns(
    plan: Plan,
    round_number: int,
    name: str,
    precision: str,
    paths: dict[tuple[str, str], str],
    limits: Limits,
) -> AsyncIterator[Turn]:
    dtype_name = {"fp32": "float32", "bf16": "bfloat16"}.get(precision, "int8")
    async with _process(plan, name) as peer:
        await peer.ask(
            plan.timeout_s,
            op="load",
            path=paths[name, precision],
            precision=precision,
            num_threads=plan.num_threads,
        )
        for workload in plan.workloads:
            runs = itertools.count()
            await _run(plan, peer, workload, next(runs))  # warms up
            tries = [await _run(plan, peer, workload, next(runs))]
            while tries[-1].others_share > plan.max_others_share and len(tries) < plan.num_tries:
                tries.append(await _run(plan, peer, workload, next(runs)))
            run = min(tries, key=lambda one: one.others_share)
            near = fractions(run.decode_bytes_per_s, run.prefill_ops_per_s, limits, dtype_name)
            yield Turn(
                round_number=round_number,
                contender=name,
                precision=precision,
                workload=workload,
                figures=run.figures,
                first_token_ids=run.first_token_ids,
                limits=limits,
                others_share=run.others_share,
                decode_of_bandwidth=near.decode_of_bandwidth,
                prefill_of_matmul=near.prefill_of_matmul,
            )


@dataclass(frozen=True)
class _Run:
    figures: Figures
    first_token_ids: list[int]
    others_share: float
    decode_bytes_per_s: float | None
    prefill_ops_per_s: float | None


async def _run(plan: Plan, peer: PeerProcess, workload: Workload, number: int) -> _Run:
    before = MachineLoad.now(peer.process_id)
    answer = await peer.ask(
        plan.timeout_s,
        op="run",
        prompts=workload.prompts(plan.vocab_size, number),
        num_at_once=workload.num_at_once,
        max_tokens=workload.max_tokens,
    )
    others_share = before.others_share(MachineLoad.now(peer.process_id))
    requests = answer["requests"]
    times = [RequestTimes(r["sent_s"], tuple(r["token_times_s"])) for r in requests]
    return _Run(
        figures=summarise(workload, times),
        first_token_ids=[request["token_ids"][0] for request in requests],
        others_share=others_share,
        decode_bytes_per_s=answer.get("decode_bytes_per_s"),
        prefill_ops_per_s=answer.get("prefill_ops_per_s"),
    )


def _process(plan: Plan, name: str) -> PeerProcess:
    runner = Path(__file__).parent / RUNNERS[name]
    return PeerProcess(plan.pythons[name], runner, plan.num_threads)


async def _limits(num_threads: int) -> Limits:
    """In a process of its own: torch's threads in this one would be there during the turns."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "legato.bench.limits", "--threads", str(num_threads),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _LIMITS_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"legato.bench.limits ended with {process.returncode}")
    return limits_from_json(json.loads(output))


def limits_from_json(values: dict[str, Any]) -> Limits:
    """Reads what `legato.bench.limits` prints."""
    products = values["matmul_ops_per_s"].items()
    return Limits(
        num_threads=values["num_threads"],
        read_bytes_per_s=Rate(**values["read_bytes_per_s"]),
        matmul_ops_per_s={name: Rate(**rate) if rate else None for name, rate in products},
    )


def _print(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares; 1 where a contender failed."""
    plan = _plan(arguments)
    plan.work_dir.mkdir(parents=True, exist_ok=True)
    turns, failures = asyncio.run(compare(plan))
    for row in rows(turns):
        _print(row_json(row))
    print(table(rows(turns), list(plan.pythons)), file=sys.stderr)
    for failure in failures:
        print(f"{failure.contender} at {failure.precision}: {failure.error}", file=sys.stderr)
    return 1 if failures else 0


def _plan(arguments: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(prog="python -m legato.bench.peers", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face folder")
    parser.add_argument(
        "--venv", action="append", default=[], metavar="NAME=DIR",
        help=f"a peer's environment; NAME is one of {', '.join(n for n in RUNNERS if n != OURS)}",
    )  # fmt: skip
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: bf16")
    parser.add_argument(
        "--workload", action="append", choices=sorted(WORKLOADS),
        help=f"default: {', '.join(DEFAULT_WORKLOADS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=Path("build/peers"))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one answer")
    parser.add_argument(
        "--max-others", type=float, default=0.05,
        help="repeat a run during which other processes took a larger share of the CPU time",
    )  # fmt: skip
    parser.add_argument("--tries", type=int, default=3, help="most runs to find a quiet one")
    args = parser.parse_args(arguments)
    pythons = {OURS: sys.executable}
    for given in args.venv:
        name, _, folder = given.partition("=")
        python = Path(folder) / "bin" / "python"
        if name not in RUNNERS or name == OURS or not python.is_file():
            parser.error(f"--venv {given}: no such peer, or no bin/python in the folder")
        pythons[name] = str(python.absolute())
    try:
        vocab_size = int(json.loads((args.model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--model {args.model}: config.json cannot be read: {error}")
    for name in ("rounds", "threads", "tries"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return Plan(
        model=args.model.absolute(),
        vocab_size=vocab_size,
        pythons=pythons,
        # A list without duplicates, in the order given.
        precisions=tuple(dict.fromkeys(args.precision or ("bf16",))),
        workloads=tuple(WORKLOADS[name] for name in args.workload or DEFAULT_WORKLOADS),
        num_rounds=args.rounds,
        num_threads=args.threads,
        work_dir=args.work_dir.absolute(),
        timeout_s=args.timeout,
        max_others_share=args.max_others,
        num_tries=args.tries,
    )


if __name__ == "__main__":
    sys.exit(main())

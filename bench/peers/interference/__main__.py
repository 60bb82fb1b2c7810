"""Streams that decode while long prompts arrive: ours and its peers on this machine, in turn.

    python -m legato.bench.peers.interference --model DIR --environments build/peers \\
        --peers legato,engine,vllm,vllm:256,llamacpp:256

A peer lives in an environment of its own, a folder of its name (docs/benchmarks.md says how they
are made); with `:CHUNK` it is tuned to take so many tokens of prompts a step. In a round each
contender is started, warmed up, measured quiet and with arrivals, and ended before the next one
starts; the next round begins with another one. JSON lines go to standard output as they come, and
the tables last, to standard error. The exit status is 1 where a contender failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from legato.bench.peers.interference.contender import ENGINE, OURS, PEERS, Contender
from legato.bench.peers.interference.ratios import Turn, as_json, ratio_table, ratios, rows, table
from legato.bench.peers.interference.running import Rig, prepare, running
from legato.bench.peers.interference.workload import Interference, figures
from legato.bench.peers.machine_load import MachineLoad
from legato.bench.peers.peer_process import PeerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.peers.interference.running import Running

DEFAULT = (
    "legato,legato-pinned,legato-colocated,engine,vllm,vllm:256,llamacpp,llamacpp:256,"
    "openvino,openvino:128,transformers,transformers:256,onnxgenai"
)
_FOLDER = Path(__file__).parents[1]
RUNNERS = {
    ENGINE: _FOLDER / "legato_runner.py",
    "llamacpp": _FOLDER / "llama_gguf.py",  # only brings the model into its form
    "openvino": _FOLDER / "openvino_runner.py",
    "transformers": _FOLDER / "transformers_cb_runner.py",
    "onnxgenai": _FOLDER / "onnxgenai_runner.py",
}
_REST_S = 1.0  # after what was cut off, until the next phase
_WARM_UP_S = 4.0
_PHASE_MARGIN_S = 60.0
_EXIT_TOLD = 143
_FAILURES = (PeerError, ValueError, OSError, TimeoutError)
_START_OF_REASON = 2000  # characters


@dataclass(frozen=True)
class Plan:
    """What to compare."""

    rig: Rig
    contenders: tuple[Contender, ...]
    workload: Interference
    vocab_size: int
    num_rounds: int


async def compare(plan: Plan) -> tuple[list[Turn], list[tuple[str, str]]]:
    """Runs all rounds; a contender that fails is left out from then on, with its reason."""
    turns: list[Turn] = []
    failures: list[tuple[str, str]] = []
    left: dict[Contender, Path] = {}

    def failed(contender: Contender, error: Exception) -> None:
        left.pop(contender, None)
        failures.append((contender.label, f"{error}"[-_START_OF_REASON:]))
        _print({"failure": {"contender": contender.label, "error": failures[-1][1]}})

    for contender in plan.contenders:
        try:
            _check_installed(plan.rig, contender)
            left[contender] = await prepare(plan.rig, contender.peer)
        except _FAILURES as error:
            failed(contender, error)
    for number in range(plan.num_rounds):
        order = list(left)
        for contender in order[number % len(order) :] + order[: number % len(order)]:
            try:
                turn = await _turn(plan, contender, left[contender], number)
            except _FAILURES as error:
                failed(contender, error)
                continue
            turns.append(turn)
            _print({"turn": as_json(turn)})
        if not left:
            break
    return turns, failures


async def _until_told(plan: Plan) -> tuple[list[Turn], list[tuple[str, str]]]:
    """SIGTERM ends it as Ctrl-C does: with all that it has started."""
    comparing = asyncio.ensure_future(compare(plan))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, comparing.cancel)
    return await comparing


def _check_installed(rig: Rig, contender: Contender) -> None:
    if not contender.is_peer:
        return
    folder = rig.environments[contender.peer]
    if (reason := folder / "not-installed").is_file():
        raise PeerError(f"not installed: {reason.read_text().strip()}")
    if not (folder / "bin" / "python").is_file():
        raise PeerError(f"not installed: {folder} has no bin/python")


async def _turn(plan: Plan, contender: Contender, path: Path, round_number: int) -> Turn:
    workload = plan.workload
    short = replace(
        workload, settle_s=min(1.0, workload.settle_s),
        window_s=max(_WARM_UP_S, workload.every_s), every_s=min(workload.every_s, _WARM_UP_S),
    )  # fmt: skip
    async with running(plan.rig, contender, path) as one:
        await one.phase(short.phase(plan.vocab_size, 0, arrivals=True))
        found, shares = [], []
        for number, arrivals in ((1, False), (2, True)):
            await asyncio.sleep(_REST_S)
            phase = workload.phase(plan.vocab_size, number, arrivals=arrivals)
            before = _load(one)
            found.append(figures(phase, await one.phase(phase)))
            shares.append(before.others_share(_load(one)))
        return Turn(round_number, contender, one.version, found[0], found[1], max(shares))


_workload = Interference  # tests have a shorter one


def _load(one: Running) -> MachineLoad:
    return MachineLoad.now(*one.process_ids())


def _print(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares; 1 where a contender failed."""
    plan = _plan(arguments)
    plan.rig.work_dir.mkdir(parents=True, exist_ok=True)
    _print({"workload": asdict(plan.workload), "num_threads": plan.rig.num_threads})
    try:
        turns, failures = asyncio.run(_until_told(plan))
    except asyncio.CancelledError:
        return _EXIT_TOLD
    turned, found = rows(turns), ratios(turns)
    for row in turned:
        _print({"row": as_json(row)})
    for ratio in found:
        _print({"ratio": as_json(ratio)})
    print(table(turned, failures), file=sys.stderr)
    print(f"\n{ratio_table(found)}", file=sys.stderr)
    return 1 if failures else 0


def _plan(arguments: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(
        prog="python -m legato.bench.peers.interference", description=__doc__
    )
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face folder in bf16")
    parser.add_argument(
        "--environments", type=Path, default=Path("build/peers"),
        help="has a folder for each peer, its environment",
    )  # fmt: skip
    parser.add_argument(
        "--peers", default=DEFAULT,
        help=f"of {', '.join((*OURS, *PEERS))}; NAME:CHUNK is tuned. Default: {DEFAULT}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="that each contender computes with")
    parser.add_argument("--work-dir", type=Path, default=Path("build/peers/converted"))
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds, to be ready")
    parser.add_argument(
        "--serve", action="append", default=[], metavar="WORD", help="a word more for legato serve"
    )
    for name, text in (
        ("num_streams", "that decode"),
        ("prompt_tokens", "of each prompt that arrives"),
        ("every_s", "seconds from one prompt to the next"),
        ("window_s", "seconds of each phase that are measured"),
    ):
        default = getattr(Interference, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default,
            help=f"{text}; default: {default:g}",
        )  # fmt: skip
    args = parser.parse_args(arguments)
    try:
        contenders = tuple(dict.fromkeys(Contender.of(one) for one in args.peers.split(",")))
        workload = _workload(
            num_streams=args.num_streams, prompt_tokens=args.prompt_tokens, every_s=args.every_s,
            window_s=args.window_s,
        )  # fmt: skip
        config = json.loads((args.model / "config.json").read_text())
        vocab_size, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except ValueError as error:
        parser.error(str(error))
    except (OSError, KeyError) as error:
        parser.error(f"--model {args.model}: config.json cannot be read: {error}")
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if workload.context_tokens > context:
        parser.error(
            f"--model {args.model}: its context of {context} tokens is below "
            f"{workload.context_tokens}, which a stream may need"
        )
    environments = {peer: (args.environments / peer).absolute() for peer in PEERS}
    pythons = {peer: str(folder / "bin" / "python") for peer, folder in environments.items()}
    return Plan(
        rig=Rig(
            model=args.model.absolute(),
            environments=environments,
            runners=RUNNERS,
            pythons=pythons | {ENGINE: sys.executable},
            num_threads=args.threads,
            context_tokens=context,
            work_dir=args.work_dir.absolute(),
            start_timeout_s=args.start_timeout,
            phase_timeout_s=_PHASE_MARGIN_S + workload.phase_s,
            serve_words=tuple(args.serve),
        ),
        contenders=contenders,
        workload=workload,
        vocab_size=vocab_size,
        num_rounds=args.rounds,
    )


if __name__ == "__main__":
    sys.exit(main())

"""run_experiments: the claims one after the other, each within its share of the time."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import grpc
import torch

from legato.bench.experiments.batch_size import BatchSize
from legato.bench.experiments.experiment import CannotMeasureError
from legato.bench.experiments.finding import Answer, Check, Finding, Outcome, judge
from legato.bench.experiments.forward_count import ForwardCount
from legato.bench.experiments.interference import Interference
from legato.bench.experiments.kv_heads import KvHeads
from legato.bench.experiments.load_settings import LoadSettings
from legato.bench.experiments.prompt_length import PromptLength
from legato.bench.experiments.recomputation import Recomputation
from legato.bench.experiments.roofline import Roofline
from legato.bench.experiments.rounds import Rounds
from legato.bench.experiments.time_budget import TimeBudget
from legato.bench.experiments.token_arithmetic import TokenArithmetic
from legato.bench.experiments.weight_forms import WeightForms
from legato.bench.profiling.sizes import machine_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legato.bench.experiments.experiment import Experiment
    from legato.bench.experiments.lab import Lab

EXPERIMENTS: dict[int, type[Experiment]] = {
    experiment.number: experiment
    for experiment in (
        *(ForwardCount, Recomputation, Roofline, PromptLength, BatchSize),
        *(KvHeads, WeightForms, TokenArithmetic, LoadSettings, Interference),
    )
}


@dataclass(frozen=True)
class Setting:
    """With what was measured, and how steady the machine was."""

    model: str
    shape: str
    weights: str
    dtype: str
    device: str
    machine: str
    num_threads: int
    load_before: float | None  # of the system over the last minute; None: it does not say
    load_after: float | None
    bandwidth: str  # of memory, over the whole run
    peak: str  # of matrix products, over the whole run
    limits_ratio: float  # highest over lowest of these, the larger of the two
    seconds: float  # given
    legato_version: str
    torch_version: str = torch.__version__

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_experiments(
    lab: Lab,
    numbers: Sequence[int],
    seconds: float,
    version: str,
    *,
    on_start: Callable[[Experiment], None],
    on_end: Callable[[Finding], None],
) -> tuple[Setting, list[Finding]]:
    """In the order of `numbers`, which must be known. What one leaves of its time the others have.

    Raises:
        ValueError: the model cannot be loaded.
    """
    experiments = [EXPERIMENTS[number]() for number in numbers]
    load_before = _load()
    lab.measure_limits()
    config, engine = lab.engine.model.config, lab.engine
    shape = (
        f"{config.architecture}, {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} query and {config.num_kv_heads} KV heads, "
        f"{engine.cost.weight_bytes / 1e6:,.0f} MB of weights a step"
    )
    weights, dtype = engine.weights, str(engine.dtype).removeprefix("torch.")
    device, product_dtype = engine.device, engine.product_dtype
    del engine
    time_left, findings = TimeBudget(seconds), []
    all_weights = sum(experiment.weight for experiment in experiments)
    for index, experiment in enumerate(experiments):
        share = experiment.weight / sum(other.weight for other in experiments[index:])
        on_start(experiment)
        # What others leave is shared; those that were late take nothing from those behind them.
        own_s = max(time_left.left_s * share, seconds * experiment.weight / all_weights)
        findings.append(_run(experiment, lab, TimeBudget(own_s, whole=time_left)))
        on_end(findings[-1])
    lab.measure_limits()
    widths = Rounds(tuple(limits.read_bytes_per_s.best for limits in lab.limits))
    found = [limits.matmul_ops_per_s.get(product_dtype) for limits in lab.limits]
    peaks = Rounds(tuple(peak.best for peak in found if peak is not None))
    return (
        Setting(
            model=lab.settings.model,
            shape=shape,
            weights=weights,
            dtype=dtype,
            device=str(device),
            machine=machine_name(device),
            num_threads=lab.settings.num_threads,
            load_before=load_before,
            load_after=_load(),
            bandwidth=_range(widths, "GB/s"),
            peak=_range(peaks, "Gop/s"),
            limits_ratio=max(
                max(rounds.values) / min(rounds.values)
                for rounds in (widths, peaks)
                if rounds.values
            ),
            seconds=seconds,
            legato_version=version,
        ),
        findings,
    )


def _run(experiment: Experiment, lab: Lab, budget: TimeBudget) -> Finding:
    """A claim that cannot be measured does not end the others; a bug does."""
    began_s = time.monotonic()
    try:
        with budget.apart():
            _ = lab.engine  # loads it, where it is not there
        outcome = experiment.measure(lab, budget)
        verdict, reason = judge(outcome.checks)
        assert tuple(check.statement for check in outcome.checks) == experiment.criteria
    except* (CannotMeasureError, ValueError, RuntimeError, OSError, grpc.RpcError) as group:
        reason = "; ".join(_causes(group))
        outcome = Outcome(
            tuple(Check(c, "not measured", Answer.UNCLEAR) for c in experiment.criteria)
        )
        verdict, _ = judge(outcome.checks)
    return Finding(
        experiment.number,
        experiment.name,
        experiment.claim,
        outcome,
        verdict,
        reason,
        time.monotonic() - began_s,
    )


def _causes(group: BaseExceptionGroup[BaseException]) -> list[str]:
    """In words; tasks beside each other may have failed together, of the same cause."""
    words: dict[str, None] = {}
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            words |= dict.fromkeys(_causes(error))
        else:
            words[str(error) or type(error).__name__] = None
    return list(words)


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _range(rounds: Rounds, unit: str) -> str:
    if not rounds.values:
        return "not measured"
    lowest, highest = min(rounds.values) / 1e9, max(rounds.values) / 1e9
    return f"{lowest:.3g} to {highest:.3g} {unit} ({len(rounds.values)} times)"

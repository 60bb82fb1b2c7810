"""LoadReport: the figures of a run, for people and for scripts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.load.sample import UNFINISHED
from legato.bench.workload import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.sample import Sample

_SERVER_TIMES = (
    *("queue_s", "ticket_s", "prefill_s", "prefill_model_s", "handoff_s", "kv_transfer_s"),
    *("decode_s", "decode_model_s", "delivery_s"),
)
_MAX_EXAMPLE = 200  # characters


@dataclass(frozen=True)
class Slo:
    """A request is good that has its first token within `ttft_s` of when it was due, and then on
    average one each `itl_s`; None: however long it takes.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def is_met(self, sample: Sample) -> bool:
        """Those that failed never do."""
        if not sample.ok:
            return False
        token_s = sample.token_mean_s or 0.0
        return (self.ttft_s is None or sample.ttft_s <= self.ttft_s) and (
            self.itl_s is None or token_s <= self.itl_s
        )


def report(samples: Sequence[Sample], slo: Slo, concurrency: int | None) -> dict[str, object]:
    """Latencies are of the requests that ended well, in seconds from when they were due; rates are
    of the window from when the load was there until the last request was sent.
    """
    ended = [sample for sample in samples if sample.code != UNFINISHED]
    good = [sample for sample in ended if sample.ok]
    failed = [sample for sample in ended if not sample.ok]
    window = _window(samples, concurrency)
    result: dict[str, object] = {
        "requests": len(samples),
        "ok": len(good),
        "failed": len(failed),
        "unfinished": len(samples) - len(ended),
        "errors": _errors(failed),
        "ttft_s": _spread([s.ttft_s for s in good]),
        "itl_s": _spread([gap for s in good for gap in s.gaps_s]),
        "e2e_s": _spread([s.token_times_s[-1] - s.due_s for s in good]),
        "sent_late_s": _spread([s.sent_s - s.due_s for s in samples]),
        "window_s": None if window is None else round(window[1] - window[0], 3),
        "output_tokens_per_s": None,
        "input_tokens_per_s": None,
        "requests_per_s": None,
        "goodput": {"ttft_slo_s": slo.ttft_s, "itl_slo_s": slo.itl_s, **_share(ended, slo)},
    }
    if window is not None:
        result |= _rates(samples, good, window)
    result["server"] = _server(good)
    return result


def _window(samples: Sequence[Sample], concurrency: int | None) -> tuple[float, float] | None:
    """From the first token, or from when all streams had one, until the last request was sent;
    None where that is no time at all.
    """
    firsts = sorted(s.token_times_s[0] for s in samples if s.token_times_s)
    if not firsts:
        return None
    begin_s = firsts[min(len(firsts), concurrency or 1) - 1]
    end_s = max(s.sent_s for s in samples)
    return (begin_s, end_s) if end_s > begin_s else None


def _rates(
    samples: Sequence[Sample], good: Sequence[Sample], window: tuple[float, float]
) -> dict[str, object]:
    begin_s, end_s = window
    seconds = end_s - begin_s
    tokens = sum(begin_s < at <= end_s for s in samples for at in s.token_times_s)
    firsts = [s for s in samples if s.token_times_s and begin_s < s.token_times_s[0] <= end_s]
    ends = sum(s.ended_s is not None and begin_s < s.ended_s <= end_s for s in good)
    return {
        "output_tokens_per_s": round(tokens / seconds, 3),
        "input_tokens_per_s": round(sum(s.planned.input_tokens for s in firsts) / seconds, 3),
        "requests_per_s": round(ends / seconds, 3),
    }


def _share(ended: Sequence[Sample], slo: Slo) -> dict[str, object]:
    met = sum(slo.is_met(sample) for sample in ended)
    if not ended:
        return {"requests": 0, "share": None}
    return {"requests": met, "share": round(met / len(ended), 4)}


def _errors(failed: Sequence[Sample]) -> dict[str, object]:
    counts = Counter(sample.code for sample in failed)
    examples = {sample.code: sample.error[:_MAX_EXAMPLE] for sample in reversed(failed)}
    return {code: {"count": count, "first": examples[code]} for code, count in counts.most_common()}


def _server(good: Sequence[Sample]) -> dict[str, object]:
    """The service's own times, which say where the client's went."""
    timings = [sample.finish.timings for sample in good if sample.finish is not None]
    result: dict[str, object] = {
        name: _spread([getattr(timing, name) for timing in timings]) for name in _SERVER_TIMES
    }
    result["kv_bytes_handed_over"] = sum(timing.kv_bytes_handed_over for timing in timings)
    result["moved"] = sum(timing.attempts - 1 for timing in timings)
    return result


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    ranks = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    spread = {name: round(percentile(ordered, rank), 6) for name, rank in ranks.items()}
    return spread | {"mean": round(sum(ordered) / len(ordered), 6)}

"""report: the figures of a run, for people and for scripts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from legato.bench.load.grpc_target import answers_times
from legato.bench.load.sample import UNFINISHED
from legato.bench.load.slo import Slo as Slo  # noqa: TC001  # who calls takes it from here
from legato.bench.load.spread import spread
from legato.bench.load.verdict import MIN_WINDOW_S, judge
from legato.bench.load.window import measured_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.sample import Sample
    from legato.bench.load.target import ServerTimes
    from legato.bench.load.window import Window

_MAX_EXAMPLE = 200  # characters
_SHORT = 0.98  # of what was asked for: answers below are shorter


def report(
    samples: Sequence[Sample],
    slo: Slo,
    server: ServerTimes | None = None,
    *,
    min_window_s: float = MIN_WINDOW_S,
) -> dict[str, object]:
    """TTFT, TPOT and whole answers are of the requests that ended well, in seconds from when they
    were due; gaps and rates are of the window; the warm-up's requests are in none, but for what
    came of them within the window. `server`: what it said of itself; by default what Legato's
    answers over gRPC say.
    """
    counted = [sample for sample in samples if not sample.is_warmup]
    warmup = [sample for sample in samples if sample.is_warmup]
    ended = [sample for sample in counted if sample.code != UNFINISHED]
    good = [sample for sample in ended if sample.ok]
    failed = [sample for sample in ended if not sample.ok]
    window = measured_window(samples)
    means = [s.token_mean_s for s in good if s.token_mean_s is not None]
    said = server or answers_times(good)
    return {
        "requests": len(counted),
        "ok": len(good),
        "failed": len(failed),
        "unfinished": len(counted) - len(ended),
        "warmup": {
            "requests": len(warmup),
            "failed": sum(not s.ok and s.code != UNFINISHED for s in warmup),
        },
        "errors": _errors(failed),
        "ttft_s": spread([s.ttft_s for s in good]),
        "itl_s": None if window is None else spread(window.gaps_s(samples)),
        "tpot_s": spread(means),
        "e2e_s": spread([s.e2e_s for s in good]),
        "sent_late_s": spread([s.sent_s - s.due_s for s in counted]),
        "messages": _messages(samples, good, window),
        "window_s": None if window is None else round(window.seconds, 3),
        **_rates(samples, window),
        "goodput": {
            "ttft_slo_s": slo.ttft_s,
            "itl_slo_s": slo.itl_s,
            "percentile": slo.percentile,
            **_goodput(samples, ended, slo, window),
        },
        "prompts": _prompts(good),
        "short_answers": sum(len(s.token_times_s) < _SHORT * s.planned.output_tokens for s in good),
        "server": {"source": said.source, **said.spreads_s, **said.counts},
        "verdict": judge(counted, window, slo, min_window_s).as_json(),
    }


def _rates(samples: Sequence[Sample], window: Window | None) -> dict[str, object]:
    if window is None:
        names = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "straddling")
        return dict.fromkeys(names)
    seconds = window.seconds
    return {
        "output_tokens_per_s": round(window.num_tokens(samples) / seconds, 3),
        "input_tokens_per_s": round(window.num_prompt_tokens(samples) / seconds, 3),
        "requests_per_s": round(len(window.ended(samples)) / seconds, 3),
        "straddling": window.num_straddling(samples),
    }


def _goodput(
    samples: Sequence[Sample], ended: Sequence[Sample], slo: Slo, window: Window | None
) -> dict[str, object]:
    """The share of those that count, and how many good ones ended in a second of the window."""
    met = sum(slo.is_met(sample) for sample in ended)
    rate = None
    if window is not None:
        rate = round(sum(map(slo.is_met, window.ended(samples))) / window.seconds, 3)
    share = round(met / len(ended), 4) if ended else None
    return {"requests": met, "share": share, "requests_per_s": rate}


def _messages(
    samples: Sequence[Sample], good: Sequence[Sample], window: Window | None
) -> dict[str, object]:
    """Where one brings several tokens, gaps between tokens are not what users see."""
    num_messages = sum(len(s.message_times_s) for s in good)
    num_tokens = sum(len(s.token_times_s) for s in good)
    ways = Counter(s.counted_by for s in good)
    return {
        "gap_s": None if window is None else spread(window.gaps_s(samples, of_messages=True)),
        "tokens_each": round(num_tokens / num_messages, 3) if num_messages else None,
        "tokens_counted_by": ways.most_common(1)[0][0] if ways else None,
    }


def _prompts(good: Sequence[Sample]) -> dict[str, object]:
    """As the server counts them, where it does."""
    told = [s for s in good if s.prompt_tokens is not None]
    with_cache = [s for s in told if s.cached_tokens is not None]
    all_tokens = sum(s.prompt_tokens or 0 for s in with_cache)
    cached = sum(s.cached_tokens or 0 for s in with_cache)
    planned = [s.planned.input_tokens for s in good]
    return {
        "tokens": spread([float(s.prompt_tokens or 0) for s in told]),
        "planned_mean": round(sum(planned) / len(planned), 6) if planned else None,
        "cached_share": round(cached / all_tokens, 4) if all_tokens else None,
    }


def _errors(failed: Sequence[Sample]) -> dict[str, object]:
    counts = Counter(sample.code for sample in failed)
    examples = {sample.code: sample.error[:_MAX_EXAMPLE] for sample in reversed(failed)}
    return {code: {"count": count, "first": examples[code]} for code, count in counts.most_common()}

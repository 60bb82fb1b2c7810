"""The lines that `legato plan` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.plan.answer import Answer
    from legato.plan.simulation.measures import Estimate
    from legato.plan.simulation.result import Result
    from legato.plan.simulation.verified_plan import VerifiedPlan
    from legato.plan.targets import Targets
    from legato.plan.traffic import Traffic


def plan_summary(answer: Answer, traffic: Traffic, verified: VerifiedPlan | None = None) -> str:
    """The comment above the service file."""
    simulated = "" if verified is None else f"\n{_simulated_percentiles(verified.result)}"
    return (
        f"planned for {traffic.rate_per_s:g} requests/s, prompts of "
        f"{traffic.prompt_tokens.mean():.0f} and answers of {traffic.output_tokens.mean():.0f} "
        f"tokens on average\n{_percentiles(answer)}{simulated}"
    )


def plan_lines(answer: Answer, traffic: Traffic, basis: str) -> list[str]:
    """The answer, what it will be like, and on what it stands."""
    found = answer.predicted
    lines = [
        f"{answer.prefill_workers} prefill + {answer.decode_workers} decode workers for "
        f"{traffic.rate_per_s:g} requests/s",
        _percentiles(answer),
        f"prefill: busy {100 * found.prefill_busy:.0f} % of the time; "
        f"{100 * found.prefill_wait.probability:.1f} % of prompts wait",
        f"decode: {found.mean_sequences:.1f} sequences at a time on each, at most "
        f"{answer.max_batch_size} ({answer.batch_limited_by}); "
        f"{100 * found.room_wait.probability:.2g} % of requests wait for a place",
        f"KV of a decode worker: {answer.kv_rows_per_decode_worker:,} tokens, room for "
        f"{answer.kv_sequences_per_decode_worker:,} sequences; {answer.kv_rows_mean:,.0f} held on "
        "average"
        + (
            ""
            if answer.kv_full_at_rate is None
            else f"; full at {answer.kv_full_at_rate:.3g} requests/s"
        ),
        f"limit: {answer.saturates_at_rate:.3g} requests/s, {answer.limited_by}",
        f"links: {_gbit(answer.link_bytes_per_s)} of KV from prefill to decode on average; "
        f"{_gbit(answer.link_bytes_per_s_to_hide)} from each prefill worker hide it",
        f"from {basis}",
    ]
    if traffic.prefix_share:
        lines.insert(-1, f"{100 * traffic.prefix_share:.0f} % of each prompt taken as cached")
    return lines


def simulated_lines(verified: VerifiedPlan, closed: Answer, targets: Targets) -> list[str]:
    """What the simulation says beside closed forms."""
    result = verified.result
    pools = f"{verified.prefill_workers} prefill + {verified.decode_workers} decode"
    said = closed.prefill_workers, closed.decode_workers
    if said == (verified.prefill_workers, verified.decode_workers):
        word = f"simulated: {pools}, as closed forms say"
    else:
        word = f"simulated: {pools}, where closed forms say {said[0]} + {said[1]}"
    if verified.is_least:
        word += f"; fewer miss the targets ({verified.num_simulations} simulations)"
    elif result.strain(targets) <= 1:
        word += ", which keep the targets; fewer were not tried: there are many"
    else:
        word += ", which MISS the targets; others were not tried: there are many"
    lines = [
        word,
        _simulated_percentiles(result),
        f"of {result.num_requests:,} requests {result.measured_requests:,} are measured, over "
        f"{result.measured_s:.3g} s, seed {result.seed}; refused {result.refused}; "
        f"preempted {result.preemptions} times",
        f"busy: prefill {100 * result.prefill_busy:.0f} %, decode {100 * result.decode_busy:.0f} % "
        f"with {result.batch_mean:.1f} sequences, KV {100 * result.kv_share:.0f} %, busiest link "
        f"{100 * result.link_busy:.0f} %, {_gbit(result.link_bytes_per_s)} of KV; most: "
        f"{result.limited_by}",
    ]
    if not result.is_long_enough:
        lines.append("this is short beside an answer's time: give more --requests")
    return lines


def _simulated_percentiles(result: Result) -> str:
    """With their 95 % intervals."""

    def of(estimates: dict[float, Estimate]) -> str:
        return ", ".join(
            f"p{p:g} {_ms(e.value)} ± {_ms(e.half_width)}" for p, e in estimates.items()
        )

    return f"simulated TTFT {of(result.ttft_s)}; ITL {of(result.itl_s)}"


def _percentiles(answer: Answer) -> str:
    found = answer.predicted
    ttft = ", ".join(f"p{p:g} {_ms(v)}" for p, v in found.ttft_s.items())
    itl = ", ".join(f"p{p:g} {_ms(v)}" for p, v in found.itl_s.items())
    return f"predicted TTFT {ttft}; ITL {itl}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g} Gbit/s"

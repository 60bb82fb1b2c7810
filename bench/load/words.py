"""notes: what a run's figures mean, in words; and the names of their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CLIENT_ROWS = {
    "time to first token": "ttft_s",
    "inter-token latency": "itl_s",
    "time per output token": "tpot_s",
    "whole answer": "e2e_s",
}
SERVER_ROWS = {
    "queue": "queue_s",
    "ticket": "ticket_s",
    "prefill": "prefill_s",
    "  prefill, the model alone": "prefill_model_s",
    "hand-off": "handoff_s",
    "  the KV's way, from prefill on": "kv_transfer_s",
    "decode": "decode_s",
    "  decode, the model alone": "decode_model_s",
    "delivery": "delivery_s",
}
_LATE_S = 0.01  # a client that is so late is busy itself
_TOKENS_EACH = 1.05  # of a message, on average: above, gaps between tokens are partly made up
_OTHER_LENGTH = 0.05  # of prompts, against what was asked
_FEW = 100  # values: below, their p99 is the largest


def duration(seconds: float | None) -> str:
    """For people."""
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1000:.1f} ms"


def notes(figures: Mapping[str, Any]) -> list[str]:
    """A line each: counts, rates, goodput, what is to be doubted, and errors."""
    return [*_counts(figures), *_doubts(figures), *_errors(figures)]


def _counts(figures: Mapping[str, Any]) -> list[str]:
    warmup = figures["warmup"]
    text = (
        f"requests: {figures['ok']} ok, {figures['failed']} failed, "
        f"{figures['unfinished']} unfinished"
    )
    if warmup["requests"]:
        text += f"; before them {warmup['requests']} to warm up"
        text += f", of which {warmup['failed']} failed" if warmup["failed"] else ""
    lines = [text]
    if figures["window_s"] is not None:
        lines.append(
            f"in a window of {figures['window_s']:.1f} s: "
            f"{figures['output_tokens_per_s']:.1f} tokens/s out, "
            f"{figures['input_tokens_per_s']:.1f} tokens/s in, "
            f"{figures['requests_per_s']:.2f} requests/s; {figures['straddling']} requests were "
            "under way at its borders"
        )
    goodput = figures["goodput"]
    if (goodput["ttft_slo_s"], goodput["itl_slo_s"]) != (None, None):
        share, rate = goodput["share"], goodput["requests_per_s"]
        text = "none ended" if share is None else f"{100 * share:.1f} % of the requests"
        lines.append(f"goodput: {text}" + ("" if rate is None else f", {rate:.2f} requests/s"))
    return lines


def _doubts(figures: Mapping[str, Any]) -> list[str]:
    lines = list(figures["target"]["notes"])
    late, messages, prompts = figures["sent_late_s"], figures["messages"], figures["prompts"]
    if late is not None and late["p99"] > _LATE_S:
        lines.append(
            f"1 % were sent {duration(late['p99'])} late or more: this client is busy, and its "
            "lateness is in the latencies"
        )
    each, gap = messages["tokens_each"], messages["gap_s"]
    if each is not None and each > _TOKENS_EACH:
        lines.append(
            f"a message brings {each:.2f} tokens on average ({messages['tokens_counted_by']}), "
            "which are taken to have come evenly since the one before; between messages: p50 "
            + ("–" if gap is None else f"{duration(gap['p50'])}, p99 {duration(gap['p99'])}")
        )
    tokens, planned = prompts["tokens"], prompts["planned_mean"]
    if tokens is not None and abs(tokens["mean"] / planned - 1) > _OTHER_LENGTH:
        lines.append(
            f"prompts had {tokens['mean']:.1f} tokens on average as the server counts, "
            f"{planned:.1f} were planned"
        )
    if prompts["cached_share"]:
        lines.append(f"{100 * prompts['cached_share']:.1f} % of the prompts' tokens were cached")
    if short := figures["short_answers"]:
        lines.append(f"{short} answers are shorter than asked: the load was less than planned")
    ttft = figures["ttft_s"]
    if ttft is not None and ttft["count"] < _FEW:
        lines.append(f"of {ttft['count']} requests p99 is the slowest")
    return lines


def _errors(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{code}: {error['count']}, the first: {error['first']}"
        for code, error in figures["errors"].items()
    ]

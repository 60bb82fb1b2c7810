"""The table of where an answer's time went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.cli.answer import percentile

if TYPE_CHECKING:
    from rich.text import Text

    from legato.cluster.cli.answer import Answer


def timing_rows(answer: Answer) -> list[tuple[str, str, str]]:
    """(what, figure, remark) for a finished answer; raises ValueError for one that is not."""
    if answer.finish is None:
        raise ValueError("the answer has not finished")
    usage, times = answer.finish.usage, answer.finish.timings
    # Of an answer that moved, prefill is more than once: no part of its first token's time.
    num_replays = times.attempts - 1 - times.retargets
    part = "  " if times.attempts <= 1 and not times.preemptions else ""
    rows = [
        ("time to first token", _ms(times.ttft_s), "on the router's clock"),
        (f"{part}queue", _ms(times.queue_s), "tokenising included"),
        (f"{part}ticket", _ms(times.ticket_s), "decode promises KV room"),
        (
            f"{part}prefill",
            _ms(times.prefill_s),
            f"the model {_ms(times.prefill_model_s)}",
        ),
        (
            "hand-off",
            _ms(times.handoff_s),
            f"of {_ms(times.kv_transfer_s)} that began with prefill" if times.kv_transfer_s else "",
        ),
        ("decode", _ms(times.decode_s), f"the model {_ms(times.decode_model_s)}"),
    ]
    if num_replays > 0:
        rows.append(("  moved", _count(num_replays), "after a loss: KV was computed again"))
    if times.retargets > 0:
        rows.append(("  sent again", _count(times.retargets), "to another decode worker"))
    if times.moves:
        rows.append(("  moved with KV", _count(times.moves), "its decode worker drained"))
    if times.preemptions:  # it stood still meanwhile
        rows.append(("  preempted", _count(times.preemptions), "for want of KV room"))
    rows += [
        ("delivery", _ms(times.delivery_s), ""),
        ("total", _ms(times.total_s), ""),
    ]
    if gaps := answer.gaps_s:
        text = f"p50 {_ms(percentile(gaps, 50))}, p99 {_ms(percentile(gaps, 99))}"
        rows.append(("inter-token latency", text, "as this client saw it"))
    # Not from the gaps: a client that looks up late finds many tokens at once.
    if usage.completion_tokens > 1 and times.decode_s > 0:
        rate = (usage.completion_tokens - 1) / times.decode_s
        rows.append(("decode rate", f"{rate:.1f} tokens/s", "of this one stream, as decoded"))
    rows += [
        (
            "tokens",
            f"{usage.prompt_tokens} in, {usage.completion_tokens} out",
            f"{usage.cached_prompt_tokens} in were cached" if usage.cached_prompt_tokens else "",
        ),
        (
            "forward passes",
            f"{times.prefill_forwards} prefill, {times.decode_forwards} decode",
            "N tokens need 1 and N - 1",
        ),
        (
            "KV handed over",
            _bytes(times.kv_bytes_handed_over),
            "prefill → decode" if times.kv_bytes_handed_over else "",
        ),
    ]
    return rows


def timing_table(answer: Answer) -> Text:
    """The rows, for a terminal or a file: nothing is wrapped, no line ends in blanks."""
    from rich.text import Text

    rows = timing_rows(answer)
    name_width, figure_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    text = Text(no_wrap=True)
    for name, figure, remark in rows:
        text.append(f"{name:<{name_width}}  {figure:>{figure_width}}")
        if remark:
            text.append(f"  {remark}", style="dim")
        text.append("\n")
    text.right_crop(1)
    return text


def _count(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _bytes(count: int) -> str:
    return f"{count:,} bytes"

"""Tables: what was measured, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.handoff.exposed import Exposed
    from legato.bench.handoff.interference import Interference
    from legato.bench.handoff.rates import Rates
    from legato.bench.handoff.spread import Spread


def rates_table(rates: Rates) -> str:
    """GB/s and shares of the limits: medians, and the range over the rounds."""
    lines = [
        f"{rates.num_tokens} tokens of {rates.dtype}: {rates.num_bytes / 1e6:.1f} MB, "
        f"chunks of {rates.chunk_bytes >> 10} KiB, a window of {rates.window_bytes >> 10} KiB, "
        f"slots of {rates.slot_bytes >> 10} KiB, {rates.memory_bytes >> 10} KiB of them",
        f"  {'':<36}{'GB/s':>8}",
    ]
    lines += [f"  {name:<36}{_scaled(rate, 1e-9)}" for name, rate in rates.bytes_per_s.items()]
    lines += [f"  {name:<36}{_scaled(share)}" for name, share in rates.of_limit.items()]
    lines += [
        f"  {name + ', CPU s/GB':<36}{sending:>8.2f} sending, {receiving:.2f} receiving"
        for name, (sending, receiving) in rates.cpu_s_per_gb.items()
    ]
    return "\n".join(lines)


def sweep_row(rates: Rates) -> str:
    """One setting in one line."""
    figures = ", ".join(
        f"{name} {rate.median / 1e9:.2f}" for name, rate in rates.bytes_per_s.items()
    )
    return (
        f"{rates.dtype} chunk {rates.chunk_bytes >> 10:>5} KiB, "
        f"window {rates.window_bytes >> 10:>6} KiB: {figures} GB/s"
    )


def interference_table(runs: Sequence[Interference], dtype: str) -> str:
    """Milliseconds of a short hand-off."""
    first = runs[0]
    lines = [
        f"{first.num_short} hand-offs of {first.short_tokens} tokens at once, beside "
        f"{first.long_tokens} tokens ({dtype})",
        f"  {'ms':<16}{'p50 alone':>11}{'beside':>9}{'ratio':>8}{'p99 alone':>11}{'beside':>9}"
        f"{'ratio':>8}",
    ]
    lines += [
        f"  {run.lane:<16}{run.alone_p50_s * 1e3:>11.1f}{run.beside_p50_s * 1e3:>9.1f}"
        f"{run.p50_ratio:>8.2f}{run.alone_p99_s * 1e3:>11.1f}{run.beside_p99_s * 1e3:>9.1f}"
        f"{run.p99_ratio:>8.2f}"
        for run in runs
    ]
    return "\n".join(lines)


def exposed_table(exposed: Sequence[Exposed]) -> str:
    """Milliseconds: medians; the share with its range."""
    lines = [
        f"  {'prompt':>8}{'MB':>8}{'prefill ms':>12}{'step ms':>9}{'hand-off ms':>13}"
        f"{'exposed ms':>12}   of prefill"
    ]
    lines += [
        f"  {run.prompt_tokens:>8}{run.kv_bytes / 1e6:>8.1f}"
        f"{run.prefill_model_s.median * 1e3:>12.0f}{run.decode_step_s.median * 1e3:>9.1f}"
        f"{run.handoff_s.median * 1e3:>13.1f}{run.exposed_s.median * 1e3:>12.1f}"
        f"   {run.exposed_of_prefill}"
        for run in exposed
    ]
    return "\n".join(lines)


def _scaled(spread: Spread, factor: float = 1.0) -> str:
    low, high = spread.lowest * factor, spread.highest * factor
    return f"{spread.median * factor:>8.2f}   ({low:.2f} to {high:.2f})"

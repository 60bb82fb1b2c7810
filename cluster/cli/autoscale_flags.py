"""AutoscaleFlags: what `legato serve` takes for the autoscaler, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from legato.cluster.autoscale_options import AutoscaleOptions, parse_duration, parse_ranges

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role


@dataclass(frozen=True)
class AutoscaleFlags:
    """As typed; None where an option is not given."""

    ranges: str | None
    more_words: tuple[str, ...]  # that stand by themselves
    dry_run: bool
    ttft_slo: str | None
    itl_slo: str | None
    up_after: str | None
    down_after: str | None
    cool_down: str | None

    def read(self, num_prefill: int, num_decode: int) -> AutoscaleOptions | None:
        """None without --autoscale. The numbers are those of workers to start with.

        Raises:
            typer.BadParameter: naming the option, what was given and what would do.
        """
        durations = {
            "--ttft-slo": ("ttft_slo_s", self.ttft_slo),
            "--itl-slo": ("itl_slo_s", self.itl_slo),
            "--autoscale-up-after": ("up_after_s", self.up_after),
            "--autoscale-down-after": ("down_after_s", self.down_after),
            "--autoscale-cool-down": ("cool_down_s", self.cool_down),
        }
        given = [option for option, (_, text) in durations.items() if text is not None]
        given += ["--autoscale-dry-run"] if self.dry_run else []
        if self.ranges is None:
            if given:
                raise typer.BadParameter("does nothing without --autoscale", param_hint=given[0])
            if self.more_words:
                raise typer.BadParameter(f"takes options only, got {self.more_words[0]!r}")
            return None
        seconds: dict[str, float] = {}
        for option, (name, text) in durations.items():
            if text is not None:
                try:
                    seconds[name] = parse_duration(text)
                except ValueError as error:
                    raise typer.BadParameter(str(error), param_hint=option) from None
        try:
            ranges = parse_ranges((*self.ranges.split(), *self.more_words))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--autoscale") from None
        sizes: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
        for role, size in sizes.items():
            allowed = ranges[role]
            if size not in allowed:
                raise typer.BadParameter(
                    f"must be within --autoscale {role}={allowed}, got {size}",
                    param_hint=f"--{role}",
                )
        return AutoscaleOptions(
            ranges["prefill"], ranges["decode"], dry_run=self.dry_run, **seconds
        )

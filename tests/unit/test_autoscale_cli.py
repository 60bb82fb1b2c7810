"""The autoscaler on the command line: what `serve` takes and refuses, and what `status` shows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from legato.cluster.autoscale_options import AutoscaleOptions, PoolRange
from legato.cluster.cli import main as cli
from legato.cluster.cli.status_table import autoscaler_lines
from legato.protos import cluster_pb2, common_pb2

if TYPE_CHECKING:
    from legato.cluster.config import ServiceConfig

RANGES = ("--autoscale", "prefill=1..8", "decode=1..4")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[ServiceConfig]:
    started: list[ServiceConfig] = []

    def note(config: ServiceConfig, _: object) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("legato.cluster.cli.serve.run_service", note)
    return started


def serve(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["legato", "serve", "--model", "x", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_flags_reach_the_service(
    monkeypatch: pytest.MonkeyPatch, configs: list[ServiceConfig]
) -> None:
    assert serve(monkeypatch) == 0
    assert serve(monkeypatch, *RANGES, "--decode", "2") == 0
    words = ("--ttft-slo", "2s", "--itl-slo", "30ms", "--autoscale-dry-run")
    words += ("--autoscale-up-after", "1s", "--autoscale-down-after", "5m")
    words += ("--autoscale-cool-down", "20s")
    assert serve(monkeypatch, *words, *RANGES) == 0
    assert serve(monkeypatch, *words, "--autoscale", "decode=1..4 prefill=1..8") == 0
    off, plain, full, quoted = configs
    assert (off.autoscale, off.router.reports_load) == (None, False)
    assert plain.autoscale == AutoscaleOptions(PoolRange(1, 8), PoolRange(1, 4))
    assert (plain.decode_workers, plain.router.reports_load) == (2, True)
    assert quoted == full
    assert full.autoscale == AutoscaleOptions(
        PoolRange(1, 8), PoolRange(1, 4), 2.0, 0.03, 1.0, 300.0, 20.0, dry_run=True
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ttft-slo", "2s"), "--ttft-slo: does nothing without --autoscale"),
        (("--autoscale-dry-run",), "--autoscale-dry-run: does nothing without --autoscale"),
        ((*RANGES, "--ttft-slo", "0s"), "--ttft-slo: must be above 0 and at most 86400s, got 0s"),
        ((*RANGES, "--itl-slo", "50"), "--itl-slo: must be a duration such as 500ms"),
        ((*RANGES, "--autoscale-cool-down", "x"), "--autoscale-cool-down: must be a duration"),
        ((*RANGES, "--decode", "5"), "--decode: must be within --autoscale decode=1..4, got 5"),
        (
            ("--autoscale", "prefill=2..8", "decode=1..4"),
            "--prefill: must be within --autoscale prefill=2..8, got 1",
        ),
        (
            ("--autoscale", "prefill=1..8", "--itl-slo", "50ms"),
            "--autoscale: takes two words, and decode=MIN..MAX is missing",
        ),
        (
            (*RANGES, "x"),
            "--autoscale: takes two words, prefill=MIN..MAX and decode=MIN..MAX, and ",
        ),
        (("stray",), "takes options only, got 'stray'"),
        (("--autoscale", "decode=1", "prefill=9..2"), "--autoscale: prefill: the least must come"),
    ],
)
def test_what_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch,
    configs: list[ServiceConfig],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    assert serve(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err
    assert configs == []


def test_status_shows_ranges_needs_and_the_last_decisions() -> None:
    status = cluster_pb2.AutoscalerStatus(
        ttft_slo_s=0.5,
        itl_slo_s=0.05,
        pools=[
            cluster_pb2.AutoscaledPool(
                role=common_pb2.WORKER_ROLE_PREFILL,
                min_workers=1,
                max_workers=8,
                needed=2,
                reason="so it is",
            ),
            cluster_pb2.AutoscaledPool(
                role=common_pb2.WORKER_ROLE_DECODE, min_workers=1, max_workers=4
            ),
        ],
        decisions=[
            cluster_pb2.ScalingDecision(age_s=2000 - number, text=f"line {number}")
            for number in range(7)
        ],
    )
    assert autoscaler_lines(status) == [
        "autoscaler: prefill 1..8, decode 1..4; goals: TTFT 500 ms, ITL 50 ms",
        "  prefill needs 2: so it is",
        "  1,998 s ago: line 2",
        "  1,997 s ago: line 3",
        "  1,996 s ago: line 4",
        "  1,995 s ago: line 5",
        "  1,994 s ago: line 6",
    ]
    status.dry_run = True
    assert autoscaler_lines(status)[0].startswith("autoscaler (dry run): ")

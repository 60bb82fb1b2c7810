from __future__ import annotations

import json

import numpy as np
import pytest
from demo_model import demo_model_path

from legato.bench.router_overhead import load
from legato.bench.router_overhead.__main__ import main

pytestmark = pytest.mark.integration
SMALL = ["--streams", "4", "--tokens", "12", "--rounds", "1", "--period", "0.02"]


def test_each_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--model", str(demo_model_path())]) == 0
    figures = json.loads(capsys.readouterr().out)
    for way in ("relay", "router", "http"):
        # Whoever stands between cannot be faster than nobody: times are of the same tokens.
        assert 0 < figures[way]["added_p50_ms"] < 1000
        assert 0 < figures[way]["full_tokens_s"] < figures["direct"]["full_tokens_s"] * 2
    assert figures["direct"]["p50_ms"] > 0
    assert figures["router"]["of_relay"] > 0
    assert figures["http"]["of_router"] > 0


def test_what_is_given_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--tokens", "9"], "--tokens must be at least 10, got 9"),
        (["--period", "0"], "--period must be above 0, got 0"),
    ):
        with pytest.raises(SystemExit):
            main(options)
        assert message in capsys.readouterr().err
    assert main([*SMALL, "--model", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


async def test_a_lost_token_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load.LoadRun("127.0.0.1:1", 1, 12, "decode")

    async def leaves_one_out(*_: object):  # type: ignore[no-untyped-def]  # noqa: ANN202  # a stand-in
        for index in (1, 2, 4):
            yield index, 1

    monkeypatch.setattr(run, "_arrivals", leaves_one_out)
    with pytest.raises(RuntimeError, match="token 4 where 3 was due"):
        await run.arrivals_s(1, load.Pace(0.0))
    await run.close()


def test_tokens_leave_at_their_own_moments() -> None:
    names = [load.StreamName(1, n, 20_000, round(20_000 * n / 4)) for n in range(4)]
    assert [str(name) for name in names] == [
        *("1-0-20000-0", "1-1-20000-5000", "1-2-20000-10000", "1-3-20000-15000"),
    ]
    assert np.array_equal([load.StreamName.parse(str(n)).number for n in names], range(4))

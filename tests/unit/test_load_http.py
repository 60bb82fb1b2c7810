"""The load generator over HTTP: what it finds out of a server, and how it counts what comes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from fake_openai import FakeOpenAi, openai_at
from http_service import http_service

from legato.bench.load.event_stream import EventStream
from legato.bench.load.http_target import HttpTarget
from legato.bench.load.prompt_text import WORDS, PromptText, text_of
from legato.bench.load.report import Slo, report
from legato.bench.load.run import send_load
from legato.bench.load.sample import Sample
from legato.bench.load.server_metrics import ServerMetrics
from legato.bench.load.workload import LoadWorkload, Planned
from legato.cluster.client_access import ClientAccess
from legato.cluster.errors import ServiceError
from legato.plan.lengths import Lengths

if TYPE_CHECKING:
    from legato.bench.load.target import Served

ALL = frozenset({"ignore_eos", "usage"})  # the second: that of each chunk


def load(prompt: str = "40", answer: str = "6", **settings: Any) -> LoadWorkload:  # noqa: ANN401
    settings = {"concurrency": 2, "num_requests": 4} | settings
    return LoadWorkload(Lengths.parse(prompt), Lengths.parse(answer), **settings)


async def measured(
    server: FakeOpenAi, workload: LoadWorkload | None = None, timeout_s: float = 20
) -> tuple[list[Sample], Served, dict[str, Any]]:
    async with openai_at(server) as url:
        return await measured_at(url, workload or load(), timeout_s)


async def measured_at(
    url: str, workload: LoadWorkload, timeout_s: float = 20
) -> tuple[list[Sample], Served, dict[str, Any]]:
    async with HttpTarget([url]) as target:
        samples = await send_load(workload, target, timeout_s=timeout_s)
        figures: Any = report(samples, Slo(), await target.server_times(samples))
        return samples, target.served, figures


async def test_a_server_that_takes_everything_is_asked_for_ids_and_counts_by_chunk() -> None:
    server = FakeOpenAi(fields=ALL, tokens_per_chunk=3, chunk_s=0.06, vocab_size=9000)
    samples, served, figures = await measured(server)
    assert (served.model, served.prompts, served.context_length) == ("m", "token ids", 500)
    assert served.notes == ()
    assert [s.code for s in samples] == ["OK"] * 4
    assert [s.prompt_tokens for s in samples] == [40] * 4
    prompts = [asked["prompt"] for asked in server.asked[-4:]]
    # The largest limit that this vocabulary has.
    assert 4000 < max(map(max, prompts)) < 8192
    assert figures["messages"]["tokens_counted_by"] == "usage in each chunk"
    assert figures["messages"]["tokens_each"] == 3.0
    assert figures["prompts"]["cached_share"] == 0.25
    for sample in samples:
        # Three at once, then three that share the time since.
        gaps = sample.gaps_s
        assert gaps[:2] == [0.0, 0.0]
        assert sum(gaps[2:]) > 0.055
        assert gaps[2] == pytest.approx(gaps[4])
        [message_gap] = [b - a for a, b in pairwise(sample.message_times_s)]
        assert message_gap == pytest.approx(sum(gaps[2:]))


@pytest.mark.parametrize(
    ("server", "prompts", "path", "counted", "num_notes"),
    [
        (FakeOpenAi(), "token ids", "/v1/completions", "usage at the end", 0),
        (FakeOpenAi(takes_ids=False, tokens_per_word=2, overhead=10), "text", "/v1/completions",
         "usage at the end", 0),
        (FakeOpenAi(paths=("/v1/chat/completions",), fields=frozenset()), "text",
         "/v1/chat/completions", "usage at the end", 1),
        (FakeOpenAi(takes_ids=False, usage="never"), "text", "/v1/completions", "chunks, each", 1),
    ],
)  # fmt: skip
async def test_what_a_server_takes_is_found_out(
    server: FakeOpenAi, prompts: str, path: str, counted: str, num_notes: int
) -> None:
    samples, served, figures = await measured(server)
    assert (served.prompts, served.protocol, len(served.notes)) == (prompts, path, num_notes)
    assert all(s.ok and len(s.token_times_s) == 6 for s in samples)
    assert figures["messages"]["tokens_counted_by"].startswith(counted)
    if server.usage != "never":
        assert figures["prompts"]["tokens"]["mean"] == 40.0  # whatever a word costs


async def test_tokens_that_only_the_total_tells_are_spread_over_the_chunks() -> None:
    samples, _, figures = await measured(FakeOpenAi(tokens_per_chunk=4), load(answer="8"))
    assert all(s.ok and len(s.token_times_s) == 8 for s in samples)
    assert figures["messages"]["tokens_each"] == 4.0


def test_a_recount_gives_each_chunk_its_share() -> None:
    sample = Sample(Planned(0, None, 1, 5), 0.0, 0.0)
    for at_s in (1.0, 2.0, 4.0):
        sample.note(at_s, 1)
    sample.recount(5)
    assert sample.token_times_s == [1.0, 1.0, 1.5, 2.0, 4.0]
    sample.recount(2)  # some had none
    assert sample.token_times_s == [1.0, 2.0]


async def test_times_of_a_slow_stream_are_those_of_the_client() -> None:
    server = FakeOpenAi(fields=ALL, first_s=0.2, chunk_s=0.05)
    samples, _, _ = await measured(server, load(concurrency=1, num_requests=2))
    for sample in samples:
        # As slow as it is, and not so slow as a client that waits for the whole answer.
        assert 0.19 < sample.ttft_s < sample.e2e_s - 0.2
        assert sample.token_mean_s is not None
        assert 0.045 < sample.token_mean_s < 1.0


@pytest.mark.parametrize(
    ("server", "code", "error"),
    [
        (FakeOpenAi(fields=ALL, status=503), "HTTP 503", "not now"),
        (FakeOpenAi(fields=ALL, cut_after=2), "INCOMPLETE", ""),
        (FakeOpenAi(fields=ALL, end_after=2), "INCOMPLETE", "without finish_reason or [DONE]"),
        (FakeOpenAi(fields=ALL, error_after=2), "STREAM_ERROR", "the worker is gone"),
        (FakeOpenAi(fields=ALL, chunk_s=1.0), "DEADLINE_EXCEEDED", "within 1.2 s"),
    ],
)
async def test_what_fails_is_a_failure_by_name(server: FakeOpenAi, code: str, error: str) -> None:
    samples, _, figures = await measured(server, load(num_requests=2), timeout_s=1.2)
    assert {s.code for s in samples} == {code}
    assert error in samples[0].error
    assert (figures["failed"], figures["ok"], figures["verdict"]["given"]) == (2, 0, False)


async def test_answers_that_end_early_are_told() -> None:
    _, served, figures = await measured(FakeOpenAi(fields=frozenset(), most_tokens=3))
    assert figures["short_answers"] == 4
    assert "ignore_eos" in served.notes[0]


async def test_what_the_last_chunk_says_of_times_is_the_servers_own() -> None:
    timings = {"timings": {"prompt_ms": 250.0, "predicted_ms": 500.0}}
    _, _, figures = await measured(FakeOpenAi(last=timings))
    assert figures["server"]["source"] == "each answer"
    assert figures["server"]["prefill_model_s"]["p50"] == 0.25
    assert figures["server"]["decode_model_s"]["p99"] == 0.5


def phases(count: int, seconds: float) -> str:
    name = 'legato_phase_seconds_{}{{phase="queue"{}}} {}'
    lines = ["# TYPE legato_phase_seconds histogram"]
    lines += [
        name.format("bucket", f',le="{bound}"', value)
        for bound, value in (("0.1", 5), ("0.2", 5 + count), ("+Inf", 5 + count))
    ]
    lines += [name.format("sum", "", seconds), name.format("count", "", 5 + count)]
    return "\n".join(lines) + "\n"


async def test_metrics_tell_what_came_between_two_looks() -> None:
    server = FakeOpenAi(metrics=[phases(0, 0.4), phases(10, 1.9)])
    _, _, figures = await measured(server)
    queue = figures["server"]["queue_s"]
    assert figures["server"]["source"].startswith("/metrics")
    assert (queue["mean"], queue["count"]) == (0.15, 10)
    assert queue["p50"] == pytest.approx(0.15)
    assert queue["p90"] == pytest.approx(0.19)


def test_a_wide_bucket_does_not_stretch_what_the_mean_says() -> None:
    looks = [ServerMetrics.parse([phases(*told)]) for told in ((0, 0.4), (10, 0.41))]
    queue = looks[1].since(looks[0])["queue_s"]
    assert queue is not None
    assert (queue["mean"], queue["p50"], queue["p90"]) == (0.001, 0.002, 0.01)


async def test_a_server_that_says_nothing_of_itself_is_said_to() -> None:
    _, _, figures = await measured(FakeOpenAi())
    assert figures["server"] == {"source": None}


@pytest.mark.parametrize(
    ("server", "settings", "error"),
    [
        (FakeOpenAi(models=("a", "b")), {}, r"names a, b; say which one with --model"),
        (FakeOpenAi(), {"model": "x"}, r"--model 'x' is not served .* has m"),
        (FakeOpenAi(paths=()), {}, r"takes no form of a request that is known: HTTP 404"),
        (FakeOpenAi(takes_ids=False, takes_text=False), {}, r"HTTP 400"),
    ],
)
async def test_a_server_that_cannot_be_measured_is_refused(
    server: FakeOpenAi, settings: dict[str, Any], error: str
) -> None:
    async with openai_at(server) as url:
        with pytest.raises(ServiceError, match=error):
            async with HttpTarget([url], **settings):
                pass


async def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(ServiceError, match=r"no server answers at http://127\.0\.0\.1:1 "):
        async with HttpTarget(["http://127.0.0.1:1"]):
            pass


async def test_the_token_is_shown_to_this_machine_and_to_no_other_in_plain() -> None:
    server = FakeOpenAi()
    access = ClientAccess(token="secret")
    async with openai_at(server) as url, HttpTarget([f"{url}/v1/"], access, "m"):
        assert all(b"bearer secret" in head.lower() for head in server.heads)
    with pytest.raises(ServiceError, match="not sent to"):
        async with HttpTarget(["http://10.0.0.1:80"], access):
            pass


async def test_prompts_of_words_are_as_many_as_the_tokens_ask_and_never_the_same() -> None:
    text = PromptText.measured((40, 90), (240, 490))
    assert (text.tokens_per_word, text.overhead) == (2.0, 10.0)
    assert text.num_words(110) == 50
    assert text.num_words(1) == 1
    with pytest.raises(ValueError, match="counts 5 tokens in 240 words"):
        PromptText.measured((40, 5), (240, 5))
    assert len(set(WORDS)) == len(WORDS) > 150
    assert text_of([0, 1, 2]) == "the of and"
    server = FakeOpenAi(takes_ids=False)
    await measured(server)
    await measured(server)
    prompts = [asked["prompt"][:40] for asked in server.asked if asked["max_tokens"] > 2]
    assert len(set(prompts)) == len(prompts) == 8


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_are_found_however_the_stream_is_cut(size: int) -> None:
    stream = b': hello\r\n\r\ndata: {"a":\ndata: 1}\r\nid: 4\n\ndata:x\n\nevent: e\n\ndata: end\n'
    events = EventStream()
    found = [e for i in range(0, len(stream), size) for e in events.feed(stream[i : i + size])]
    assert found == [b'{"a":\n1}', b"x"]


def test_an_event_without_end_is_refused() -> None:
    events = EventStream()
    events.feed(b"x" * (16 << 20))
    with pytest.raises(ValueError, match="an event has more than 16,777,216 bytes"):
        events.feed(b"x")


async def test_a_load_of_many_streams_goes_on_at_once() -> None:
    server = FakeOpenAi(fields=ALL, chunk_s=0.2)
    samples, _, _ = await measured(server, load(answer="4", concurrency=20, num_requests=20))
    assert all(s.ok for s in samples)
    assert server.most == 20


async def test_legatos_own_http_is_a_target_too_and_its_metrics_tell_its_times() -> None:
    async with http_service() as http:
        _, served, figures = await measured_at(http.url, load(prompt="8", answer="4"))
    assert (served.prompts, served.protocol, served.notes) == ("token ids", "/v1/completions", ())
    assert figures["ok"] == 4
    assert figures["messages"]["tokens_counted_by"] == "usage in each chunk"
    for name in ("queue_s", "prefill_s", "prefill_model_s", "handoff_s", "decode_s", "delivery_s"):
        assert figures["server"][name]["count"] == 4, name

"""`legato batch`: every line once, however the run ends; what is refused, retried, given up."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from fake_worker import FakeWorker
from http_service import CHAT, TEXT, asked, http_service
from router_service import Service, expected, text_of, until
from served import COMMAND, environment

from legato.cluster.batch import batch_endpoint
from legato.cluster.batch.batch_endpoint import BatchEndpoint, OutOfTimeError
from legato.cluster.batch.batch_input import BatchInput, BatchLine
from legato.cluster.batch.batch_output import BatchOutput
from legato.cluster.batch.batch_run import run_batch
from legato.cluster.errors import ServiceError, WrongInputError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def line(custom_id: str, prompt: str = "hello", max_tokens: int = 5, **body: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": TEXT,
        "body": asked(max_tokens, prompt=prompt, **body),
    }


def write(path: Path, lines: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in lines))
    return path


def records(path: Path) -> dict[str, dict[str, Any]]:
    """By custom_id; none comes twice, and no line is broken."""
    data = path.read_text()
    assert data == "" or data.endswith("\n")
    found = [json.loads(item) for item in data.splitlines()]
    by_id = {record["custom_id"]: record for record in found}
    assert len(by_id) == len(found), "a line comes twice"
    return by_id


async def run(
    requests: Path,
    output: Path,
    url: str,
    *,
    concurrency: int = 8,
    limit_s: float | None = None,
    retries_errors: bool = False,
) -> int:
    """Returns how many lines ran out of time."""
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    with (
        BatchInput(requests) as lines,
        BatchOutput(
            output,
            {ref.custom_id: ref.request_hash for ref in lines.lines},
            retries_errors=retries_errors,
        ) as finished,
    ):
        async with BatchEndpoint([url], concurrency, deadline_s, None) as endpoint:
            outcome = await run_batch(
                lines, finished, endpoint, concurrency=concurrency, on_line=ignore
            )
    return outcome.num_undone


def ignore(*, failed: bool, num_tokens: int) -> None:
    """For who wants to be told of no line."""


async def test_every_line_has_its_own_answer(tmp_path: Path) -> None:
    prompts = {f"line {number}": f"prompt {number}" for number in range(30)}
    lines = [line(custom_id, prompt) for custom_id, prompt in prompts.items()]
    lines[3]["url"] = CHAT
    lines[3]["body"] = asked(5, messages=[{"role": "user", "content": "prompt 3"}])
    async with http_service() as service:
        output = tmp_path / "out.jsonl"
        assert await run(write(tmp_path / "in.jsonl", lines), output, service.url) == 0
        reserves = service.service.decodes[0].reserves
        assert {reserve.priority for reserve in reserves} == {2}  # batch
    found = records(output)
    assert found.keys() == prompts.keys()
    for custom_id, record in found.items():
        assert record["id"].startswith("batch_req_")
        assert record["error"] is None
        response = record["response"]
        assert response["status_code"] == 200
        assert response["request_id"]
        choice = response["body"]["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text == text_of(expected(prompts[custom_id], 5))


async def test_no_more_than_so_many_are_in_flight(tmp_path: Path) -> None:
    decode = FakeWorker("decode", step_s=0.01, total_blocks=4000)
    async with http_service(decode=decode) as service:
        requests = write(tmp_path / "in.jsonl", [line(str(number)) for number in range(20)])
        running = asyncio.create_task(
            run(requests, tmp_path / "out.jsonl", service.url, concurrency=3)
        )
        most = 0
        while not running.done():
            most = max(most, service.service.router.num_in_flight)
            await asyncio.sleep(0.002)
        assert await running == 0
        assert 2 <= most <= 3


async def test_errors_of_a_line_are_its_own_and_final(tmp_path: Path) -> None:
    lines = [line("good"), line("bad", foo=1), line("other") | {"body": {"model": "nope"}}]
    async with http_service() as service:
        output = tmp_path / "out.jsonl"
        requests = write(tmp_path / "in.jsonl", lines)
        await run(requests, output, service.url)
        found = records(output)
        assert {key: r["response"]["status_code"] for key, r in found.items()} == {
            "good": 200,
            "bad": 400,
            "other": 400,
        }
        error = found["bad"]["response"]["body"]["error"]
        assert error["message"] == "foo is no field of this request"
        before = output.read_bytes()
        await run(requests, output, service.url)
        assert output.read_bytes() == before, "a finished line was sent again"
        assert service.service.router.counters.completed == 1


async def test_lines_that_were_changed_are_not_taken_for_done(tmp_path: Path) -> None:
    """An error's line is asked again once its request is another; an answer's is told of."""
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    async with http_service() as service:
        write(requests, [line("a"), line("b", foo=1), line("c", foo=1)])
        await run(requests, output, service.url)
        before = records(output)
        output.chmod(0o640)
        # As written by others: keys in another order, white space.
        mended = [dict(reversed(line("a").items())), line("b"), line("c", foo=1)]
        requests.write_text("".join(json.dumps(item, indent=None) + " \n" for item in mended))
        await run(requests, output, service.url)
        after = records(output)
        assert {key: r["response"]["status_code"] for key, r in after.items()} == {
            "a": 200,
            "b": 200,
            "c": 400,
        }
        assert (after["a"], after["c"]) == (before["a"], before["c"]), "they were asked again"
        assert output.stat().st_mode & 0o777 == 0o640
        assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
        whole = output.read_bytes()
        write(requests, [line("a", "another"), line("b"), line("c", foo=1)])
        with pytest.raises(WrongInputError, match="custom_id 'a' has the answer to another"):
            await run(requests, output, service.url, retries_errors=True)
        assert output.read_bytes() == whole
        write(requests, mended)
        await run(requests, output, service.url, retries_errors=True)
        again = records(output)
        assert again["c"]["response"]["status_code"] == 400
        assert again["c"]["id"] != after["c"]["id"], "it was not asked again"
        assert (again["a"], again["b"]) == (after["a"], after["b"])


async def test_a_run_goes_on_behind_a_line_that_was_cut(tmp_path: Path) -> None:
    lines = [line(str(number), f"prompt {number}") for number in range(6)]
    requests, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    async with http_service() as service:
        await run(requests, output, service.url)
        whole = output.read_bytes().splitlines(keepends=True)
        for cut in (1, len(whole[3]) // 2, len(whole[3]) - 1):
            output.write_bytes(b"".join(whole[:3]) + whole[3][:cut])
            done = service.service.router.counters.completed
            await run(requests, output, service.url)
            assert output.read_bytes().startswith(b"".join(whole[:3]))
            assert records(output).keys() == {str(number) for number in range(6)}
            assert service.service.router.counters.completed == done + 3


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    decode = FakeWorker("decode", step_s=0.005, total_blocks=8)
    async with http_service(decode=decode, max_queued_requests=1) as service:
        requests = write(
            tmp_path / "in.jsonl", [line(str(number), "a" * 20, 8) for number in range(12)]
        )
        output = tmp_path / "out.jsonl"
        assert await run(requests, output, service.url) == 0
        assert service.service.router.counters.refused > 0, "none was ever refused"
    assert {r["response"]["status_code"] for r in records(output).values()} == {200}


async def test_a_deadline_leaves_the_rest_to_the_next_run(tmp_path: Path) -> None:
    decode = FakeWorker("decode", step_s=0.02, total_blocks=4000)
    async with http_service(decode=decode) as service:
        lines = [line(str(number), max_tokens=20) for number in range(12)]
        requests, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        undone = await run(requests, output, service.url, concurrency=2, limit_s=1.2)
        assert undone > 0
        assert len(records(output)) == 12 - undone
        await service.service.settle()
        assert await run(requests, output, service.url) == 0
    assert len(records(output)) == 12


async def test_a_service_that_comes_back_is_waited_for_and_one_that_does_not_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_endpoint, "PATIENCE_S", 0.6)
    one = BatchLine("a", TEXT, asked(3, prompt="hello"))
    async with http_service() as service:
        taken = "http://127.0.0.1:9"  # nobody's
        async with BatchEndpoint([taken, service.url], 2, None, None) as endpoint:
            assert (await endpoint.answer(one)).status == 200
        async with BatchEndpoint([taken], 2, None, None) as endpoint:
            with pytest.raises(
                ServiceError, match=r"no service has answered at http://127.0.0.1:9"
            ):
                await endpoint.answer(one)
            with pytest.raises(ServiceError, match=r"no service answers at .* with --url"):
                await endpoint.check()
        async with BatchEndpoint([taken], 2, time.monotonic() + 0.2, None) as endpoint:
            with pytest.raises(OutOfTimeError):
                await endpoint.answer(one)


def answering(*responses: httpx2.Response) -> httpx2.MockTransport:
    rest = list(responses)
    return httpx2.MockTransport(lambda _: rest.pop(0))


@pytest.mark.parametrize(
    ("responses", "status"),
    [
        (
            [httpx2.Response(503, headers={"retry-after-ms": "1"}), httpx2.Response(200, json={})],
            200,
        ),
        ([httpx2.Response(429), httpx2.Response(409), httpx2.Response(200, json={})], 200),
        ([httpx2.Response(503, headers={"x-should-retry": "false"}, json={})], 503),
        ([httpx2.Response(500, text="not even JSON")], 500),
        ([httpx2.Response(404, json={})], 404),
    ],
)
async def test_what_is_asked_again(
    responses: list[httpx2.Response], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_endpoint, "FIRST_DELAY_S", 0.001)
    async with BatchEndpoint(["http://a"], 1, None, None) as endpoint:
        endpoint._client = httpx2.AsyncClient(transport=answering(*responses))
        result = await endpoint.answer(BatchLine("a", TEXT, {}))
        assert result.status == status


async def test_a_service_that_ends_is_not_waited_for() -> None:
    one = BatchLine("a", TEXT, asked(3, prompt="hello"))
    async with http_service() as ending, http_service() as staying:
        await ending.service.router.drain(0.0)
        async with BatchEndpoint([ending.url], 1, None, None) as endpoint:
            with pytest.raises(ServiceError, match="is shutting down; when it is back the same"):
                await asyncio.wait_for(endpoint.answer(one), 10)
        async with BatchEndpoint([ending.url, staying.url], 1, None, None) as endpoint:
            assert (await asyncio.wait_for(endpoint.answer(one), 10)).status == 200


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no request in it"),
        ("\n\n", "has no request in it"),
        ("{}\nx", "line 1: custom_id is None"),
        (json.dumps(line("a")) + "\nnonsense\n", "line 2: it is no JSON at column 2"),
        (json.dumps(line("a"))[:-1] + ', "custom_id": "b"}', "line 1: it has 'custom_id' twice in"),
        (json.dumps(line("a"))[:-2] + ', "n": 1, "n": 2}}', "line 1: it has 'n' twice in one ob"),
        (json.dumps(line("a", temperature=math.nan)), r"line 1: it has NaN or Infinity at column"),
        (json.dumps(line("a", user="\ud83d")), "line 1: it has half a surrogate pair"),
        ("\ufeff" + json.dumps(line("a")), "line 1: it begins with a byte order mark"),
        (json.dumps(line("a")) + "\n" + json.dumps(line("a")), "line 2: custom_id 'a' comes twice"),
        (json.dumps(line("a") | {"method": "GET"}), "method is 'GET', limit 'POST'"),
        (json.dumps(line("a") | {"url": "/v1/embeddings"}), "url is '/v1/embeddings'"),
        (json.dumps(line("a") | {"body": []}), r"body is \[\]"),
        (json.dumps(line("a") | {"more": 1}), "'more' is no field of it"),
        (json.dumps(line("a", stream=True)), "body.stream is set"),
        (
            json.dumps(line("a", priority="interactive")),
            "body.priority is 'interactive', limit 'ba",
        ),
        ("[" * 100_000, "line 1: it nests too deep"),
        ("[1]", "line 1: it is \\[1\\]"),
        ('{"custom_id": "' + "a" * 600 + '"}', "limit a string of 1 to 512"),
        ("x" * (5 << 20), "line 1 is longer than"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_sent(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(ServiceError, match=sentence):
        BatchInput(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hello\n", "line 1 is no output of a batch"),
        ('{"custom_id": "a"}\n', "line 1 is no output"),
        (
            '{"custom_id": "b", "response": {"status_code": 200}}\n',
            "'b' is not in this batch",
        ),
        ('{"custom_id": "a", "response": {"status_code": 200}}\n' * 2, "line 2: .* comes twice"),
    ],
)
def test_another_file_is_never_written_into(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(ServiceError, match=sentence):
        BatchOutput(path, {"a": "0"})
    assert path.read_text() == text


def test_one_process_has_the_output_at_a_time(tmp_path: Path) -> None:
    with (
        BatchOutput(tmp_path / "out.jsonl", {"a": "0"}),
        pytest.raises(ServiceError, match="another process writes"),
    ):
        BatchOutput(tmp_path / "out.jsonl", {"a": "0"})
    with BatchOutput(tmp_path / "out.jsonl", {"a": "0"}):
        pass


def test_a_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write
    with BatchOutput(tmp_path / "out.jsonl", {"a": "0", "b": "1"}) as output:
        output.add("a", 200, "r", {})
        monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[: len(data) // 2]))
        with pytest.raises(ServiceError, match="no space left"):
            output.add("b", 200, "r", {})
        monkeypatch.undo()
    assert records(tmp_path / "out.jsonl").keys() == {"a"}


async def command(*words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(env),
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_the_command_asks_the_service_for_its_http_endpoint(tmp_path: Path) -> None:
    requests = write(tmp_path / "in", [line("a"), line("b")])
    to = ("-o", str(tmp_path / "o"), str(requests))
    async with http_service() as service:
        at = service.service.address
        port = at.rpartition(":")[2]
        ways = (
            (("--port", port), {"LEGATO_URL": "http://127.0.0.1:9"}),
            (("--address", at), {}),
            ((), {"LEGATO_ADDRESS": at}),
            (("--url", service.url), {"LEGATO_ADDRESS": "127.0.0.1:9"}),
        )
        for number, (words, env) in enumerate(ways):
            output = tmp_path / str(number)
            done = await command("batch", "-o", str(output), str(requests), *words, env=env)
            assert done == (0, "2 of 2 lines done\n"), words
            assert len(records(output)) == 2
        code, said = await command("batch", *to, "--url", service.url, "--port", port)
        assert (code, said.count("\n")) == (2, 1)
        assert "is given beside --address or --port" in said
        code, said = await command("batch", *to, "--url", f"http://{at}")
        assert code == 1
        assert "speaks no HTTP (illegal request line)" in said
        assert said.endswith(f"gRPC port, say --address {at} in the place of --url\n")
        web = service.url.removeprefix("http://")
        code, said = await command("generate", "hello", "--raw", "--address", web)
        assert code == 1
        assert f"this command speaks gRPC, which is at {at}: --address {at}\n" in said
    async with Service([], []) as without:
        code, said = await command("batch", *to, "--address", without.address)
        assert code == 1
        assert "has no HTTP endpoint (--no-http), which a batch needs" in said


async def test_killed_again_and_again_no_line_is_lost_or_doubled(tmp_path: Path) -> None:
    decode = FakeWorker("decode", step_s=0.01, total_blocks=4000)
    async with http_service(decode=decode) as service:
        lines = [line(str(number), f"prompt {number}", 12) for number in range(120)]
        requests, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        words = ("batch", str(requests), "-o", str(output), "--url", service.url)
        kills = 0
        for _ in range(4):
            before = len(output.read_bytes().splitlines()) if output.exists() else 0
            process = await asyncio.create_subprocess_exec(
                *COMMAND, *words, "--concurrency", "4", stderr=subprocess.DEVNULL, env=environment()
            )
            async with asyncio.timeout(30):
                while process.returncode is None and (  # noqa: ASYNC110  # in a file
                    not output.exists() or len(output.read_bytes().splitlines()) < before + 8
                ):
                    await asyncio.sleep(0.005)
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            await process.wait()
        assert kills == 4
        assert len(output.read_bytes().splitlines()) < 120
        code, text = await command(*words)
        assert code == 0, text
        assert "120 of 120 lines done" in text
        assert "lines were done before" in text
    found = records(output)
    assert found.keys() == {str(number) for number in range(120)}
    for custom_id, record in found.items():
        choice = record["response"]["body"]["choices"][0]
        assert choice["text"] == text_of(expected(f"prompt {custom_id}", 12))


async def test_the_command_tells_in_its_exit_code_how_it_went(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a"), line("b", foo=1)])
    output = tmp_path / "out.jsonl"
    decode = FakeWorker("decode", step_s=0.05, total_blocks=4000)
    async with http_service(decode=decode) as service:
        words = (str(requests), "-o", str(output))
        code, text = await command("batch", *words, env={"LEGATO_URL": f"{service.url}/v1"})
        assert (code, "1 line has an error: mend" in text) == (1, True), text
        assert "--retry-errors asks all of them again" in text
        code, text = await command("batch", *words, "--retry-errors", "--url", service.url)
        assert (code, "1 line with errors is asked again" in text) == (1, True), text
        long = write(tmp_path / "long.jsonl", [line("a", max_tokens=400)])
        late = ("-o", str(tmp_path / "late.jsonl"), "--url", service.url, "--deadline", "2s")
        code, text = await command("batch", str(long), *late)
        assert (code, "the deadline came before 1 line;" in text) == (3, True), text
    code, text = await command("batch", *words, "--url", "http://127.0.0.1:9")
    assert code == 1  # all lines are finished: nobody has to be asked
    code, text = await command("batch", str(requests), "-o", str(requests))
    assert (code, "is the file of requests itself" in text) == (2, True)
    requests.write_text("x")
    code, text = await command("batch", *words)
    assert (code, "line 1: it is no JSON" in text) == (2, True)
    code, text = await command("batch", *words, "--deadline", "soon")
    assert (code, "must be a time such as" in text) == (2, True)
    code, text = await command("batch", *words, "--url", "somewhere")
    assert (code, "must be http://host:port" in text) == (2, True)


async def test_an_interrupted_run_ends_its_requests(tmp_path: Path) -> None:
    decode = FakeWorker("decode", step_s=0.05, total_blocks=4000)
    async with http_service(decode=decode) as service:
        requests = write(tmp_path / "in.jsonl", [line("a", max_tokens=400)])
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *("batch", str(requests), "-o", str(tmp_path / "out.jsonl"), "--url", service.url),
            stderr=subprocess.PIPE,
            env=environment(),
        )
        await until(lambda: decode.used_blocks > 0, 30)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            _, text = await process.communicate()
        assert process.returncode == 130
        assert b"0 of 1 line done" in text
        await service.service.settle()

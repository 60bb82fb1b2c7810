"""Commands against a service of canned answers, in this process."""

from __future__ import annotations

import errno
import io
import json
import socket
import sys
import threading
import time
from concurrent import futures
from importlib import import_module
from typing import TYPE_CHECKING, get_type_hints

import grpc
import pytest
from serve_configs import note_configs

from legato.cluster.cli import connection
from legato.cluster.cli import main as cli
from legato.cluster.cli.answer import Answer, InTurn, percentile, read_answer
from legato.cluster.cli.connection import AddressOption, PortOption, connect
from legato.cluster.cli.json_form import json_dict
from legato.cluster.cli.kv_capacity import kv_lines
from legato.cluster.cli.memory_size import parse_fraction, parse_size
from legato.cluster.cli.scale import parse_targets
from legato.cluster.cli.service_forms import SizeOrNone
from legato.cluster.cli.status_table import short_id, status_lines
from legato.cluster.cli.timing_table import timing_rows
from legato.cluster.client import Finished, Tokens
from legato.cluster.client_calls import scale_request
from legato.cluster.config import EngineOptions
from legato.cluster.dev_certs import make_certs
from legato.cluster.errors import ServiceError
from legato.cluster.heartbeat import dial_address
from legato.cluster.router_ports import check_port
from legato.protos import (
    cluster_pb2,
    cluster_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from legato.protos.tls_files import TlsFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLOCATED = common_pb2.WORKER_ROLE_COLOCATED
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


class CannedService(cluster_pb2_grpc.ClusterServicer, generation_pb2_grpc.GenerationServicer):
    """Answers two words; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.targets = {PREFILL: 1, DECODE: 1}
        self.ready = True
        self.has_template = True
        self.hangs_before: int | None = None  # which token
        self.drain_timeout_s: float | None = None
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server)
        generation_pb2_grpc.add_GenerationServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def GetModel(  # noqa: N802  # gRPC's spelling
        self, request: generation_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> generation_pb2.GetModelResponse:
        return generation_pb2.GetModelResponse(has_chat_template=self.has_template)

    def Generate(  # noqa: N802  # gRPC's spelling
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.sampling.temperature < 0:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature is -1")
        for index, word in enumerate(("two ", "wörds")):
            if index == self.hangs_before:
                ended = threading.Event()
                if context.add_callback(ended.set):
                    ended.wait(20)
                return
            for other in range(max(1, request.n)):
                delta = generation_pb2.Delta(
                    text=f"{other or ''}{word}", token_ids=[index], token_offset=index
                )
                start = generation_pb2.StreamStart(seed=7, max_tokens=2, model_fingerprint="f")
                yield generation_pb2.GenerateResponse(
                    request_id=request.request_id,
                    start=start if index == other == 0 else None,
                    delta=delta,
                    index=other,
                )
        for other in reversed(range(max(1, request.n))):
            yield generation_pb2.GenerateResponse(
                request_id=request.request_id,
                finish=generation_pb2.Finish(
                    finish_reason=common_pb2.FINISH_REASON_STOP,
                    usage=generation_pb2.Usage(
                        prompt_tokens=3, completion_tokens=2, seed=7 + other
                    ),
                    timings=generation_pb2.Timings(
                        ttft_s=0.5, prefill_forwards=1, decode_forwards=1
                    ),
                ),
                index=other,
            )

    def GetStatus(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.GetStatusResponse:
        pools = [
            cluster_pb2.PoolStatus(role=role, target=target, ready=1)
            for role, target in self.targets.items()
        ]
        pools[1].message = "" if self.ready else "0 of 1 ready; waiting for 1 GPU"
        worker = pools[1].workers.add(worker_id="decode-0123456789abcdef", role=DECODE)
        load = worker.load
        load.total_blocks, load.free_blocks, load.reserved_blocks = 1000, 600, 90
        load.cached_blocks, load.held_blocks = 250, 310
        load.running, load.waiting, load.swapped = 11, 12, 13
        load.preemptions, load.preemptions_returned = 1400, 15
        load.swap_held_blocks, load.swap_total_blocks = 16, 1700
        load.kv_bytes_sent, load.kv_bytes_sent_by_memory = 3 * 10**9, 225 * 10**7
        load.prefix_blocks_asked, load.prefix_blocks_hit = 1800, 450
        return cluster_pb2.GetStatusResponse(
            model="m", ready=self.ready, pools=pools, owner_host="elsewhere", owner_pid=1
        )

    def ScalePool(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.ScalePoolRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.ScalePoolResponse:
        self.targets |= {target.role: target.target for target in request.targets}
        return cluster_pb2.ScalePoolResponse(
            targets=[cluster_pb2.PoolTarget(role=r, target=t) for r, t in self.targets.items()]
        )

    def Shutdown(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.ShutdownRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.ShutdownResponse:
        self.drain_timeout_s = request.drain_timeout_s
        self.server.stop(0.2)
        return cluster_pb2.ShutdownResponse()


@pytest.fixture
def service() -> Iterator[CannedService]:
    canned = CannedService()
    yield canned
    canned.server.stop(0).wait(5)


@pytest.fixture
def run(service: CannedService, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.delenv("LEGATO_ADDRESS", raising=False)
    return Runner(monkeypatch, service.port)


class Runner:
    """Runs `legato …` with the service's port; returns the exit code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
        self._monkeypatch = monkeypatch
        self.port = port

    def __call__(self, *words: str) -> int:
        return self.bare(*words, "--port", str(self.port))

    def bare(self, *words: str) -> int:
        self._monkeypatch.setattr(sys, "argv", ["legato", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)


Captured = pytest.CaptureFixture[str]


def test_generate_prints_the_answer_and_nothing_else(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    assert run("generate", "hello", "--max-tokens", "5", "--seed", "0", "--stop", "x") == 0
    assert capsys.readouterr().out == "two wörds\n"
    request = service.requests[0]
    assert [(m.role, m.content) for m in request.messages.messages] == [("user", "hello")]
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (5, ["x"])
    assert request.sampling.HasField("seed")  # an explicit zero is a value
    assert not request.sampling.HasField("temperature")


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_generate_says_that_its_deadline_passed(
    run: Runner, service: CannedService, capsys: Captured, num_tokens: int
) -> None:
    service.hangs_before = num_tokens
    assert run("generate", "hello", "--raw", "--timeout", "0.3") == 1
    out, err = capsys.readouterr()
    assert out == ["", "two "][num_tokens]
    assert err == (
        "legato: the deadline of 0.3 s passed before the answer ended "
        f"(tokens until then: {num_tokens})\n"
    )


def test_generate_is_raw_where_there_is_no_template_or_on_demand(
    run: Runner, service: CannedService
) -> None:
    service.has_template = False
    assert run("generate", "a") == 0
    service.has_template = True
    assert run("generate", "b", "--raw") == 0
    assert run("generate", "c", "--chat", "--system", "s") == 0
    assert [request.text for request in service.requests] == ["a", "b", ""]
    assert [m.role for m in service.requests[2].messages.messages] == ["system", "user"]


def test_generate_as_json(run: Runner, capsys: Captured) -> None:
    assert run("generate", "hello", "--json", "--stats") == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert (answer["text"], answer["token_ids"]) == ("two wörds", [0, 1])
    assert answer["usage"]["completion_tokens"] == 2
    assert "forward passes" in captured.err


def test_generate_prints_several_answers_apart(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    assert run("generate", "hello", "--n", "3", "--priority", "batch") == 0
    assert capsys.readouterr().out == (
        "[1 of 3]\ntwo wörds\n\n[2 of 3]\n1two 1wörds\n\n[3 of 3]\n2two 2wörds\n"
    )
    assert (service.requests[0].n, service.requests[0].priority) == (3, common_pb2.PRIORITY_BATCH)
    assert run("generate", "hello", "--n", "2", "--json", "--stats") == 0
    captured = capsys.readouterr()
    answers = json.loads(captured.out)["answers"]
    assert [answer["text"] for answer in answers] == ["two wörds", "1two 1wörds"]
    assert [answer["usage"]["seed"] for answer in answers] == [7, 8]
    assert captured.err.count("forward passes") == 2
    assert "2 of 2" in captured.err


def test_of_several_answers_the_first_unfinished_is_shown_as_it_comes() -> None:
    out: list[str] = []
    shown = InTurn(3, out.append)
    for index, text in ((1, "b"), (0, "a"), (1, ""), (2, "c")):
        shown.take(index, text)
    assert "".join(out) == "[1 of 3]\na"
    shown.take(0, "")
    assert "".join(out) == "[1 of 3]\na\n\n[2 of 3]\nb\n\n[3 of 3]\nc"
    shown.take(2, "d")
    assert out[-1] == "d"


def test_a_refusal_of_several_answers_prints_none(run: Runner, capsys: Captured) -> None:
    assert run("generate", "hello", "--n", "2", "--temperature", "-1") == 1
    assert capsys.readouterr().out == ""


def test_a_refusal_is_one_line_on_stderr(run: Runner, capsys: Captured) -> None:
    assert run("generate", "hello", "--temperature", "-1") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "legato: INVALID_ARGUMENT: sampling.temperature is -1\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max-tokens", "99999999999"], "'--max-tokens'"),
        (["--top-k", "99999999999"], "'--top-k'"),
        (["--seed", str(2**64)], "'--seed'"),
        (["--timeout", "inf"], "'--timeout'"),
        (["--timeout", "nan"], "'--timeout'"),
    ],
)
def test_a_number_that_no_request_can_hold_is_refused_by_name(
    run: Runner, service: CannedService, capsys: Captured, words: list[str], complaint: str
) -> None:
    assert run("generate", "hello", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not service.requests


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["\udcff"], "the prompt"),
        (["a", "--system", "b\udcff"], "--system"),
        (["a", "--stop", "b", "--stop", "\udcff"], "--stop"),
    ],
)
def test_text_that_is_no_utf8_is_refused(
    run: Runner, capsys: Captured, words: list[str], name: str
) -> None:
    assert run("generate", *words) == 1
    assert capsys.readouterr().err.startswith(f"legato: {name} is no UTF-8 text")


@pytest.mark.parametrize(
    ("stdin", "complaint"),
    [
        (None, "the prompt is to be read from standard input, which is closed"),
        (io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"), "the prompt is no UTF-8 text"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_said(
    run: Runner,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    stdin: io.TextIOWrapper | None,
    complaint: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("generate", "-") == 1
    assert capsys.readouterr().err.startswith(f"legato: {complaint}")


def test_an_answer_that_cannot_be_written_is_said(
    run: Runner, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert run("generate", "hello") == 1
    error = capsys.readouterr().err
    assert error == "legato: the answer cannot be written: No space left on device\n"


def test_where_nothing_listens_every_command_says_so(run: Runner, capsys: Captured) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        for words in (["generate", "x"], ["status"], ["scale", "decode=2"], ["stop"]):
            assert run.bare(*words, "--port", port) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"legato: no service answers at 127.0.0.1:{port}; start one")
            assert error.count("\n") == 1


def test_an_address_that_can_be_no_host_name_is_nobodys(run: Runner, capsys: Captured) -> None:
    assert run.bare("status", "--address", "a" * 64 + ":1") == 1
    assert capsys.readouterr().err.startswith("legato: no service answers at aaa")


def test_of_several_routers_one_that_is_there_is_asked(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]},127.0.0.1:{run.port}"
        for _ in range(2):
            assert run.bare("generate", "hello", "--raw", "--address", address) == 0
        assert run.bare("scale", "decode=2", "--address", address) == 0
        assert capsys.readouterr().out == "two wörds\ntwo wörds\ntarget: prefill 1, decode 2\n"
        assert run.bare("status", "--address", address) == 0
        first, second = address.split(",")
        told = capsys.readouterr().out
        assert f"requests at {first}: no answer from this router\n" in told
        assert f"requests at {second}: 0 queued, 0 in flight" in told
        assert run.bare("stop", "--address", address) == 0
    assert len(service.requests) == 2


def test_of_several_routers_one_that_hangs_is_left_out(
    run: Runner, service: CannedService, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GREETING_TIMEOUT_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the kernel makes the connection, and nobody says anything
        address = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{run.port}"
        assert run.bare("status", "--address", address) == 0
        assert "no answer from this router" in capsys.readouterr().out
        assert run.bare("scale", "decode=2", "--address", address) == 0
        with connect(address) as channel:  # as `legato role` and `legato stop` do
            assert cluster_pb2_grpc.ClusterStub(channel).GetStatus(
                cluster_pb2.GetStatusRequest(), timeout=5
            )
    assert service.targets[DECODE] == 2


@pytest.mark.parametrize("address", ["nowhere", "a:1,b", "a:99999", "a:1,,b:2"])
def test_a_wrong_address_is_refused(run: Runner, capsys: Captured, address: str) -> None:
    assert run.bare("status", "--address", address) == 2
    error = capsys.readouterr().err
    assert "must be host:port, or several with commas between them" in error
    assert repr(address) in error


def test_another_grpc_server_is_named_as_such(run: Runner, capsys: Captured) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert run.bare("status", "--port", str(port)) == 1
    finally:
        server.stop(0).wait(5)
    assert f"what listens at 127.0.0.1:{port} is no Legato service" in capsys.readouterr().err


def test_who_asks_a_service_of_tls_without_it_is_told_so_at_once(
    run: Runner, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(tmp_path)
    tls = TlsFiles(str(tmp_path / "service.pem"), str(tmp_path / "service.key"))
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    server.start()
    started_s = time.monotonic()
    try:
        for address in (f"127.0.0.1:{port}", f"127.0.0.1:1,127.0.0.1:{port}"):
            assert run.bare("generate", "--raw", "hello", "--address", address) == 1
            assert "it may want TLS (--tls-ca, or --tls)" in capsys.readouterr().err
        assert time.monotonic() - started_s < 10  # no outage, whose end would be waited for
        address = f"127.0.0.1:{port},127.0.0.1:{run.port}"
        assert run.bare("generate", "--raw", "hello", "--address", address) == 0
        monkeypatch.setenv("LEGATO_TOKEN", "a-token")
        assert run.bare("generate", "--raw", "hello", "--address", address) == 0
    finally:
        server.stop(0).wait(5)


def test_status_shows_pools_and_workers(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    assert run("status") == 0
    text = capsys.readouterr().out
    assert "m: ready" in text
    assert "decode: 1 of 1 ready" in text
    workers, blocks = [line for line in text.splitlines() if line.startswith("decode-01234567 ")]
    assert workers.split()[-7:] == ["11", "12", "13", "1,400", "(15", "returned)", "0"]
    # Free blocks are those that are neither cached nor held: 600 + 90 promised - 250.
    columns = "440 250 310 1,000 90 16 of 1,700 25 % of 1,800 3 GB, 75 % by shared memory"
    assert " ".join(blocks.split()[1:]) == columns
    assert "decode: 1 of 1 ready; prefix hits: 25 % of 1,800 blocks" in text
    service.ready = False
    assert run("status") == 3
    assert "waiting for 1 GPU" in capsys.readouterr().out
    assert run("status", "--json") == 3
    told = capsys.readouterr().out
    load = json.loads(told)["pools"][1]["workers"][0]["load"]
    assert (load["swapped"], load["preemptions_returned"]) == (13, 15)
    worker = json.loads(told)["pools"][1]["workers"][0]
    assert worker["kv_blocks"] == {  # as the table has them
        "free": 440,
        "cached": 250,
        "held": 310,
        "total": 1000,
        "promised": 90,
    }
    assert not {"free_blocks", "total_blocks"} & worker["load"].keys()
    assert (load["swap_held_blocks"], load["prefix_blocks_hit"]) == (16, 450)


def test_scale_sets_the_pools_named(run: Runner, service: CannedService, capsys: Captured) -> None:
    assert run("scale", "decode=3", "--wait", "5") == 0
    assert service.targets == {PREFILL: 1, DECODE: 3}
    assert capsys.readouterr().out == "target: prefill 1, decode 3\n"
    service.ready = False
    assert run("scale", "prefill=0") == 1
    assert service.targets == {PREFILL: 1, DECODE: 3}
    refusal = capsys.readouterr().err
    assert refusal.startswith("legato: nothing is served with no prefill worker; to stop all")
    assert run("scale", "prefill=0", "decode=0") == 1
    assert "no prefill and no decode worker" in capsys.readouterr().err
    assert run("scale", "prefill=0", "--force") == 0
    assert "nothing is served with no prefill worker" in capsys.readouterr().err
    assert run("scale", "decode=3") == 0, "nothing was served before either"
    assert capsys.readouterr().err
    assert run("scale", "colocated=2") == 0
    assert service.targets == {PREFILL: 0, DECODE: 3, COLOCATED: 2}
    said = capsys.readouterr()
    assert said.out == "target: prefill 0, decode 3, colocated 2\n"
    assert said.err == ""
    assert run("scale", "decode=4", "--wait", "0.3") == 1
    assert "not there within 0.3 s: decode: 0 of 1 ready" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["decode"], ["decode=-1"], ["other=1"], ["decode=1", "decode=2"], ["decode=1025"]]
)
def test_scale_refuses_what_is_no_target(
    run: Runner, service: CannedService, words: list[str]
) -> None:
    assert run("scale", *words) == 2
    assert service.targets == {PREFILL: 1, DECODE: 1}


def test_targets_of_zero_are_set_not_absent() -> None:
    assert parse_targets(["prefill=0"]) == {"prefill": 0}
    (target,) = scale_request({"prefill": 0}).targets
    assert target.HasField("target")
    assert target.target == 0


def test_status_hides_a_pool_that_a_colocated_one_stands_for() -> None:
    answer = cluster_pb2.GetStatusResponse(
        pools=[
            cluster_pb2.PoolStatus(role=PREFILL),
            cluster_pb2.PoolStatus(role=DECODE, message="1 draining"),
            cluster_pb2.PoolStatus(role=COLOCATED, target=2, ready=2),
        ]
    )
    assert status_lines(answer, {})[1:] == ["decode: 1 draining", "colocated: 2 of 2 ready"]


def test_stop_waits_until_the_port_is_closed(
    run: Runner, service: CannedService, capsys: Captured
) -> None:
    assert run("stop", "--drain", "3") == 0
    assert service.drain_timeout_s == 3
    assert capsys.readouterr().out == "stopped\n"
    assert run("status") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--dtype", "int8"], "must be auto, float32, bfloat16 or float16"),
        (["--kv-cache", "int4"], "--kv-cache: must be auto, fp8 or int8, got 'int4'"),
        (["--decode-dtype", "int8"], "--decode-dtype: must be auto, float32, bfloat16 or float16"),
        (["--decode-kv-cache", "x"], "--decode-kv-cache: must be auto, fp8 or int8, got 'x'"),
        (
            ["--dtype", "float32", "--decode-dtype", "bfloat16"],
            "--decode-dtype: 'bfloat16' is not --dtype 'float32': KV must be converted on the way; "
            "give --kv-wire",
        ),
        (["--decode-kv-cache", "int8"], "--decode-kv-cache: 'int8' is not --kv-cache 'auto'"),
        (
            ["--decode-dtype", "bfloat16", "--kv-wire", "bfloat16", "--weights", "int8"],
            "with --weights int8 both pools must have one dtype",
        ),
        (
            ["--kv-wire", "int4"],
            "must be same, float32, bfloat16, float16, int8 or fp8, got 'int4'",
        ),
        (["--weights", "int3"], "must be auto, keep, int8, int4, int4-g64"),
        (["--device", "tpu"], "must be auto, cpu or cuda"),
        (["--kv-memory", "lots"], "2GiB, or a fraction in (0, 1], got 'lots'"),
        (["--kv-memory", "0"], "1 byte, or a fraction in (0, 1], got 0"),
        (["--kv-memory", "1.5"], "--kv-memory: without a unit must be whole bytes or a fraction"),
        (["--kv-memory", "0.0"], "in (0, 1], got '0.0'"),
        (["--swap-memory", "some"], "--swap-memory: must be a size such as"),
        (["--swap-memory", "-1"], "2GiB, or 0 for none, got '-1'"),
        (["--swap-memory", "0.5"], "at least 1 byte, or 0 for none, got 0.5"),
        (["--kv-lane", "ib"], "--kv-lane: must be auto or grpc, got 'ib'"),
        (["--admission", "hope"], "--admission: must be expected or reserve, got 'hope'"),
        (["--admission-risk", "1"], "--admission-risk: must be a number in [0, 1), got '1'"),
        (["--admission-risk", "nan"], "--admission-risk: must be a number in [0, 1), got 'nan'"),
        (["--decode", "0"], "--decode: 0 serves nothing, whatever --prefill is: it needs a"),
        (["--prefill", "0", "--decode", "3"], "--prefill: 0 serves nothing"),
        (["--block-size", "0"], "must be a whole number at least 1, got '0' (see"),
        (["--port", "70000"], "must be a whole number in [0, 65535], got '70000' (see"),
        (["--admission-risk", "much"], "must be a number in [0, 1), got 'much' (see"),
        (["--request-log", "/dev/null/x"], "cannot append to '/dev/null/x': Not a directory"),
    ],
)
def test_serve_refuses_bad_options_before_anything_starts(
    run: Runner, capsys: Captured, words: list[str], complaint: str
) -> None:
    assert run.bare("serve", "--model", "x", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.endswith("(see `legato serve --help`)\n")
    assert error.count("\n") == 1


def test_serve_on_a_taken_port_says_what_to_do(run: Runner, capsys: Captured) -> None:
    assert run.bare("serve", "--model", "x", "--port", str(run.port)) == 1
    assert capsys.readouterr().err == (
        f"legato: port {run.port} on 127.0.0.1 is in use; choose another with --port, or end the "
        f"service there with `legato stop --port {run.port}`\n"
    )


def test_check_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServiceError, match=f"port {port} on 127.0.0.1 is in use"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)  # free again at once
    check_port("127.0.0.1", 0)
    with pytest.raises(ServiceError, match=r"--host no\.such\.host\.invalid"):
        check_port("no.such.host.invalid", 0)
    with pytest.raises(ServiceError, match=r"cannot listen on 192\.0\.2\.250"):
        check_port("192.0.2.250", 0)  # a documentation address: nobody's


# They ask no service that runs.
LOCAL = {"serve", "config", "doctor", "certs", "demo", "profile", "plan"}


def test_every_command_that_asks_a_service_is_told_where_in_the_same_words() -> None:
    for name, module in cli.COMMANDS.items():
        command = getattr(import_module(f"legato.cluster.cli.{module}"), name)
        hints = get_type_hints(command, include_extras=True)
        asked = {word: hints.get(word) for word in ("address", "port")}
        if name in LOCAL:
            assert asked["address"] is None
        else:
            assert asked == {"address": AddressOption, "port": PortOption}, name


def test_numbers_are_numbers_in_json() -> None:
    told = json_dict(
        generation_pb2.Finish(
            usage=generation_pb2.Usage(prompt_tokens=3, seed=2**63 - 1),
            timings=generation_pb2.Timings(ttft_s=float("inf"), kv_bytes_handed_over=5),
        )
    )
    assert told["usage"]["seed"] == 2**63 - 1
    assert told["timings"]["kv_bytes_handed_over"] == 5
    assert told["timings"]["ttft_s"] is None
    answer = cluster_pb2.GetStatusResponse(owner_pid=7)
    answer.pools.add().workers.add().load.kv_bytes_sent = 9
    told = json_dict(answer)
    assert told["owner_pid"] == 7
    assert told["pools"][0]["workers"][0]["load"]["kv_bytes_sent"] == 9
    request = common_pb2.SamplingParams(logit_bias={3: float("-inf")}, seed=0)
    assert json_dict(request)["logit_bias"] == {"3": None}
    assert json_dict(request)["seed"] == 0


def test_version_and_help(run: Runner, capsys: Captured) -> None:
    assert run.bare("--version") == 0
    assert capsys.readouterr().out.strip()
    assert run.bare("--help") == 0
    text = capsys.readouterr().out
    for command in ("serve", "generate", "status", "scale", "role", "stop", "demo"):
        assert command in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("512mib", 512 << 20), ("2 GB", 2 * 10**9), ("1.5K", 1536), ("77", 77)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_number_without_a_unit_may_be_a_fraction() -> None:
    assert [parse_fraction(text) for text in ("0.6", " .25", "1", "1.0")] == [
        0.6,
        0.25,
        1.0,
        1.0,
    ]
    assert [parse_fraction(text) for text in ("2", "0", "1GiB", "0.5GiB", "77", "")] == [None] * 6
    assert [SizeOrNone().read(text) for text in ("0", "2K")] == [0, 2048]


def test_memory_options_reach_the_service(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = note_configs(monkeypatch)
    assert run.bare("serve", "--model", "x") == 0
    words = ["--admission", "reserve", "--admission-risk", "0.2", "--swap-memory", "0"]
    assert run.bare("serve", "--model", "x", "--kv-memory", "0.6", *words) == 0
    assert run.bare("serve", "--model", "x", "--kv-memory", "5000", "--swap-memory", "1K") == 0
    plain, fraction, sized = (config.engine for config in configs)
    assert plain == EngineOptions()
    assert (fraction.kv_memory_fraction, fraction.swap_memory_bytes) == (0.6, 0)
    assert (fraction.admission, fraction.admission_risk) == ("reserve", 0.2)
    assert (sized.kv_memory_fraction, sized.kv_memory_bytes) == (None, 5000)
    assert sized.swap_memory_bytes == 1024


def test_options_of_one_pool_reach_the_service(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = note_configs(monkeypatch)
    both = ["--dtype", "float32", "--decode-dtype", "bfloat16", "--decode-kv-cache", "int8"]
    assert run.bare("serve", "--model", "x", *both, "--kv-wire", "float16") == 0
    # What is the same needs no wire.
    alike = ["--dtype", "float32", "--decode-dtype", "float32", "--decode-kv-cache", "auto"]
    assert run.bare("serve", "--model", "x", *alike) == 0
    apart, same = configs
    assert (apart.engine.dtype, apart.engine.kv_cache) == ("float32", "auto")
    assert (apart.decode_engine().dtype, apart.decode_engine().kv_cache) == ("bfloat16", "int8")
    assert apart.engine.kv_wire == apart.decode_engine().kv_wire == "float16"
    assert same.decode_engine() == same.engine


def test_a_service_says_what_its_kv_memory_holds() -> None:
    model = generation_pb2.GetModelResponse(
        prefill_kv_tokens=9000, decode_kv_tokens=8192, context_length=8192
    )
    assert kv_lines(model) == ["KV cache: 9,000 tokens a prefill worker, 8,192 a decode worker"]
    model.decode_kv_tokens = 2048
    _, warning = kv_lines(model)
    assert "less than a context of 8,192 tokens: longer requests are refused" in warning
    assert "--kv-memory 4 times as much, or --context-length 2048" in warning
    model.decode_kv_tokens = 1456
    assert "--kv-memory 5.7 times as much" in kv_lines(model)[1]  # 5.6 times 1,456 is too little


def test_dial_address() -> None:
    assert dial_address("0.0.0.0:1") == "127.0.0.1:1"
    assert dial_address("[::]:1") == "[::1]:1"
    assert dial_address("192.0.2.1:1") == "192.0.2.1:1"


def test_short_id() -> None:
    assert short_id("decode-0123456789abcdef") == "decode-01234567"
    assert short_id("decode-3") == "decode-3"


def test_tokens_that_share_a_message_share_its_gap() -> None:
    times = iter([0.0, 1.0, 3.0, 3.0])
    events = [
        Tokens(0, "", (1,), 0),
        Tokens(0, "x", (2, 3), 1),
        Finished(0, generation_pb2.Finish()),
    ]
    answer = read_answer(events, lambda _: None, clock=lambda: next(times))
    assert answer.token_times_s == [1.0, 2.0, 3.0]
    assert answer.ttft_s == 1.0
    assert answer.gaps_s == [1.0, 1.0]
    assert answer.text == "x"


def test_percentile_is_a_measured_value() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_timing_rows_of_one_token_have_no_decode_rate() -> None:
    answer = Answer(token_ids=[1], token_times_s=[0.1], finish=generation_pb2.Finish())
    names = [row[0] for row in timing_rows(answer)]
    assert "inter-token latency" not in names
    assert "KV handed over" in names
    with pytest.raises(ValueError, match="not finished"):
        timing_rows(Answer())


def test_the_timings_say_how_often_an_answer_was_preempted() -> None:
    finish = generation_pb2.Finish()
    assert "  preempted" not in [row[0] for row in timing_rows(Answer(finish=finish))]
    finish.timings.preemptions = 2
    assert ("  preempted", "2 times", "for want of KV room") in timing_rows(Answer(finish=finish))


def test_the_decode_rate_is_not_that_at_which_a_late_client_found_the_tokens() -> None:
    finish = generation_pb2.Finish(
        usage=generation_pb2.Usage(completion_tokens=3),
        timings=generation_pb2.Timings(decode_s=0.5),
    )
    answer = Answer(token_ids=[1, 2, 3], token_times_s=[0.9, 0.9, 0.900001], finish=finish)
    rows = {row[0]: row[1] for row in timing_rows(answer)}
    assert rows["decode rate"] == "4.0 tokens/s"

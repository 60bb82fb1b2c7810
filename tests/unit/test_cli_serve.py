"""What `legato serve` refuses before anything starts, and which options reach the service."""

from __future__ import annotations

import http.server
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from serve_configs import note_configs

from legato.cluster.cli.kv_capacity import kv_lines
from legato.cluster.cli.memory_size import parse_fraction, parse_size
from legato.cluster.cli.service_forms import SizeOrNone
from legato.cluster.config import EngineOptions
from legato.cluster.errors import ServiceError
from legato.cluster.router_ports import check_port
from legato.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from canned_service import Runner

Captured = pytest.CaptureFixture[str]


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
        (["--threads", "10000"], "--threads: must be a whole number in [1, 1024], got '10000'"),
        (["--threads", "1024"], "--threads: is 1024, limit "),
        (["--port", "65000"], "--http-port: the HTTP endpoint needs the port 66000; the last port"),
        (["--http-port", "50051"], "--http-port: port 50051 is asked for twice, by --port and by "),
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


@contextmanager
def web_server(body: bytes) -> Iterator[int]:
    """Says `body` to whoever asks; the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server's
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("body", "way_out"),
    [
        (b"<html>", ""),
        (b'{"status": "ok"}', ""),
        (b'{"grpc_port": 7}', ", or end the service whose HTTP port it is with `legato stop --po"),
    ],
)
def test_only_a_service_is_told_to_be_stopped(body: bytes, way_out: str) -> None:
    with web_server(body) as port, pytest.raises(ServiceError) as raised:
        check_port("127.0.0.1", port)
    said = str(raised.value)
    assert said.startswith(
        f"port {port} on 127.0.0.1 is in use; choose another with --port{way_out}"
    )
    assert ("legato stop" in said) == bool(way_out)


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

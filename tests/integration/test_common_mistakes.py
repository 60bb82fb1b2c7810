"""The ten mistakes that are made most: each gives one line, which says what to do, in time."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from ray_head import ray_head
from served import legato
from tiny_models import make_llama_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.integration

BOUND_S = 60.0  # with the start of a Ray, which takes long on a busy machine
SMALL = ("--port", "0", "--kv-memory", "16MiB", "--threads", "1")
RAY_TOO_SLOW = "The current node timed out during startup"  # which Ray has fixed at 30 s
NUM_TRIES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("mistakes") / "tiny")


def one_line(*words: str, code: int, env: Mapping[str, str] | None = None) -> str:
    """The only line of a command that is no step of its start."""
    for _ in range(NUM_TRIES):
        began_s = time.monotonic()
        ran = legato(*words, env=env)
        took_s = time.monotonic() - began_s
        if RAY_TOO_SLOW not in ran.stderr:
            break
    assert ran.returncode == code, ran.stderr
    assert took_s < BOUND_S
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("[")]
    assert len(lines) == 1, ran.stderr
    return lines[0]


@contextmanager
def gated_hub() -> Iterator[str]:
    """Answers as the hub does to who has not accepted a model's terms."""

    class Gate(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server's
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("X-Error-Message", "Access to this model is restricted")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815  # http.server's

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def wrong_path(_: Path, __: Path) -> tuple[str, str, str]:
    line = one_line("serve", "--model", "./no/such/model", *SMALL, code=1)
    return line, "no such folder or file: './no/such/model'", "check the path, or give a hub id"


def gated_id(_: Path, tmp_path: Path) -> tuple[str, str, str]:
    with gated_hub() as endpoint:
        env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        line = one_line("serve", "--model", "org/gated", *SMALL, code=1, env=env)
    return line, "org/gated is gated", "log in with `hf auth login`"


def too_little_memory(model: Path, _: Path) -> tuple[str, str, str]:
    words = ("--port", "0", "--threads", "1", "--kv-memory", "900TiB", "--device", "cpu")
    line = one_line("serve", "--model", str(model), *words, code=2)
    return line, "--kv-memory is 989560464998400 bytes, limit ", "--kv-memory"


def port_taken(model: Path, _: Path) -> tuple[str, str, str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = one_line("serve", "--model", str(model), "--port", str(port), code=1)
    return line, f"port {port} on 127.0.0.1 is in use", "choose another with --port"


def no_gpu(model: Path, _: Path) -> tuple[str, str, str]:
    words = ("--device", "cuda", *SMALL)
    env = {"CUDA_VISIBLE_DEVICES": ""}
    line = one_line("serve", "--model", str(model), *words, code=1, env=env)
    return line, "GPU", "--device cpu"


def wrong_ray_version(model: Path, tmp_path: Path) -> tuple[str, str, str]:
    with ray_head(tmp_path, version="9.8.7") as address:
        words = ("--ray-address", address, *SMALL)
        env = {"RAY_AUTH_MODE": "disabled"}
        line = one_line("serve", "--model", str(model), *words, code=1, env=env)
    return line, "the cluster runs Ray 9.8.7", "(pip install ray==9.8.7)"


def mismatched_workers(model: Path, _: Path) -> tuple[str, str, str]:
    words = ("--dtype", "float32", "--decode-dtype", "bfloat16", *SMALL)
    line = one_line("serve", "--model", str(model), *words, code=2)
    return line, "--decode-dtype: 'bfloat16' is not --dtype 'float32'", "give --kv-wire a dtype"


def unsupported_architecture(model: Path, tmp_path: Path) -> tuple[str, str, str]:
    other = make_llama_folder(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (other / "config.json").write_text(json.dumps(config))
    line = one_line("serve", "--model", str(other), *SMALL, code=1)
    return line, "MambaForCausalLM", "supported"


def bad_yaml(_: Path, tmp_path: Path) -> tuple[str, str, str]:
    path = tmp_path / "legato.yaml"
    path.write_text("model: demo\nkv_wire: bf16\n")
    line = one_line("serve", "--config", str(path), code=2)
    return line, f"kv_wire ({path}:2): must be same, float32", "did you mean bfloat16?"


def no_route_to_router(_: Path, __: Path) -> tuple[str, str, str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        line = one_line("generate", "hello", "--address", address, code=1)
    return line, f"no service answers at {address}", "say where it is with --address"


@pytest.mark.parametrize(
    "mistake",
    [
        wrong_path,
        gated_id,
        too_little_memory,
        port_taken,
        no_gpu,
        wrong_ray_version,
        mismatched_workers,
        unsupported_architecture,
        bad_yaml,
        no_route_to_router,
    ],
)
def test_a_mistake_gives_one_line_with_the_fix(
    mistake: Callable[[Path, Path], tuple[str, str, str]], model: Path, tmp_path: Path
) -> None:
    line, what, fix = mistake(model, tmp_path)
    assert line.startswith("legato: ")
    assert what in line
    assert fix in line

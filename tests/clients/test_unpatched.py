"""Other people's clients as they are, against a running service: `make test-clients`.

Each is in an environment of its own, build/clients/NAME; where that could not be made, its test
says so. One line of JSON tells what each did.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from served import ROOT, Served
from tiny_models import make_llama_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CLIENTS = Path(os.environ.get("LEGATO_CLIENTS", ROOT / "build" / "clients"))
NUM_REQUESTS, AT_ONCE = 40, 4
INPUT_TOKENS, OUTPUT_TOKENS = 64, 16
TOLERANCE = 1e-3
TASK = "legato_endings"


class Service:
    """`legato serve` of a small model in fp32, and where its HTTP is."""

    def __init__(self, folder: Path, served: Served) -> None:
        self.folder = folder
        self.name = str(folder)  # as `--model` gave it
        until_s = time.monotonic() + 10
        while (found := re.search(r"HTTP at (http://\S+)/v1", served.output)) is None:
            assert time.monotonic() < until_s, served.output
            time.sleep(0.1)
        self.url = found[1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("clients")
    folder = make_llama_folder(home / "tiny", max_position_embeddings=2048)
    words = ("--model", str(folder), "--http-port", "0", "--dtype", "float32", "--threads", "1")
    with Served(home / "served.log", *words) as served:
        yield Service(folder, served)


def run(client: str, words: list[str], *, offline: bool = True) -> str:
    """Runs a client's command to its end; returns its version."""
    bin_folder = CLIENTS / client / "bin"
    package = client.replace("_", "-")
    if not (bin_folder / words[0]).exists():
        pytest.skip(f"{package} is not installed at {bin_folder.parent}: see {client}.log there")
    keep = ("PATH", "HOME", "LANG", "TMPDIR")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    env |= {"PYTHONUNBUFFERED": "1", "OPENAI_API_KEY": "none"}
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [bin_folder / words[0], *words[1:]],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    version = subprocess.run(
        [bin_folder / "python", "-c", ask, package], capture_output=True, text=True, check=True
    )
    return version.stdout.strip()


def tell(client: str, **counts: Any) -> None:  # noqa: ANN401  # JSON's own kinds
    print(json.dumps({"client": client, **counts}))


def test_vllm_bench_serve(service: Service, tmp_path: Path) -> None:
    words = ["vllm", "bench", "serve", "--backend", "openai", "--base-url", service.url]
    words += ["--endpoint", "/v1/completions", "--model", service.name]
    words += ["--tokenizer", str(service.folder), "--dataset-name", "random", "--ignore-eos"]
    words += ["--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    words += ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(AT_ONCE)]
    words += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    version = run("vllm", words)
    result = json.loads((tmp_path / "result.json").read_text())
    tell(
        "vllm bench serve",
        version=version,
        requests=result["completed"],
        failed=NUM_REQUESTS - result["completed"],
        output_tokens=result["total_output_tokens"],
        tokens_per_s=round(result["output_throughput"], 1),
    )
    assert result["completed"] == NUM_REQUESTS
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS


def test_guidellm(service: Service, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ["guidellm", "run", "--backend", f"kind=openai_http,target={service.url}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={service.folder}"]
    words += ["--profile", f"kind=concurrent,streams={AT_ONCE}", "--disable-progress"]
    sizes = f"prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    words += ["--data", f"kind=synthetic_text,{sizes}", "--output", f"kind=json,path={out}"]
    words += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    version = run("guidellm", words)
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    tell("guidellm", version=version, requests=totals["successful"], failed=totals["errored"])
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)


def test_aiperf(service: Service, tmp_path: Path) -> None:
    words = ["aiperf", "profile", "--model", service.name, "--url", service.url]
    words += ["--tokenizer", str(service.folder), "--endpoint-type", "completions", "--streaming"]
    words += ["--concurrency", str(AT_ONCE), "--request-count", str(NUM_REQUESTS)]
    words += ["--isl", str(INPUT_TOKENS), "--osl", str(OUTPUT_TOKENS)]
    words += ["--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", str(tmp_path)]
    version = run("aiperf", words, offline=False)  # it takes a folder's tokenizer only so
    (file,) = tmp_path.rglob("profile_export_aiperf.json")
    result = json.loads(file.read_text())
    failed = result.get("error_request_count") or {"avg": 0}
    counts = {"requests": result["request_count"]["avg"], "failed": failed["avg"]}
    tell("aiperf", version=version, **counts)
    assert counts == {"requests": NUM_REQUESTS, "failed": 0}


def lm_eval_samples(words: list[str], out: Path) -> tuple[str, dict[tuple[int, int], float]]:
    """Its version, and the loglikelihood of each choice of each document."""
    include = ["--include_path", "tests/data/lm_eval", "--tasks", TASK]
    version = run(
        "lm_eval",
        ["lm_eval", "run", *words, *include, "--log_samples", "--output_path", str(out)],
    )
    (file,) = out.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return version, {
        (sample["doc_id"], number): float(answer[0])
        for sample in samples
        for number, answer in enumerate(sample["filtered_resps"])
    }


def test_lm_eval(service: Service, tmp_path: Path) -> None:
    by_hf = ["--model", "hf", "--batch_size", "1", "--device", "cpu", "--model_args"]
    by_hf += [f"pretrained={service.folder},dtype=float32"]
    _, wanted = lm_eval_samples(by_hf, tmp_path / "hf")
    args = f"model={service.name},base_url={service.url}/v1/completions,num_concurrent=4"
    args += f",tokenizer={service.folder},tokenizer_backend=huggingface,max_length=2048"
    for form, more in (("tokens", ""), ("text", ",tokenized_requests=False")):
        by_http = ["--model", "local-completions", "--batch_size", "8", "--model_args", args + more]
        version, got = lm_eval_samples(by_http, tmp_path / form)
        assert got.keys() == wanted.keys()
        off = max(abs(got[key] - wanted[key]) for key in wanted)
        tell("lm_eval", version=version, prompts=form, loglikelihoods=len(got), largest_error=off)
        assert len(got) > 2 * 24 - 1
        assert off <= TOLERANCE

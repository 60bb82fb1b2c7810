"""lm-eval's local-completions, request for request: its loglikelihoods are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import torch
from local_service import LocalService
from oracle import load_oracle
from tiny_models import make_llama_folder

from legato.cluster.config import RouterOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.integration

TOLERANCE = 1e-3
TASK = Path(__file__).parents[1] / "data" / "lm_eval" / "endings.jsonl"
PER_REQUEST = 16  # lm-eval's batch_size


def task_cases() -> list[tuple[str, str]]:
    """(context, continuation) of every choice of the task that the tests carry, as lm-eval asks."""
    rows = [json.loads(line) for line in TASK.read_text().splitlines()]
    cases = [(row["context"], choice) for row in rows for choice in row["choices"]]
    return [*cases, ("x" * 300, "y" * 40)]


def request_body(model: str, batch: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """As lm-eval writes it for loglikelihoods, with token ids."""
    return {
        "model": model,
        "prompt": [context + continuation for context, continuation in batch],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def parsed(body: dict[str, Any], num_context: list[int]) -> list[tuple[float, bool]]:
    """As lm-eval reads it: the sum over the continuation, and whether it is the greedy one."""
    answers = []
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    for choice, begin in zip(choices, num_context, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][begin:-1]
        tops = choice["logprobs"]["top_logprobs"][begin:-1]
        greedy = all(
            logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True)
        )
        answers.append((sum(logprobs), greedy))
    return answers


def by_transformers(
    model: PreTrainedModel, context: list[int], continuation: list[int]
) -> tuple[float, bool]:
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        scores = model(ids).logits[0].float().log_softmax(-1)
    places = scores[len(context) - 1 : -1]
    wanted = torch.tensor(continuation)
    return (
        places.gather(1, wanted[:, None]).sum().item(),
        bool((places.argmax(-1) == wanted).all()),
    )


async def test_loglikelihoods_are_transformers(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "tiny", max_position_embeddings=2048)
    oracle = load_oracle(folder)
    pairs = [(list(context.encode()), list(answer.encode())) for context, answer in task_cases()]
    # One of which the continuation is what the model itself would say.
    greedy_context = list(b"greedy from here")
    ids = list(greedy_context)
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
    pairs.append((greedy_context, ids[len(greedy_context) :]))
    wanted = [by_transformers(oracle, *pair) for pair in pairs]
    assert wanted[-1][1], "the test has a greedy case"
    assert not all(greedy for _, greedy in wanted)
    options = RouterOptions(port=0, http_port=0, local_prefill_tokens=0)
    args = ("--dtype", "float32")
    got: list[tuple[float, bool]] = []
    async with LocalService(folder, worker_args=args, options=options) as service:
        url = f"http://{service.router.http_address}"
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
            for begin in range(0, len(pairs), PER_REQUEST):
                batch = pairs[begin : begin + PER_REQUEST]
                body = request_body(service.model.name, batch)
                whole = await http.post("/v1/completions", json=body)
                # Again, where the prefix cache has it all; and with no token generated.
                again = await http.post("/v1/completions", json=body | {"max_tokens": 0})
                assert whole.status_code == again.status_code == 200, whole.text
                got += parsed(whole.json(), [len(context) for context, _ in batch])
                check_again(whole.json(), again.json())
    for (value, greedy), (right, right_greedy) in zip(got, wanted, strict=True):
        assert value == pytest.approx(right, abs=TOLERANCE)
        assert greedy == right_greedy


def check_again(first: dict[str, Any], second: dict[str, Any]) -> None:
    """The same logprobs where nothing is generated and all of the prompt is cached."""
    for choice, bare in zip(first["choices"], second["choices"], strict=True):
        logprobs = bare["logprobs"]["token_logprobs"]
        assert logprobs[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:-1], abs=1e-4)
        assert logprobs[0] is None
    assert second["usage"]["completion_tokens"] == 0

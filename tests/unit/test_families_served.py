"""Every family between a prefill and a decode worker, through hand-off and scheduler."""

from __future__ import annotations

import grpc
import pytest
from model_checks import build, random_tokens, reference_logits
from tiny_models import FAMILIES, make_model
from worker_pair import Attempt, OpenPrefill, running_pair, sampling

# Around blocks of 4, chunks of 16 and the tiny models' window of 20.
LENGTHS = (1, 4, 15, 16, 17, 33)


@pytest.mark.parametrize("family", FAMILIES)
async def test_b09_a_pair_gives_transformers_tokens(family: str) -> None:
    reference = make_model(family)
    model = build(reference)
    async with running_pair(config=model.config, model=model) as pair:
        for length in LENGTHS:
            prompt = random_tokens(length)
            answer = await Attempt(pair, prompt, sampling(24)).run()
            logits = reference_logits(reference, prompt + answer)
            assert answer == logits[length - 1 : -1].argmax(-1).tolist(), length
        await pair.until_idle()


async def test_b22_gpt2_ends_at_its_last_position() -> None:
    reference = make_model("gpt2", max_position_embeddings=32)
    model = build(reference)
    async with running_pair(config=model.config, model=model) as pair:
        prompt = random_tokens(31)
        answer = await Attempt(pair, prompt, sampling(1)).run()
        assert answer == [int(reference_logits(reference, prompt)[-1].argmax())]
        for length, max_tokens in ((31, 2), (32, 1), (40, 1)):
            attempt = Attempt(pair, random_tokens(length), sampling(max_tokens))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await OpenPrefill(pair.p, attempt.prefill_request()).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "context" in (refused.value.details() or "")
            assert "32" in (refused.value.details() or "")
        await pair.until_idle()

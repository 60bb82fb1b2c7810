"""unread_demand: what a request will ask for at least and at most, before its text is tokenised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.policies import Demand
from legato.cluster.request import MAX_N
from legato.cluster.sampling_rules import DEFAULT_MAX_TOKENS
from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.cluster.model_limits import ModelLimits
    from legato.protos import generation_pb2


def unread_demand(
    request: generation_pb2.GenerateRequest, limits: ModelLimits
) -> tuple[Demand, Demand]:
    """The least and the most. A message's bytes bound its tokens; token ids are known as they are.

    Nothing has been validated: values outside their limits count as the limit.
    """
    num_ids = len(request.token_ids.ids)
    least, most = (num_ids, num_ids) if num_ids else (1, request.ByteSize())
    sampling = request.sampling
    asked = sampling.max_tokens if sampling.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    max_tokens = max(1, min(asked, limits.context_length - least))

    def demand(prompt_tokens: int) -> Demand:
        return Demand(
            prefill_tokens=prompt_tokens,
            decode_tokens=prompt_tokens + max_tokens - 1 if max_tokens > 1 else 0,
            num_answers=max(1, min(request.n, MAX_N)),
            batch=request.priority == common_pb2.PRIORITY_BATCH,
        )

    return demand(least), demand(most)

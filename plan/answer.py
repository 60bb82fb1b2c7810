"""Answer: how many workers, what they will be like, and what runs out first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from legato.plan.pool_sizes import MAX_WORKERS, smallest_pools

if TYPE_CHECKING:
    from legato.plan.prediction import Prediction, Predictor


@dataclass(frozen=True)
class Answer:
    """Rates are requests per second of the whole service; rows are tokens of KV."""

    prefill_workers: int
    decode_workers: int
    max_batch_size: int
    batch_limited_by: str
    kv_rows_per_decode_worker: int
    kv_sequences_per_decode_worker: int  # that fit, but for 1 % of the time
    kv_rows_mean: float  # held in the long run by a decode worker
    kv_full_at_rate: float | None  # where answers fill the KV memory; None: other limits come first
    saturates_at_rate: float
    limited_by: str
    decode_step_bound: str
    link_bytes_per_s: float  # of KV, from all prefill to all decode workers, on average
    link_bytes_per_s_to_hide: (
        float  # of one prefill worker, so that KV leaves as fast as it is made
    )
    predicted: Prediction

    def as_json(self) -> dict[str, object]:
        """Plain values; percentiles by name."""
        fields = asdict(self)
        for name in ("ttft_s", "itl_s"):
            values: dict[float, float] = getattr(self.predicted, name)
            fields["predicted"][name] = {f"p{p:g}": round(v, 6) for p, v in values.items()}
        return fields


def make_answer(predictor: Predictor, kv_bytes_per_token: int) -> Answer:
    """The fewest workers that keep the targets.

    Raises:
        ValueError: so many do not; the message says which pool.
    """
    pools = smallest_pools(predictor.meets)
    if pools is None:
        found = predictor.predict(MAX_WORKERS, MAX_WORKERS)
        what = "the targets are missed" if found else "the traffic is more than they can serve"
        raise ValueError(f"no plan with at most {MAX_WORKERS:,} workers of each pool: {what}")
    answer = answer_of(predictor, kv_bytes_per_token, *pools)
    assert answer is not None, "it keeps the targets"
    return answer


def answer_of(
    predictor: Predictor, kv_bytes_per_token: int, num_prefill: int, num_decode: int
) -> Answer | None:
    """What so many workers will be like; None where closed forms take them for too few."""
    found = predictor.predict(num_prefill, num_decode)
    if found is None:
        return None
    traffic, limit = predictor.traffic, predictor.batch_limit
    prompt_mean = float(traffic.prompt_tokens.mean())
    decoded_mean = float(traffic.decoded_tokens.mean())
    full_step_s = predictor.step_s(limit)
    prefill_rate = num_prefill / predictor.service_mean_s
    decode_rate = num_decode * limit / full_step_s / decoded_mean if decoded_mean else float("inf")
    bound = predictor.bound()
    if decode_rate < prefill_rate:
        limited_by = f"decode: {predictor.batch_reason}, {bound}"
    else:
        limited_by = "prefill: computing prompts"
    full = predictor.batch_reason == "KV memory"
    return Answer(
        prefill_workers=num_prefill,
        decode_workers=num_decode,
        max_batch_size=limit,
        batch_limited_by=predictor.batch_reason,
        kv_rows_per_decode_worker=predictor.size.kv_rows,
        kv_sequences_per_decode_worker=predictor.room.num_sequences,
        kv_rows_mean=found.mean_kv_rows,
        kv_full_at_rate=decode_rate if full else None,
        saturates_at_rate=min(prefill_rate, decode_rate),
        limited_by=limited_by,
        decode_step_bound=bound,
        link_bytes_per_s=traffic.rate_per_s * prompt_mean * kv_bytes_per_token,
        link_bytes_per_s_to_hide=predictor.tokens_made_per_s * kv_bytes_per_token,
        predicted=found,
    )

"""activation_peak: what a worker's largest step takes beside weights and KV, by running it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.worker.device_memory import peak_growth
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool, blocks_for
from legato.worker.kv.cache import KvCache
from legato.worker.model_runner import ModelRunner
from legato.worker.prompt_scores import rows_a_piece
from legato.worker.sampler import SamplingRow, sample
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.prompt_pieces import APART_TOKENS, MIXED_TOKENS
from legato.worker.scheduling.step import Step, StepPart
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from legato.worker.config import WorkerConfig
    from legato.worker.kv.cache import KvShape
    from legato.worker.loading import LoadedModel

# A longer context takes no more memory beside the KV: decode attention on CUDA divides it into at
# most 64 parts of 256 rows; that on a CPU has a bound of a few MB, and two parts show it.
_LONGEST_CONTEXT = {"cuda": 64 * 256, "cpu": 512}
# All that a request may ask for takes memory for each row: draws, penalties, logprobs; and those of
# prompts for a piece of it at a time, see `prompt_scores`.
_PARAMS = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    seed=0,
    ignore_eos=True,
    min_tokens=0,
    logprobs=20,
    stop_token_ids=frozenset(),
    logit_bias={},
    prompt_logprobs=20,
)


def measure_activation_peak(config: WorkerConfig, loaded: LoadedModel, shape: KvShape) -> int:
    """Bytes on the device, while the engine does not run yet.

    A prefill worker computes `prefill_chunk_tokens` of one prompt (or of as few as the context
    allows) and then of `max_batch_size` ones, a decode worker a step of `max_batch_size` sequences
    of which one is long, and then one with the most of a prompt that goes into a step, a colocated
    worker all of these; with sampling, on a throwaway cache as small as it can be: sequences share
    their blocks, and what they hold means nothing.

    Raises:
        ValueError: a step does not fit beside the weights, or it cannot be measured here.
    """
    limit = loaded.model.config.context_length
    context_length = min(config.context_length or limit, limit)
    steps = _steps(config, context_length, loaded.device.type, loaded.model.config.vocab_size)
    longest = max(part.sequence.num_computed + part.num_tokens for s in steps for part in s.parts)
    with torch.inference_mode():
        try:
            cache = KvCache(shape, blocks_for(longest, config.block_size), loaded.device)
            for pages in cache.layers:  # so that its memory is there before, and does not count
                pages.k.zero_()
                pages.v.zero_()

            def run() -> None:
                runner = ModelRunner(loaded.model, cache, loaded.device, config.max_batch_size)
                for step in steps:
                    logits = runner.forward(step)
                    sample(logits, [SamplingRow.of(part.sequence) for part in step.parts])

            return peak_growth(run, loaded.device)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                "kv_memory_fraction leaves nothing: a step does not fit beside the weights; lower "
                f"prefill_chunk_tokens {config.prefill_chunk_tokens} or max_batch_size "
                f"{config.max_batch_size}"
            ) from error


def _steps(
    config: WorkerConfig, context_length: int, device_type: str, vocab_size: int
) -> list[Step]:
    steps = []
    num_scored = rows_a_piece(vocab_size)
    if config.role != "prefill":
        longest = min(context_length, _LONGEST_CONTEXT[device_type])
        others = [(1, 1)] * (config.max_batch_size - 1)
        piece = min(longest, MIXED_TOKENS if device_type == "cpu" else APART_TOKENS)
        beside = others if device_type == "cpu" else []
        steps += [
            _step([(longest, 1), *others], config.block_size, num_scored),
            _step([(longest, piece), *beside], config.block_size, num_scored),
        ]
    if config.role != "decode":
        chunk = config.prefill_chunk_tokens
        fewest = -(-chunk // context_length)
        steps += [
            _step([(n, n) for n in _prompts(chunk, count)], config.block_size, num_scored)
            for count in (fewest, max(fewest, min(chunk, config.max_batch_size)))
        ]
    return steps


def _prompts(num_tokens: int, count: int) -> list[int]:
    """Lengths, as even as can be."""
    return [num_tokens // count + (i < num_tokens % count) for i in range(count)]


def _step(lengths: list[tuple[int, int]], block_size: int, num_scored: int) -> Step:
    """Of sequences (tokens, how many of them are new) that all begin with block 0. Of the new ones
    at most `num_scored` are scored.
    """
    parts = []
    for num_tokens, num_new in lengths:
        scored = min(num_scored, num_new - 1)
        num_scored -= scored
        sequence = Sequence(
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens - num_new + scored + 1,
            params=_PARAMS,
            eos_token_ids=frozenset(),
            num_computed=num_tokens - num_new,
            lease=BlockLease(BlockPool(1), list(range(blocks_for(num_tokens, block_size)))),
        )
        parts.append(StepPart(sequence, num_new))
    return Step(parts)

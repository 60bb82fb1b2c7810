"""`python -m legato.bench.guided`: what guides cost a batch's step, beside the same without."""

from __future__ import annotations

import argparse
import json
import statistics

from legato.bench.bare_engine import BareEngine
from legato.protos import common_pb2
from legato.text.guide import Guide
from legato.worker.config import WorkerConfig

BATCH = 8
# No answer of it ends: each step has a mask.
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _ITEM, "minItems": 10_000}


def main() -> None:
    """Prints one JSON line: the median step of each number of guided rows, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="of all numbers in turn")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    engine = BareEngine(
        WorkerConfig(
            model=arguments.model,
            role="decode",
            context_length=1024,
            kv_memory_bytes=256 << 20,
            num_threads=arguments.threads,
        )
    )
    guide = Guide.read(common_pb2.Guide(json_schema=json.dumps(SCHEMA)))
    prompts = [[1000 + 7 * i + j for j in range(16)] for i in range(BATCH)]
    times: dict[int, list[float]] = {0: [], 1: [], BATCH: []}
    for number in range(arguments.rounds + 1):
        for num_guided, seconds in times.items():
            matchers = [
                engine.guides.open(guide, eos_token_ids=[0], stop_token_ids=[], ignore_eos=True)
                for _ in range(num_guided)
            ]
            run = engine.run(prompts, BATCH, arguments.tokens, matchers)
            if number:  # the first round is for captures and caches
                seconds += [s.seconds for s in run.steps if s.num_sequences == BATCH]
    medians = {num_guided: statistics.median(seconds) for num_guided, seconds in times.items()}
    result = {
        "batch": BATCH,
        "vocabulary": engine.model.config.vocab_size,
        "step_ms": {str(n): round(median * 1e3, 2) for n, median in medians.items()},
        "ratio": {str(n): round(median / medians[0], 3) for n, median in medians.items() if n},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

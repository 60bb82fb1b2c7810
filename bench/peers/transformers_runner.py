"""transformers' `generate` in static batches; see host.py.

All requests of a batch start and end together, which flatters a static batch: lengths are alike.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISIONS = tuple(_DTYPES)


def prepare(model: str, precision: str, work_dir: str) -> str:
    """The folder itself."""
    return model


class _Clock(transformers.StoppingCriteria):
    """Notes when each step's tokens were there; never stops."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Runner:
    """A model."""

    def __init__(self, path: str, precision: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=_DTYPES[precision]
        )
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], num_at_once: int, max_tokens: int) -> dict[str, Any]:
        """One `generate` for each batch of `num_at_once`."""
        requests: list[dict[str, Any]] = []
        for start in range(0, len(prompts), num_at_once):
            ids = torch.tensor(prompts[start : start + num_at_once])
            clock, sent_s = _Clock(), time.perf_counter()
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
            requests += [
                {
                    "sent_s": sent_s,
                    "token_times_s": clock.times_s,
                    "token_ids": row[ids.shape[1] :].tolist(),
                }
                for row in output
            ]
        return {"requests": requests}

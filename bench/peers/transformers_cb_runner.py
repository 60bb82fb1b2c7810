"""transformers' continuous batching: its manager's thread computes, this one reads; see host.py."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISIONS = tuple(_DTYPES)
_PAGE_TOKENS = 256
_NUM_PAGES = 160
_READ_TIMEOUT_S = 0.005


def prepare(model: str, precision: str, work_dir: str) -> str:
    """The folder itself."""
    return model


class Runner:
    """A model with its manager."""

    def __init__(
        self, path: str, precision: str, num_threads: int, chunk: int | None = None
    ) -> None:
        """`chunk`: most tokens of a step; None: as the library has it."""
        torch.set_num_threads(num_threads)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=_DTYPES[precision], attn_implementation="sdpa"
        )
        settings = model.generation_config
        settings.do_sample, settings.eos_token_id, settings.pad_token_id = False, -1, 0
        # By itself it takes nine tenths of the free memory for KV.
        batching = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=_NUM_PAGES,
            max_batch_tokens=chunk,
            allow_block_sharing=False,
        )
        self._manager: Any = model.init_continuous_batching(settings, batching)
        self._manager.start()
        self._next = 0
        self._told: dict[int, int] = {}  # tokens that were handed out

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Queues it."""
        number = self._next
        self._next += 1
        self._told[number] = 0
        self._manager.add_request(
            prompt, request_id=str(number), max_new_tokens=max_tokens, streaming=True,
            eos_token_id=-1,
        )  # fmt: skip
        return number

    def step(self) -> list[tuple[int, list[int]]]:
        """All that has come, of as many steps as the manager has run."""
        news: dict[int, list[int]] = {}
        output = self._manager.get_result(timeout=_READ_TIMEOUT_S)
        while output is not None:
            if output.error:
                raise RuntimeError(output.error)
            number = int(output.request_id)
            if number in self._told:
                fresh = output.generated_tokens[self._told[number] :]
                self._told[number] += len(fresh)
                news.setdefault(number, []).extend(fresh)
            queue = self._manager.output_router.output_queue
            output = None if queue.empty() else self._manager.get_result(timeout=0)
        if not news and not self._manager.is_running():
            raise RuntimeError("its thread has ended")
        return [(number, token_ids) for number, token_ids in news.items() if token_ids]

    def cancel(self, number: int) -> None:
        """It ends before the next step; what it still says is not read."""
        if self._told.pop(number, None) is not None:
            self._manager.cancel_request(str(number))

"""llama.cpp through the C interface of llama-cpp-python; see host.py.

Its own context, batch and decode calls, with greedy tokens taken by numpy (the library's sampler
first builds a list of all candidates). Prompts go in up to `n_batch` tokens a call, each request
in a sequence of its own; settings are llama.cpp's defaults.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import llama_cpp
import llama_gguf  # beside this file: see host.py
import numpy as np

# What the weights become; KV is float16, llama.cpp's default.
_FILE_TYPES = {
    "fp32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}
PRECISIONS = tuple(_FILE_TYPES)
_BATCH_TOKENS = 2048


def prepare(model: str, precision: str, work_dir: str) -> str:
    """A GGUF file in `work_dir`, by way of a bfloat16 one."""
    plain = llama_gguf.prepare(model, "bf16", work_dir)
    target = Path(work_dir) / f"{Path(model).name}-{precision}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = _FILE_TYPES[precision]
        params.nthread = 2
        if llama_cpp.llama_model_quantize(plain.encode(), str(part).encode(), params):
            raise RuntimeError(f"llama_model_quantize failed for {target}")
        part.rename(target)
    return str(target)


class Runner:
    """A model; a context for each workload's size, kept for the next run."""

    def __init__(self, path: str, precision: str, num_threads: int) -> None:
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._num_threads = num_threads
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"{path} does not load")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._contexts: dict[tuple[int, int], Any] = {}
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def run(self, prompts: list[list[int]], num_at_once: int, max_tokens: int) -> dict[str, Any]:
        """Waiting prompts go first, then one token for every request under way."""
        context = self._context(num_at_once, max(map(len, prompts)) + max_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        waiting = deque(range(len(prompts)))
        requests: list[dict[str, Any]] = [{"token_times_s": [], "token_ids": []} for _ in prompts]
        places: dict[int, int] = {}  # sequence id -> request
        while waiting or places:
            free = [place for place in range(num_at_once) if place not in places]
            joined = []
            while waiting and free:
                place, number = free.pop(0), waiting.popleft()
                places[place] = number
                requests[number]["sent_s"] = time.perf_counter()
                joined.append(place)
            if joined:
                self._prefill(context, joined, places, prompts, requests)
            else:
                rows = [
                    (place, len(prompts[n]) + len(requests[n]["token_ids"]) - 1,
                     requests[n]["token_ids"][-1], True)
                    for place, n in places.items()
                ]  # fmt: skip
                self._step(context, rows, places, requests)
            for place, number in list(places.items()):
                if len(requests[number]["token_ids"]) == max_tokens:
                    del places[place]
                    memory = llama_cpp.llama_get_memory(context)
                    llama_cpp.llama_memory_seq_rm(memory, place, -1, -1)
        return {"requests": requests}

    def _prefill(
        self,
        context: Any,  # noqa: ANN401  # a ctypes pointer
        joined: list[int],
        places: dict[int, int],
        prompts: list[list[int]],
        requests: list[dict[str, Any]],
    ) -> None:
        rows: list[tuple[int, int, int, bool]] = []
        for place in joined:
            prompt = prompts[places[place]]
            rows += [(place, i, token, i == len(prompt) - 1) for i, token in enumerate(prompt)]
        for start in range(0, len(rows), _BATCH_TOKENS):
            self._step(context, rows[start : start + _BATCH_TOKENS], places, requests)

    def _step(
        self,
        context: Any,  # noqa: ANN401  # a ctypes pointer
        rows: list[tuple[int, int, int, bool]],
        places: dict[int, int],
        requests: list[dict[str, Any]],
    ) -> None:
        """One decode call of (sequence, position, token, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (place, position, token, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, place, wanted
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        for i, (place, _, _, wanted) in enumerate(rows):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
                request = requests[places[place]]
                request["token_ids"].append(token)
                request["token_times_s"].append(time.perf_counter())

    def _context(self, num_at_once: int, length: int) -> Any:  # noqa: ANN401  # a ctypes pointer
        if (num_at_once, length) not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            # Room for each sequence, in whole steps of what the library pads to.
            params.n_ctx = num_at_once * (-(-length // 256) * 256)
            params.n_seq_max = num_at_once
            params.n_batch = _BATCH_TOKENS
            params.n_threads = params.n_threads_batch = self._num_threads
            context = llama_cpp.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"no context for {num_at_once} sequences of {length} tokens")
            self._contexts[num_at_once, length] = context
        return self._contexts[num_at_once, length]

"""The choice of tokens, their logprobs and changes to logits, compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aot import AotCase, Compiled, check, chosen, compile_file

from legato.kernels import choose_triton, logprobs_triton, penalties_triton
from legato.kernels.choose import Choices
from legato.kernels.penalties import LogitChanges


def choose(vocab_size: int) -> None:
    choices = Choices(torch.empty(4, 3, dtype=torch.float64), torch.empty(4, 3, dtype=torch.int64))
    out = torch.empty(4, dtype=torch.int64)
    choose_triton.choose(torch.empty(4, vocab_size), choices, out)


def argmax(vocab_size: int) -> None:
    choose_triton.argmax(torch.empty(4, vocab_size), torch.empty(4, dtype=torch.int64))


def change_logits(vocab_size: int) -> None:
    integers = torch.empty(11, dtype=torch.int64)  # as on a device: pieces of one tensor
    rows, starts, ids, banned_ids = integers.split([2, 6, 2, 1])
    changes = LogitChanges(rows, starts.view(3, 2), ids, torch.empty(2, 3), banned_ids)
    penalties_triton.change_logits(torch.empty(4, vocab_size), changes)


AOT_CASES = [
    AotCase("argmax", lambda: argmax(49152), (80, 90)),
    AotCase("argmax of an odd width", lambda: argmax(50257), full=True),
    AotCase("choose", lambda: choose(151936)),
    AotCase("choose from an odd width", lambda: choose(50257), (80,), full=True),
    AotCase("choose from few", lambda: choose(320), full=True),
    AotCase("logprobs", lambda: logprobs_triton.log_sums(torch.empty(4, 49152)), (80, 90)),
    AotCase("penalties", lambda: change_logits(49152)),
    AotCase("penalties of an odd width", lambda: change_logits(50257), full=True),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_file(Path(__file__), tmp_path_factory.mktemp("aot"))


@pytest.mark.parametrize("case", chosen(AOT_CASES), ids=str)
def test_kernels_compile_and_fit(case: AotCase, compiled: list[Compiled]) -> None:
    check(case, compiled)

"""KvModel: what stands in each row of KV, as numbers, so that a wrong row gives a wrong token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.worker.scheduling.decision import Decision

_MASK = (1 << 30) - 1  # tokens are int32
END_TOKEN = 1  # sampled ones are greater


def row_of(content: int, position: int, token: int) -> int:
    """The KV of one token. `content` names the prompt, for different ones have different KV."""
    return hash((content, position, token))


def prompt_token(content: int, position: int) -> int:
    """A prompt's token."""
    return 2 + (hash((content, position, 7)) & _MASK)


def next_token(seed: int, position: int, digests: list[int]) -> int:
    """The token at `position`: depends on every row before it, through the blocks' digests."""
    return 2 + (hash((seed, position, *digests)) & _MASK)


class KvModel:
    """The rows of a pool of blocks, and of as many host slots as it is given."""

    def __init__(self, num_blocks: int, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = [[0] * block_size for _ in range(num_blocks)]
        self._slots = [[0] * block_size for _ in range(num_slots)]
        self._digests: dict[int, int] = {}  # of whole blocks, until they change

    def write(self, blocks: Sequence[int], position: int, row: int) -> None:
        """One row of a sequence with these blocks."""
        block, place = blocks[position // self._block_size], position % self._block_size
        self._blocks[block][place] = row
        self._digests.pop(block, None)

    def digests(self, blocks: Sequence[int], num_rows: int) -> list[int]:
        """One number for each block of the first `num_rows`."""
        num_full, rest = divmod(num_rows, self._block_size)
        found = [self._digest(block) for block in blocks[:num_full]]
        if rest:
            found.append(hash(tuple(self._blocks[blocks[num_full]][:rest])))
        return found

    def move(self, decision: Decision) -> None:
        """The copies of a decision, in its order."""
        for copy in decision.copies:
            self._blocks[copy.target] = list(self._blocks[copy.source])
            self._digests.pop(copy.target, None)
        for out in decision.swap_outs:
            for block, slot in zip(out.blocks, out.slots, strict=True):
                self._slots[slot] = list(self._blocks[block])
        for back in decision.swap_ins:
            for slot, block in zip(back.slots, back.blocks, strict=True):
                self._blocks[block] = list(self._slots[slot])
                self._slots[slot] = [0] * self._block_size
                self._digests.pop(block, None)

    def _digest(self, block: int) -> int:
        digest = self._digests.get(block)
        if digest is None:
            digest = self._digests[block] = hash(tuple(self._blocks[block]))
        return digest


class AnswerAlone:
    """The answer that a request gets where nobody else is: rows in one piece, one after another."""

    def __init__(self, content: int, seed: int, num_prompt_tokens: int, block_size: int) -> None:
        self._content = content
        self._seed = seed
        self._block_size = block_size
        self._digests: list[int] = []
        self._tail: list[int] = []
        self._num_rows = 0
        for position in range(num_prompt_tokens):
            self._push(prompt_token(content, position))

    def next(self) -> int:
        """The next token, which becomes a row before the one after it."""
        digests = [*self._digests, hash(tuple(self._tail))] if self._tail else self._digests
        token = next_token(self._seed, self._num_rows, digests)
        self._push(token)
        return token

    def _push(self, token: int) -> None:
        self._tail.append(row_of(self._content, self._num_rows, token))
        self._num_rows += 1
        if len(self._tail) == self._block_size:
            self._digests.append(hash(tuple(self._tail)))
            self._tail = []

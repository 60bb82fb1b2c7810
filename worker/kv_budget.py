"""KvBudget: how many KV blocks a worker has, and how many more the host's memory holds for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.worker.activation_peak import measure_activation_peak
from legato.worker.device_memory import free_bytes, total_bytes
from legato.worker.kv.cache import KvShape
from legato.worker.scheduling.output_lengths import PRIOR_TOKENS

if TYPE_CHECKING:
    from legato.worker.config import Role, WorkerConfig
    from legato.worker.loading import LoadedModel

# Of the machine's memory, for the KV of preempted sequences, where nothing else is said.
_SWAP_SHARE = 4


@dataclass(frozen=True)
class MemoryFacts:
    """What is known of the memory when the weights are loaded, in bytes."""

    host_total_bytes: int
    # Measured only where a fraction is asked for; on the device, without the weights.
    free_bytes: int | None = None
    activation_peak_bytes: int = 0
    on_host: bool = True  # the device's memory is the host's

    @classmethod
    def measure(cls, config: WorkerConfig, loaded: LoadedModel, shape: KvShape) -> MemoryFacts:
        """Runs a step where `config` asks for a fraction.

        Raises:
            ValueError: what is needed cannot be measured here.
        """
        host_total, on_host = total_bytes(torch.device("cpu")), loaded.device.type == "cpu"
        if config.kv_memory_fraction is None:
            return cls(host_total, on_host=on_host)
        peak = measure_activation_peak(config, loaded, shape)
        # Afterwards: what the step loaded and keeps is not free any more.
        return cls(host_total, free_bytes(loaded.device), peak, on_host)


@dataclass(frozen=True)
class KvBudget:
    """Whole blocks. `num_swap_slots` is 0 where nobody is swapped."""

    shape: KvShape
    role: Role
    context_length: int
    num_blocks: int
    num_swap_slots: int
    source: str  # of the number of blocks, in words

    @classmethod
    def of(
        cls, config: WorkerConfig, loaded: LoadedModel, *, inherited_bytes: int | None = None
    ) -> KvBudget:
        """Measures the memory where need be, and blocks for as long as a step takes or two.

        `inherited_bytes`: of the pool that this one takes the place of. Where `config` asks for a
        fraction it was taken then, and others have had theirs since.

        Raises:
            ValueError: the memory given is more than there is, or holds no block.
        """
        model = loaded.model.config
        shape = KvShape.of(model, config, loaded.dtype)
        check_memory(config, loaded.device)
        facts = MemoryFacts.measure(config, loaded, shape)
        context_length = min(config.context_length or model.context_length, model.context_length)
        return cls.plan(config, shape, context_length, facts, inherited_bytes)

    @classmethod
    def plan(
        cls,
        config: WorkerConfig,
        shape: KvShape,
        context_length: int,
        facts: MemoryFacts,
        inherited_bytes: int | None = None,
    ) -> KvBudget:
        """The arithmetic of `of`."""
        kv_bytes, source = config.kv_memory_bytes, "kv_memory_bytes"
        if config.kv_memory_fraction is not None:
            fraction = config.kv_memory_fraction if inherited_bytes is None else 1.0
            kv_bytes, source = _fraction_of(fraction, shape, facts)
            if inherited_bytes is not None and inherited_bytes < kv_bytes:
                kv_bytes, source = inherited_bytes, "kv_memory_fraction, as taken before"
        num_blocks = shape.num_blocks(kv_bytes)
        if num_blocks < 1:
            raise ValueError(f"{source}, holds no block: {shape.least_memory(context_length)}")
        pool_bytes = num_blocks * shape.bytes_per_block
        return cls(
            shape=shape,
            role=config.role,
            context_length=context_length,
            num_blocks=num_blocks,
            num_swap_slots=_swap_bytes(config, pool_bytes, facts) // shape.bytes_per_block,
            source=source,
        )

    @property
    def num_bytes(self) -> int:
        """Of the pool's blocks."""
        return self.num_blocks * self.shape.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Rows of KV that the pool holds."""
        return self.num_blocks * self.shape.block_size

    def summary(self) -> str:
        """For the log: blocks, tokens, and how many sequences that is.

        Nothing has been observed when a worker starts. A prompt and an answer are assumed to have
        as many tokens as the admission rule expects of an answer before it knows better.
        """
        mean_tokens = min(PRIOR_TOKENS * (1 if self.role == "prefill" else 2), self.context_length)
        what = "prompts" if self.role == "prefill" else "sequences (prompt and answer)"
        text = (
            f"KV cache: {self.num_blocks:,} blocks of {self.shape.block_size} tokens, "
            f"{self.num_tokens:,} tokens in {_mebibytes(self.num_bytes)} ({self.source}); room for "
            f"{self.num_tokens // mean_tokens:,} {what} of {mean_tokens} tokens, the mean length "
            "assumed as long as none are known"
        )
        if self.num_swap_slots:
            swap_bytes = self.num_swap_slots * self.shape.bytes_per_block
            text += f"; host memory for {self.num_swap_slots:,} more, {_mebibytes(swap_bytes)}"
        return text

    def warning(self) -> str | None:
        """Where a request of the full context cannot be served, what it would take; else None.

        It is allowed: a small machine serves short requests with such a pool.
        """
        needed = self.shape.context_bytes(self.context_length)
        if self.num_bytes >= needed:
            return None
        return (
            f"the KV cache holds {self.num_tokens:,} tokens, less than one context of "
            f"{self.context_length:,}: longer requests are refused. A context takes {needed} bytes "
            f"(--kv-memory {needed}); or lower it with --context-length {self.num_tokens}"
        )


def check_memory(config: WorkerConfig, device: torch.device) -> None:
    """Before anything is read or allocated: a machine short of memory kills others as well.

    Raises:
        ValueError: more is asked for than there is, in use or not.
    """
    asked = []
    if config.kv_memory_fraction is None:
        asked.append(("kv_memory_bytes", config.kv_memory_bytes, device))
    if config.swap_memory_bytes is not None and config.role != "prefill":
        asked.append(("swap_memory_bytes", config.swap_memory_bytes, torch.device("cpu")))
    for name, value, place in asked:
        there = total_bytes(place)
        if value > there:
            owner = "this machine" if place.type == "cpu" else f"device {place}"
            option = "--swap-memory" if name.startswith("swap") else "--kv-memory"
            raise ValueError(
                f"{name} is {value}, limit {there}: the memory of {owner}; give a smaller {option}"
            )


def _fraction_of(fraction: float, shape: KvShape, facts: MemoryFacts) -> tuple[int, str]:
    assert facts.free_bytes is not None, "a fraction of what was not measured"
    # The cache has one block more than the pool deals out.
    left = max(0, facts.free_bytes - facts.activation_peak_bytes - shape.bytes_per_block)
    source = (
        f"kv_memory_fraction {fraction:.4g} of {_mebibytes(left)}: {_mebibytes(facts.free_bytes)} "
        f"free, less {_mebibytes(facts.activation_peak_bytes)} for a step"
    )
    return int(fraction * left), source


def _swap_bytes(config: WorkerConfig, pool_bytes: int, facts: MemoryFacts) -> int:
    # With `reserve` nobody is ever preempted.
    if config.role == "prefill" or config.admission == "reserve":
        return 0
    if config.swap_memory_bytes is not None:
        return config.swap_memory_bytes
    most = min(pool_bytes, facts.host_total_bytes // _SWAP_SHARE)
    if facts.on_host and facts.free_bytes is not None:  # what the pool leaves of the same memory
        most = min(most, facts.free_bytes - facts.activation_peak_bytes - pool_bytes)
    return max(0, most)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"

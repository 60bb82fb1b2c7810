"""Datasheets: what GPUs do at most by their vendor, and the share of it that is planned with."""

from __future__ import annotations

from dataclasses import dataclass

# Shares of the datasheet's figures. None is measured on these GPUs: a profile is better.
PREFILL_SHARE = 0.5  # of the FLOP/s, in long prompts
DECODE_SHARE = 0.7  # of the memory's bandwidth, in decode steps
MEMORY_SHARE = 0.9  # of the memory, for weights, KV and the activations
ACTIVATION_BYTES = 2 << 30
STEP_OVERHEAD_S = 0.001  # of a step: scheduling, launches, sampling
REQUEST_OVERHEAD_S = 0.005  # of a request: tokenising, placing, delivery of the first token
HANDOFF_OVERHEAD_S = 0.003  # of a hand-off, beside its bytes


@dataclass(frozen=True)
class Datasheet:
    """One GPU. Operations are multiplications and additions, counted apart; nothing is sparse."""

    name: str
    flops_per_s: float  # bfloat16, dense, on tensor cores, accumulated in float32
    bytes_per_s: float  # of its memory
    memory_bytes: float
    source: str


def _nvidia(name: str, tflops: float, gb_per_s: float, gb: float, source: str) -> Datasheet:
    return Datasheet(name, tflops * 1e12, gb_per_s * 1e9, gb * 1e9, source)


# Where a datasheet gives figures "with sparsity" alone, the dense one is half of it.
DATASHEETS = {
    sheet.name: sheet
    for sheet in (
        _nvidia("A10", 125, 600, 24, "NVIDIA A10 datasheet"),
        _nvidia("A30", 165, 933, 24, "NVIDIA A30 datasheet"),
        _nvidia("A100-40GB", 312, 1555, 40, "NVIDIA A100 datasheet, SXM 40 GB"),
        _nvidia("A100-80GB", 312, 2039, 80, "NVIDIA A100 datasheet, SXM 80 GB"),
        _nvidia("L4", 121, 300, 24, "NVIDIA L4 datasheet, half of 242 with sparsity"),
        _nvidia("L40S", 362, 864, 48, "NVIDIA L40S datasheet"),
        _nvidia("RTX-4090", 165.2, 1008, 24, "NVIDIA Ada GPU architecture whitepaper"),
        _nvidia("H100", 989.5, 3350, 80, "NVIDIA H100 datasheet, SXM, half of 1,979 with sparsity"),
        _nvidia("H100-PCIe", 756.5, 2000, 80, "NVIDIA H100 PCIe datasheet, half of 1,513"),
        _nvidia("H100-NVL", 835.5, 3900, 94, "NVIDIA H100 datasheet, NVL, half of 1,671"),
        _nvidia("H200", 989.5, 4800, 141, "NVIDIA H200 datasheet, SXM, half of 1,979"),
        _nvidia("B200", 2250, 8000, 180, "NVIDIA DGX B200 datasheet, an eighth, half of sparse"),
    )
}


def datasheet(name: str) -> Datasheet:
    """By name, in any case.

    Raises:
        ValueError: there is none of this name; the message has those there are.
    """
    by_folded = {known.casefold(): sheet for known, sheet in DATASHEETS.items()}
    found = by_folded.get(name.strip().casefold())
    if found is None:
        raise ValueError(f"no GPU {name!r}; there are {', '.join(DATASHEETS)}")
    return found

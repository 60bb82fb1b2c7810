"""What a form of the weights or of the KV costs: perplexity and agreement on a fixed text.

    python -m legato.bench.accuracy --model model.gguf --form int8 --form int4

The first form, float32 weights and KV, is what the others are compared with: the same files, read
and computed by the same engine. One JSON line a form: perplexity of the text; the share of
positions at which the most likely token is the same; the mean Kullback-Leibler divergence in
nats. Text is fed in windows, each from an empty context,
and every token of it but the first of a window is predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from legato.bench.accuracy_text import TEXT
from legato.cluster.text.model_text import ModelText
from legato.kernels.attention_plan import AttentionPlan
from legato.worker.config import WorkerConfig
from legato.worker.forward import ForwardBatch
from legato.worker.kv.cache import KvCache, KvShape, choose_kv_dtype
from legato.worker.loading import load_model
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from legato.worker.loading import LoadedModel

BLOCK_SIZE = 16
REFERENCE = "float32"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Accuracy:
    """Of one form, over all predicted tokens."""

    form: str  # as given
    weights: str  # as the worker calls it
    perplexity: float
    top1_agreement: float  # with the reference
    mean_kl: float  # of this form's distribution from the reference's, nats
    num_tokens: int  # predicted


def worker_config(model: str, form: str, num_threads: int | None) -> WorkerConfig:
    """`form` is a dtype, a value of --weights, or both, and after a slash a value of --kv-cache:
    bfloat16, int8, int4-g64+bfloat16, float32/fp8.
    """
    form, _, kv_cache = form.partition("/")
    weights, _, dtype = form.partition("+")
    if weights in DTYPES:
        weights, dtype = "auto", weights
    return WorkerConfig(
        model=model,
        role="prefill",
        dtype=dtype or "float32",
        weights=weights,
        kv_cache=kv_cache or "auto",
        num_threads=num_threads,
    )


def log_probabilities(
    loaded: LoadedModel, windows: Sequence[Sequence[int]], kv_cache: str = "auto"
) -> list[Tensor]:
    """For each window [T] the logarithms of the distribution after each token but the last,
    [T - 1, vocab_size] fp32 on the CPU.
    """
    config = loaded.model.config
    longest = max(len(tokens) for tokens in windows)
    if longest > config.context_length:
        raise ValueError(
            f"window {longest} is beyond the model's context of {config.context_length}"
        )
    kv_dtype = choose_kv_dtype(kv_cache, loaded.dtype)
    shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, kv_dtype)
    results = []
    for tokens in windows:
        num_tokens = len(tokens)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        cache = KvCache(shape, num_blocks, loaded.device)
        batch = _prefill_batch(tokens, num_blocks, loaded.device)
        logits = loaded.model.forward(batch, cache)
        results.append(torch.log_softmax(logits[:-1].float(), -1).cpu())
    return results


def _prefill_batch(tokens: Sequence[int], num_blocks: int, device: torch.device) -> ForwardBatch:
    positions = torch.arange(len(tokens))
    plan = AttentionPlan.build(
        [0, len(tokens)], [len(tokens)], [list(range(num_blocks))], BLOCK_SIZE, device
    )
    return ForwardBatch(
        token_ids=torch.tensor(tokens).to(device),
        positions=positions.to(device),
        slots=positions.to(device),
        plan=plan,
        logit_rows=positions.to(device),
    )


def compare(
    form: str,
    weights: str,
    windows: Sequence[Sequence[int]],
    found: Sequence[Tensor],
    reference: Sequence[Tensor],
) -> Accuracy:
    """Both from `log_probabilities` of the same windows."""
    log_likelihood, agreeing, divergence, count = 0.0, 0, 0.0, 0
    for tokens, ours, theirs in zip(windows, found, reference, strict=True):
        following = torch.tensor(tokens[1:])
        log_likelihood += float(ours.gather(1, following[:, None]).double().sum())
        agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        divergence += float((theirs.exp() * (theirs - ours)).double().sum())
        count += len(following)
    return Accuracy(
        form,
        weights,
        perplexity=math.exp(-log_likelihood / count),
        top1_agreement=agreeing / count,
        mean_kl=divergence / count,
        num_tokens=count,
    )


def windows_of(tokens: Sequence[int], size: int) -> list[list[int]]:
    """Pieces of at most `size` tokens; a last one of a single token predicts nothing."""
    pieces = [list(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return [piece for piece in pieces if len(piece) > 1]


def measure(model: str, forms: Sequence[str], window: int, num_threads: int | None) -> None:
    """Prints a line for the reference and one for each form."""
    # All of them first: a wrong form is refused before minutes are spent on the others.
    configs = {form: worker_config(model, form, num_threads) for form in (REFERENCE, *forms)}
    tokens = ModelText.load(resolve_model(model)).encode_text(TEXT)
    windows = windows_of(tokens, window)
    reference: list[Tensor] | None = None
    for form, config in configs.items():
        loaded = load_model(config)
        found = log_probabilities(loaded, windows, config.kv_cache)
        reference = found if reference is None else reference
        result = compare(form, loaded.weights, windows, found, reference)
        fields = {name: _rounded(value) for name, value in asdict(result).items()}
        print(json.dumps(fields), flush=True)


def _rounded(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m legato.bench.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a folder, a .gguf file, a hub id or demo")
    parser.add_argument(
        "--form",
        action="append",
        default=[],
        help="a dtype, a value of --weights, or both, and a value of --kv-cache: int8+bfloat16/fp8",
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.window < 2:  # the first token of a window is not predicted
        parser.error(f"--window must be at least 2, got {arguments.window}")
    if arguments.threads is not None:
        if arguments.threads < 1:
            parser.error(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    try:
        measure(arguments.model, arguments.form, arguments.window, arguments.threads)
    except ValueError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""METRICS: the name, kind, labels, bounds and meaning of everything that `/metrics` tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# Of the OpenTelemetry conventions for generative AI.
TTFT_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BOUNDS_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
# A CPU decodes a small model within milliseconds: finer below than the conventions' bounds.
ITL_BOUNDS_S = (0.0025, 0.005, *TOKEN_BOUNDS_S)
PHASE_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, *DURATION_BOUNDS_S)
LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
GEN_AI_LABELS = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
    "server_address",
    "server_port",
)


@dataclass(frozen=True)
class Metric:
    """One family. A counter's samples are named with `_total` behind its name."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram, without infinity

    @property
    def sample_names(self) -> tuple[str, ...]:
        """As queries have them."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


METRICS: list[Metric] = []  # in the order in which they are told


def _metric(
    name: str, kind: Kind, text: str, *labels: str, bounds: tuple[float, ...] = ()
) -> Metric:
    metric = Metric(name, kind, text, labels, bounds)
    METRICS.append(metric)
    return metric


# --- requests -------------------------------------------------------------------------------------

REQUESTS = _metric(
    "legato_requests",
    "counter",
    "Requests that ended: completed, failed, cancelled or refused.",
    *("outcome", "priority"),
)
REFUSALS = _metric(
    "legato_refusals",
    "counter",
    "Refused requests: overloaded, too_late for their deadlines, invalid_field and so on, as in "
    "the errors' details.",
    "reason",
)
FAILURES = _metric(
    "legato_failures", "counter", "Failed requests, by the reason in the errors' details.", "reason"
)
ANSWERS = _metric(
    "legato_answers", "counter", "Answers that ended: stop, length or cancelled.", "finish_reason"
)
IN_FLIGHT = _metric(
    "legato_requests_in_flight", "gauge", "Requests taken in and not ended, queued ones included."
)
QUEUED = _metric("legato_queue_requests", "gauge", "Places taken in the queue.", "priority")
QUEUED_TOKENS = _metric("legato_queue_prompt_tokens", "gauge", "Prompt tokens that wait.")
OLDEST = _metric("legato_queue_oldest_seconds", "gauge", "The longest present wait in the queue.")
QUEUE_LIMIT = _metric("legato_queue_limit_requests", "gauge", "The queue's bound.")
TTFT = _metric(
    "legato_time_to_first_token_seconds",
    "histogram",
    "Received until the first token was handed to gRPC.",
    "priority",
    bounds=TTFT_BOUNDS_S,
)
ITL = _metric(
    "legato_inter_token_latency_seconds",
    "histogram",
    "Between two messages of one answer, for each token of the later one.",
    "priority",
    bounds=ITL_BOUNDS_S,
)
TPOT = _metric(
    "legato_time_per_output_token_seconds",
    "histogram",
    "First to last token of a finished answer, over its tokens but the first.",
    "priority",
    bounds=TOKEN_BOUNDS_S,
)
DURATION = _metric(
    "legato_request_duration_seconds",
    "histogram",
    "Received until the end, however it ended.",
    *("outcome", "priority"),
    bounds=DURATION_BOUNDS_S,
)
PHASE = _metric(
    "legato_phase_seconds",
    "histogram",
    "Of a finished answer: queue, ticket, prefill, handoff, decode, delivery; as in Timings.",
    "phase",
    bounds=PHASE_BOUNDS_S,
)
PREFILL_WAIT = _metric(
    "legato_prefill_wait_seconds",
    "histogram",
    "Of the prefill phase, what the prompt waited in its worker.",
    bounds=PHASE_BOUNDS_S,
)
PREFILL_MODEL = _metric(
    "legato_prefill_model_seconds",
    "histogram",
    "Of the prefill phase, the model alone.",
    bounds=PHASE_BOUNDS_S,
)
KV_TRANSFER = _metric(
    "legato_kv_transfer_seconds",
    "histogram",
    "Of an answer whose KV was handed over: beginning of the transfer to its commit.",
    bounds=PHASE_BOUNDS_S,
)

# --- tokens and KV --------------------------------------------------------------------------------

PROMPT_TOKENS = _metric(
    "legato_prompt_tokens", "counter", "Prompt tokens of answers that got a first token."
)
CACHED_TOKENS = _metric(
    "legato_cached_prompt_tokens", "counter", "Of them, those that the prefix cache had."
)
GENERATED_TOKENS = _metric("legato_generated_tokens", "counter", "Tokens handed to gRPC.")
HANDOFFS = _metric("legato_handoffs", "counter", "Finished answers whose KV was handed over.")
HANDOFF_BYTES = _metric("legato_handoff_bytes", "counter", "KV handed over, of finished answers.")
HANDOFF_REUSED = _metric(
    "legato_handoff_reused_tokens", "counter", "Tokens whose KV the decode worker had already."
)

# --- what goes wrong and is mended ----------------------------------------------------------------

ATTEMPTS_ENDED = _metric(
    "legato_attempts_ended",
    "counter",
    "Attempts that ended early, and the request went on: no_room, refused, kv_gone, kv_lapsed, "
    "path_failed or worker_failed.",
    "reason",
)
REPLAYS = _metric(
    "legato_replays", "counter", "Attempts that began with tokens of an earlier attempt."
)
REPLAYED_TOKENS = _metric("legato_replayed_tokens", "counter", "Those tokens.")
RETARGETS = _metric(
    "legato_retargets", "counter", "Answers whose KV was sent to another decode worker instead."
)
MOVES = _metric(
    "legato_moves", "counter", "Running answers that moved with their KV, off a worker that drains."
)
PREEMPTIONS = _metric(
    "legato_preempted_answers", "counter", "Answers sent away for want of KV blocks."
)

# --- pools ----------------------------------------------------------------------------------------

READY = _metric("legato_ready", "gauge", "1 while requests are served.")
POOL_WORKERS = _metric(
    "legato_pool_workers",
    "gauge",
    "Workers: connecting, starting, ready, draining, lost or dead, as this router sees them.",
    *("role", "state"),
)
POOL_TARGET = _metric(
    "legato_pool_target_workers",
    "gauge",
    "How many the controller is to keep; absent while it does not answer.",
    "role",
)
CONTROLLER = _metric("legato_controller_answers", "gauge", "1 where the controller told its pools.")
DECISIONS = _metric(
    "legato_autoscaler_decisions", "counter", "Since the controller's start; dry runs included."
)
NEEDED = _metric(
    "legato_autoscaler_needed_workers", "gauge", "How many would do for the present load.", "role"
)

# --- each worker ----------------------------------------------------------------------------------

_WORKER = ("worker", "role")


def _worker(name: str, kind: Kind, text: str, *labels: str) -> Metric:
    return _metric(f"legato_worker_{name}", kind, text, *_WORKER, *labels)


KV_CAPACITY = _worker("kv_capacity_blocks", "gauge", "KV blocks in all.")
KV_BLOCKS = _worker(
    "kv_blocks",
    "gauge",
    "KV blocks: free, reserved (promised to tickets) or held (of live sequences).",
    "state",
)
KV_CACHED = _worker(
    "kv_cached_blocks", "gauge", "Of the free and reserved, those that keep a prefix."
)
RUNNING = _worker("running", "gauge", "Sequences in a batch.")
WAITING = _worker("waiting", "gauge", "Sequences queued in the worker.")
WAITING_TOKENS = _worker("waiting_tokens", "gauge", "Prompt tokens queued and not yet computed.")
TRANSFERRING = _worker("transferring", "gauge", "KV transfers under way, in or out.")
SWAPPED = _worker("swapped", "gauge", "Sequences whose KV lies in the host's memory.")
SWAP_BLOCKS = _worker("swap_blocks", "gauge", "The host's blocks: capacity or held.", "state")
REPORT_AGE = _worker("report_age_seconds", "gauge", "Since its last report.")
STEPS = _worker("steps", "counter", "Forward passes: prefill or decode.", "kind")
TOKENS = _worker("tokens", "counter", "Tokens computed: prefill or decode.", "kind")
MODEL_SECONDS = _worker("model_seconds", "counter", "Seconds that steps took.")
SENT = _worker("kv_sent_bytes", "counter", "KV sent to other workers.")
SENT_BY_MEMORY = _worker(
    "kv_sent_by_memory_bytes", "counter", "Of the KV sent, what went through shared memory."
)
RECEIVED = _worker("kv_received_bytes", "counter", "KV received from other workers.")
TRANSFERS = _worker("kv_transfers", "counter", "Transfers: completed or failed.", "result")
CHUNKS_REFUSED = _worker(
    "kv_chunks_refused", "counter", "Chunks that the fence refused: epoch, checksum or range."
)
PREFIX_BLOCKS = _worker(
    "prefix_blocks", "counter", "Full blocks of prompts: asked, hit, or evicted for room.", "event"
)
WORKER_PREEMPTIONS = _worker(
    "preemptions",
    "counter",
    "Sequences that yielded their KV: all, or returned to the router.",
    "kind",
)

# --- the router itself ----------------------------------------------------------------------------

LOOP_LAG = _metric(
    "legato_router_loop_lag_seconds",
    "histogram",
    "How much later than asked the router's event loop came back to a task, four times a second.",
    bounds=LAG_BOUNDS_S,
)
INFO = _metric(
    "legato_router_info", "gauge", "Always 1: what is served, by which release.", "model", "version"
)

# --- names that others have given -----------------------------------------------------------------

VLLM_RUNNING = _metric(
    "vllm:num_requests_running", "gauge", "Sequences in a batch, of all workers.", "model_name"
)
VLLM_WAITING = _metric(
    "vllm:num_requests_waiting",
    "gauge",
    "Requests that wait, in this router and in all workers.",
    "model_name",
)
VLLM_KV_USAGE = _metric(
    "vllm:kv_cache_usage_perc",
    "gauge",
    "KV in use where answers are decoded; 1 is all of it.",
    "model_name",
)
VLLM_GPU_USAGE = _metric(
    "vllm:gpu_cache_usage_perc",
    "gauge",
    "The same under the name that older gateways read.",
    "model_name",
)
VLLM_CACHE_INFO = _metric(
    "vllm:cache_config_info",
    "gauge",
    "Always 1: tokens of a block and blocks where answers are decoded.",
    *("model_name", "block_size", "num_gpu_blocks"),
)
GEN_AI_TTFT = _metric(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "OpenTelemetry's gen_ai.server.time_to_first_token.",
    *GEN_AI_LABELS,
    bounds=TTFT_BOUNDS_S,
)
GEN_AI_TPOT = _metric(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "OpenTelemetry's gen_ai.server.time_per_output_token.",
    *GEN_AI_LABELS,
    bounds=TOKEN_BOUNDS_S,
)
GEN_AI_DURATION = _metric(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "OpenTelemetry's gen_ai.server.request.duration; error_type is empty where there was none.",
    *(*GEN_AI_LABELS, "error_type"),
    bounds=DURATION_BOUNDS_S,
)

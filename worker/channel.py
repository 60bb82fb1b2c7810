"""Options of every gRPC channel and server between Legato's processes."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 << 20
# A peer that is dead or stopped is noticed after time + timeout: 3 s.
KEEPALIVE_TIME_MS = 1000
KEEPALIVE_TIMEOUT_MS = 2000

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Measured with grpc 1.85: where this is longer (a minute by default), it is what counts, and
    # a stopped peer was not noticed at all within 18 s; with it, after 3.0 s.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: as many as keepalive wants
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # A lost worker is not waited for: the router knows at once, and tries again by its own rule.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # HTTP proxies of the environment are for the world outside, never between our processes.
    ("grpc.enable_http_proxy", 0),
    # Two channels to one address are two connections: closing one never harms the other.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # a taken port is an error, never shared
    # Above 1,000 calls not yet taken up gRPC would drop calls at random, as CANCELLED.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),  # 0: never punish a client for its pings
]

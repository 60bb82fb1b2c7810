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
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: as many as keepalive wants
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # A lost worker is not waited for: the router knows at once, and tries again by its own rule.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Two channels to one address are two connections: closing one never harms the other.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # a taken port is an error, never shared
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),  # 0: never punish a client for its pings
]

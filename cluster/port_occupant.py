"""find_service: the Legato service that has a port already, if it is one that has it."""

from __future__ import annotations

import grpc
import httpx2

from legato.cluster.heartbeat import dial_address
from legato.cluster.retry_policy import failure_of
from legato.protos import cluster_pb2, cluster_pb2_grpc

ASK_S = 1.0  # for each of two questions: it is on this machine, and somebody waits


def find_service(host: str, port: int) -> str | None:
    """host:port of its gRPC endpoint; None where something else listens, or one that speaks TLS."""
    target = dial_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if _is_service(target):
        return target
    grpc_port = _grpc_port(target)
    return None if grpc_port is None else f"{target.rpartition(':')[0]}:{grpc_port}"


def _is_service(target: str) -> bool:
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            stub = cluster_pb2_grpc.ClusterStub(channel)
            stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=ASK_S)
        except grpc.RpcError as error:
            return bool(failure_of(error).reason)  # it wants a token, or ends: in words of ours
    return True


def _grpc_port(target: str) -> int | None:
    """Where this is the HTTP endpoint of a service."""
    try:
        with httpx2.Client(trust_env=False, timeout=ASK_S) as web:
            return int(web.get(f"http://{target}/health").json()["grpc_port"])
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return None

"""LEGATO_ variables: which there are, and that no other is set, which is probably misspelt."""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any

import typer

from legato.cluster.cli.nearest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFIX = "LEGATO_"
# Variables of this prefix that are no settings: of other commands, of the engine, of our own
# processes, and of the tests, which start services.
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in [
        "ADDRESS",
        "CONFIG",
        "CLIENT_ALLOW_PLAIN_TOKEN",
        "CLIENT_TLS",
        "CLIENT_TLS_CA",
        "CLIENT_TLS_CERT",
        "CLIENT_TLS_KEY",
        "CLIENT_TLS_SERVER_NAME",
        "CPU_LEVEL",
        "RAY_TEMP",
        "TOKEN",
        "TOKEN_FILE",
        "AOT",
        "DEMO_MODEL",
        "CLIENTS",
        "DEPLOY",
        "FAULT_CASES",
        "FAULT_STREAMS",
        "FUZZ",
        "FUZZ_HTTP_REQUESTS",
        "FUZZ_REQUESTS",
        "FUZZ_SEED",
        "IDLE_FLOOD",
        "KILLS",
        "LATE_ROWS_RUNS",
        "MEMORY",
        "OVERLOAD",
        "POOL_CYCLES",
        "PROPERTY_EXAMPLES",
        "SEED",
        "SIMULATION",
        "TOKENIZERS",
        "VOCABULARIES",
        "URL",
    ]
)
# Kubernetes tells each container of each Service, under the Service's name.
_OF_KUBERNETES = re.compile(r"LEGATO\w*_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*)")
_ADDRESS_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://.*")


def variable_of(name: str) -> str:
    """`LEGATO_KV_MEMORY` of kv_memory."""
    return PREFIX + name.upper()


def is_of_kubernetes(name: str, value: str) -> bool:
    """Whether it is one of those that a Service named legato brings with it."""
    return bool(_OF_KUBERNETES.fullmatch(name) or is_kubernetes_address(value))


def is_kubernetes_address(value: str) -> bool:
    """Whether this is what Kubernetes sets LEGATO_PORT to for a Service named legato."""
    return _ADDRESS_OF_KUBERNETES.fullmatch(value) is not None


def checks_variables(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same command, refused where a LEGATO_ variable means nothing."""

    @functools.wraps(command)
    def checked(*args: Any, **settings: Any) -> Any:  # noqa: ANN401  # whatever it takes
        check_variables(os.environ)
        return command(*args, **settings)

    return checked


def check_variables(environment: Mapping[str, str]) -> None:
    """Raises typer.BadParameter for a LEGATO_… that means nothing: it is probably misspelt."""
    strange = [
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX)
        and name.upper() not in OTHER_VARIABLES
        and not is_of_kubernetes(name, value)
    ]
    if not strange:
        return
    # Only now: the schema takes longer to load than a question to a service takes.
    from legato.cluster.cli.serve_settings import ServeSettings

    known = {variable_of(name) for name in ServeSettings.model_fields} | OTHER_VARIABLES
    for name in strange:
        if name.upper() not in known:
            raise typer.BadParameter(
                f"is no variable of Legato's{did_you_mean(name, known)}", param_hint=name
            )

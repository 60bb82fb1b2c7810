"""`legato serve`: starts a service and stays until it is told to end."""

from __future__ import annotations

import sys

from legato.cluster.cli.serve_settings import Loaded  # noqa: TC001  # the annotation is read
from legato.cluster.cli.service_run import run_service, stay
from legato.cluster.cli.settings_command import takes_settings


@takes_settings
def serve(loaded: Loaded) -> None:
    """Start a service and stay until it is ended.

    Ctrl-C or `legato stop` end it, and every process of it.

    Examples:

        legato serve --model demo

        legato serve --model ./my-model --prefill 1 --decode 2 --kv-memory 4GiB

        legato serve --model org/name --ray-address auto --device cuda

        legato serve --model org/name --ray-address auto --decode-resources GPU=0,CPU=16

        legato serve --model demo --colocated 2 --prefill 0 --decode 0

        legato serve --config legato.yaml --decode 4

        legato serve --model ./my-model --autoscale prefill=1..4 decode=1..8 --ttft-slo 500ms
    """
    sys.exit(run_service(loaded.config, stay))

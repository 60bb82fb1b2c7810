"""note_configs: what `legato serve` would start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from legato.cluster.config import ServiceConfig


def note_configs(monkeypatch: pytest.MonkeyPatch) -> list[ServiceConfig]:
    """From now on `legato serve` starts nothing, and its configs are in this list."""
    configs: list[ServiceConfig] = []

    def note(config: ServiceConfig, _: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("legato.cluster.cli.serve.run_service", note)
    return configs

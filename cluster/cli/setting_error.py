"""SettingError: one setting is wrong, by itself or beside the others."""

from __future__ import annotations


class SettingError(ValueError):
    """Names the setting; whoever has read it knows where its value came from."""

    def __init__(self, name: str, rule: str) -> None:
        super().__init__(rule)
        self.name = name

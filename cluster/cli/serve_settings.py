"""ServeSettings: the one schema of a service's settings, and where each value came from.

Options, variables, the file, their defaults, help, checks and documentation all come from here.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, SettingsConfigDict

from legato.cluster.cli.autoscale_flags import AutoscaleFlags
from legato.cluster.cli.engine_flags import EngineFlags
from legato.cluster.cli.nearest import did_you_mean
from legato.cluster.cli.pool_options import check_pools, check_sizes
from legato.cluster.cli.security_flags import SecurityFlags
from legato.cluster.cli.service_flags import ServiceFlags
from legato.cluster.cli.setting_error import SettingError
from legato.cluster.cli.setting_forms import Form
from legato.cluster.cli.variables import PREFIX, is_kubernetes_address, variable_of
from legato.cluster.cli.yaml_settings import read_settings
from legato.cluster.config import EngineOptions, RouterOptions, ServiceConfig
from legato.cluster.errors import WrongInputError
from legato.cluster.router_ports import default_http_port, http_ports, router_ports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pydantic.fields import FieldInfo
    from pydantic_settings import PydanticBaseSettingsSource

THREADS_PER_CORE = 8  # of a worker at most; more only wait for each other


class ServeSettings(AutoscaleFlags, SecurityFlags, EngineFlags, ServiceFlags, BaseSettings):
    """Frozen; a variable is LEGATO_ and the setting's name in capitals."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        env_ignore_empty=True,
        enable_decoding=False,  # forms read texts
        validate_default=False,
        protected_namespaces=(),
    )

    def to_config(self) -> ServiceConfig:
        """Raises SettingError where settings do not go together."""
        check_sizes(self.prefill, self.decode, self.colocated)
        if self.await_nodes and self.ray_address is None:
            raise SettingError(
                "await_nodes", "is for a joined cluster: it needs --ray-address, which is not given"
            )
        check_pools(
            (self.dtype, self.kv_cache),
            (self.decode_dtype, self.decode_kv_cache),
            self.kv_wire,
            self.weights,
        )
        autoscale = self.autoscale_options(self.prefill, self.decode)
        kv_memory: dict[str, Any] = {"kv_memory_bytes": self.kv_memory}
        if isinstance(self.kv_memory, float):
            kv_memory = {"kv_memory_fraction": self.kv_memory}
        engine = EngineOptions(
            **self._named_alike(EngineOptions),
            **kv_memory,
            swap_memory_bytes=self.swap_memory,
            num_threads=self.threads,
        )
        http_port = self.http_port
        if http_port is None:
            http_port = default_http_port(self.port)
        router = RouterOptions(
            **self._named_alike(RouterOptions, but=("http_port",)),
            http_port=http_port if self.http else None,
            tls=self.service_tls(),
            token_file=self.api_token_file,
            reports_load=autoscale is not None,
        )
        config = ServiceConfig(
            **self._named_alike(ServiceConfig, but=("autoscale",)),
            prefill_workers=self.prefill,
            decode_workers=self.decode,
            colocated_workers=self.colocated,
            num_routers=self.routers,
            start_timeout_s=self.start_timeout,
            engine=engine,
            router=router,
            autoscale=autoscale,
            worker_tls=self.worker_tls(),
        )
        self._check_machine(config)
        return config

    def _check_machine(self, config: ServiceConfig) -> None:
        """What needs more than one setting, and Ray for nothing."""
        for name, ports_of in (("routers", router_ports), ("http_port", http_ports)):
            try:
                ports_of(config)
            except WrongInputError as error:
                raise SettingError(name, str(error)) from None
        num_cores = len(os.sched_getaffinity(0))
        most = THREADS_PER_CORE * num_cores
        if self.ray_address is None and self.threads is not None and self.threads > most:
            raise SettingError(
                "threads",
                f"is {self.threads}, limit {most}: {THREADS_PER_CORE} for each of this machine's "
                f"{num_cores} CPUs",
            )

    def _named_alike(self, options: Any, but: tuple[str, ...] = ()) -> dict[str, Any]:  # noqa: ANN401  # a dataclass
        names = {field.name for field in dataclasses.fields(options)}
        names &= type(self).model_fields.keys() - set(but)
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Loaded:
    """Settings in force. `places` tells by name where a value came from; a default has none."""

    settings: ServeSettings
    config: ServiceConfig
    places: Mapping[str, str]

    def text_of(self, name: str) -> str:
        """A value as one may write it; nothing where it is not set."""
        return value_text(ServeSettings.model_fields[name], getattr(self.settings, name))


def form_of(field: FieldInfo) -> Form:
    """How a setting is written."""
    return next(item for item in field.metadata if isinstance(item, Form))


def value_text(field: FieldInfo, value: object) -> str:
    """As one may write it, or nothing where there is no value."""
    return "" if value is None else form_of(field).show(value)


def option_of(name: str) -> str:
    """`--kv-memory` of kv_memory."""
    return "--" + name.replace("_", "-")


def load(options: Mapping[str, str], path: Path | None) -> Loaded:
    """What is in force: options before variables before the file before defaults.

    Raises:
        SettingError: naming where the value stands (as its `name`), the rule, the value.
    """
    from_file, places = _read_file(path)

    class FromAll(ServeSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = InitSettingsSource(settings_cls, init_kwargs=from_file)
            return init_settings, env_settings, file

    fields = ServeSettings.model_fields
    variables = {name.upper(): name for name, value in os.environ.items() if value}  # in any case
    places |= {
        name: variables[variable_of(name)] for name in fields if variable_of(name) in variables
    }
    places |= {name: option_of(name) for name in options}
    try:
        settings = FromAll(**options)  # type: ignore[arg-type]  # texts, which the forms read
        return Loaded(settings, settings.to_config(), places)
    except ValidationError as error:
        # One at a time; what is missing may be what is wrong elsewhere.
        first = min(error.errors(), key=lambda found: found["type"] == "missing")
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise SettingError(
                option_of(name),
                f"is not given, nor is {variable_of(name)} or `{name}:` in a --config file; "
                f"`{option_of(name)} demo` is the demo model",
            ) from None
        rule = str(first.get("ctx", {}).get("error", first["msg"]))
        raise SettingError(places[name], rule + _hint(places[name])) from None
    except SettingError as error:
        raise SettingError(places.get(error.name, option_of(error.name)), str(error)) from None


def _read_file(path: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    if path is None:
        return {}, {}
    try:
        found = read_settings(path)
    except ValueError as error:
        raise SettingError("--config", str(error)) from error
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, given in found.items():
        field = ServeSettings.model_fields.get(key)
        place = f"{key} ({given.place})"
        if field is None:
            near = did_you_mean(key, ServeSettings.model_fields)
            raise SettingError(place, f"is no setting of Legato's{near}")
        value = given.value
        if isinstance(value, dict):
            joined = form_of(field).join(value)
            if joined is None:
                raise SettingError(place, "must be one value, got keys and values")
            value = joined
        values[key], places[key] = value, place
    return values, places


def _hint(place: str) -> str:
    if is_kubernetes_address(os.environ.get(place, "")):
        return (
            ": Kubernetes sets it for a Service named legato; set enableServiceLinks: false in the "
            "pod, or name the Service otherwise"
        )
    return ""

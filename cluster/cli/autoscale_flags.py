"""AutoscaleFlags: what `legato serve` takes for the autoscaler, and how it is read."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from legato.cluster.autoscale_options import AutoscaleOptions as Options
from legato.cluster.cli.service_forms import Duration, Ranges
from legato.cluster.cli.setting_error import SettingError
from legato.cluster.cli.setting_forms import Switch

# Of each setting that means nothing alone, the option that it sets.
_NEED_RANGES = {
    "ttft_slo": "ttft_slo_s",
    "itl_slo": "itl_slo_s",
    "autoscale_up_after": "up_after_s",
    "autoscale_down_after": "down_after_s",
    "autoscale_cool_down": "cool_down_s",
    "autoscale_dry_run": "dry_run",
}


class AutoscaleFlags(BaseModel):
    """Each is an option, a variable and a key of the file."""

    autoscale_title: ClassVar[str] = "Autoscaler"

    # A PoolRange of each role.
    autoscale: Annotated[Any, Ranges()] = Field(
        None,
        description="Let the pools grow and shrink with the load, each within its range; "
        "--prefill and --decode are what they start with.",
    )
    autoscale_dry_run: Annotated[bool, Switch()] = Field(
        Options.dry_run, description="Decide and tell, and change nothing."
    )
    ttft_slo: Annotated[float, Duration()] = Field(
        Options.ttft_slo_s, description="Time to first token that prefill is scaled for."
    )
    itl_slo: Annotated[float, Duration()] = Field(
        Options.itl_slo_s, description="Time between tokens that decode is scaled for."
    )
    autoscale_up_after: Annotated[float, Duration()] = Field(
        Options.up_after_s, description="So long more workers must be needed before they come."
    )
    autoscale_down_after: Annotated[float, Duration()] = Field(
        Options.down_after_s, description="So long fewer must be enough before one goes."
    )
    autoscale_cool_down: Annotated[float, Duration()] = Field(
        Options.cool_down_s, description="So long a pool is left alone once it has changed."
    )

    def autoscale_options(self, num_prefill: int, num_decode: int) -> Options | None:
        """None without ranges. The numbers are those of workers to start with.

        Raises:
            SettingError: naming the setting, what was given and what would do.
        """
        if self.autoscale is None:
            for name in _NEED_RANGES:
                if name in self.model_fields_set and getattr(self, name) is not False:
                    raise SettingError(name, "does nothing without --autoscale")
            return None
        for role, size in (("prefill", num_prefill), ("decode", num_decode)):
            if size not in self.autoscale[role]:
                allowed = f"--autoscale {role}={self.autoscale[role]}"
                raise SettingError(role, f"must be within {allowed}, got {size}")
        more = {option: getattr(self, name) for name, option in _NEED_RANGES.items()}
        return Options(self.autoscale["prefill"], self.autoscale["decode"], **more)

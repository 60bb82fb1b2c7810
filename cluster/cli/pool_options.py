"""check_pools, check_sizes: which pools `legato serve` takes together."""

from __future__ import annotations

from legato.cluster.cli.setting_error import SettingError


def check_sizes(prefill: int, decode: int, colocated: int) -> None:
    """Raises SettingError where these workers could serve nothing."""
    if colocated or (prefill and decode):
        return
    name, other = ("prefill", "decode") if not prefill else ("decode", "prefill")
    raise SettingError(
        name,
        f"0 serves nothing, whatever --{other} is: it needs a prefill and a decode worker, or with "
        "--colocated a worker that is both",
    )


def check_pools(
    prefill: tuple[str, str],
    decode: tuple[str | None, str | None],
    kv_wire: str,
    weights: str,
) -> None:
    """Each pool's is (--dtype, --kv-cache); None of decode is what prefill has.

    Refuses here, by setting, what the workers' identities would be refused for once they are loaded
    (`legato.protos.kv_fit`).

    Raises:
        SettingError: naming the setting.
    """
    for name, of_prefill, of_decode in zip(("dtype", "kv-cache"), prefill, decode, strict=True):
        if of_decode in (None, of_prefill):
            continue
        setting = f"decode_{name.replace('-', '_')}"
        differs = f"{of_decode!r} is not --{name} {of_prefill!r}"
        if kv_wire == "same":
            raise SettingError(
                setting,
                f"{differs}: KV must be converted on the way; give --kv-wire a dtype, for example "
                "bfloat16",
            )
        if name == "dtype" and weights != "auto":
            raise SettingError(
                setting, f"{differs}: with --weights {weights} both pools must have one dtype"
            )

"""check_pools, check_sizes: which pools `legato serve` takes together."""

from __future__ import annotations

import typer


def check_sizes(prefill: int, decode: int, colocated: int) -> None:
    """Raises typer.BadParameter where these workers could serve nothing."""
    if colocated or (prefill and decode):
        return
    option, other = ("--prefill", "--decode") if not prefill else ("--decode", "--prefill")
    raise typer.BadParameter(
        f"0 serves nothing, whatever {other} is: it needs a prefill and a decode worker, or with "
        "--colocated a worker that is both",
        param_hint=option,
    )


def check_pools(
    prefill: tuple[str, str],
    decode: tuple[str | None, str | None],
    kv_wire: str,
    weights: str,
) -> None:
    """Each pool's is (--dtype, --kv-cache); None of decode is what prefill has. The rest are valid.

    Refuses here, by option, what the workers' identities would be refused for once they are loaded
    (`legato.protos.kv_fit`).

    Raises:
        typer.BadParameter: naming the option.
    """
    choices = (
        ("dtype", ("auto", "float32", "bfloat16", "float16")),
        ("kv-cache", ("auto", "fp8", "int8")),
    )
    for (name, allowed), of_prefill, of_decode in zip(choices, prefill, decode, strict=True):
        for option, value in ((f"--{name}", of_prefill), (f"--decode-{name}", of_decode)):
            if value is not None and value not in allowed:
                raise typer.BadParameter(
                    f"must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}",
                    param_hint=option,
                )
        if of_decode in (None, of_prefill):
            continue
        differs = f"{of_decode!r} is not --{name} {of_prefill!r}"
        if kv_wire == "same":
            raise typer.BadParameter(
                f"{differs}: KV must be converted on the way; give --kv-wire a dtype, for example "
                "bfloat16",
                param_hint=f"--decode-{name}",
            )
        if name == "dtype" and weights != "auto":
            raise typer.BadParameter(
                f"{differs}: with --weights {weights} both pools must have one dtype",
                param_hint="--decode-dtype",
            )

"""secured: gives a command that calls a service the options by which it shows and trusts."""

from __future__ import annotations

import functools
import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cluster.client_access import ClientAccess, ClientTls, read_token
from legato.cluster.errors import WrongInputError

if TYPE_CHECKING:
    from collections.abc import Callable

_PANEL = "Access"
# Of the command that runs, one a process: for its threads, too, which a context variable is not.
_chosen: list[ClientAccess] = []


def _option(*names: str, **settings: Any) -> Any:  # noqa: ANN401  # typer's own type
    return typer.Option(*names, rich_help_panel=_PANEL, show_default=False, **settings)


_OPTIONS: dict[str, tuple[Any, Any]] = {  # by parameter: annotation, default
    "tls": (
        Annotated[bool, _option("--tls", help="TLS, by the authorities that this machine trusts.")],
        False,
    ),
    "tls_ca": (
        Annotated[
            Path | None,
            _option(
                "--tls-ca", help="TLS: who signed the service's certificate. [LEGATO_CLIENT_TLS_CA]"
            ),
        ],
        None,
    ),
    "tls_cert": (
        Annotated[
            Path | None,
            _option(
                "--tls-cert", help="A certificate of the client's own. [LEGATO_CLIENT_TLS_CERT]"
            ),
        ],
        None,
    ),
    "tls_key": (
        Annotated[Path | None, _option("--tls-key", help="Its key. [LEGATO_CLIENT_TLS_KEY]")],
        None,
    ),
    "token_file": (
        Annotated[
            Path | None,
            _option(
                "--token-file",
                help="The token that the service asks for: the first in this file. "
                "[LEGATO_TOKEN_FILE, or LEGATO_TOKEN itself]",
            ),
        ],
        None,
    ),
    "allow_plain_token": (
        Annotated[
            bool,
            _option("--allow-plain-token", help="Show it to another machine without TLS, too."),
        ],
        False,
    ),
}


def secured(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same command; where it has an --address or --url, with the options of `_OPTIONS` too."""
    signature = inspect.signature(command, eval_str=True)
    if not signature.parameters.keys() & {"address", "url"}:
        return command

    @functools.wraps(command)
    def with_access(**settings: Any) -> Any:  # noqa: ANN401  # whatever it returns
        own = {name: settings.pop(name) for name in _OPTIONS}
        _chosen.append(_read(**own))
        try:
            return command(**settings)
        finally:
            _chosen.pop()

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in signature.parameters.values()]
    parameters += [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    changed: Any = with_access
    changed.__signature__ = signature.replace(parameters=parameters)
    changed.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_access


def chosen_access() -> ClientAccess:
    """What the options of this command say, and the environment where they say nothing."""
    return _chosen[-1] if _chosen else _from_environment()


def name_sources(sentence: str) -> str:
    """A complaint about a file, behind the variables that name it, where these do."""
    names = [f"LEGATO_CLIENT_TLS_{part}" for part in ("CA", "CERT", "KEY")]
    named = [name for name in names if repr(os.environ.get(name)) in sentence]
    return f"{' and '.join(named)}: {sentence}" if named else sentence


def _read(
    *,
    tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    token_file: Path | None,
    allow_plain_token: bool,
) -> ClientAccess:
    access = _from_environment()
    given = {"ca_file": tls_ca, "cert_file": tls_cert, "key_file": tls_key}
    files = {name: str(path) for name, path in given.items() if path is not None}
    if tls or files:
        access = replace(access, tls=replace(access.tls or ClientTls(), **files))
    if token_file is not None:
        try:
            access = replace(access, token=read_token(str(token_file)))
        except ValueError as error:
            raise WrongInputError(f"--token-file: {error}") from None
    if allow_plain_token:
        access = replace(access, allow_plain_token=True)
    return access


def _from_environment() -> ClientAccess:
    try:
        return ClientAccess.from_environment()
    except ValueError as error:
        raise WrongInputError(str(error)) from None

"""takes_settings: a command whose options are the schema's, and that gets what is in force."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cluster.cli.serve_settings import (
    ServeSettings,
    form_of,
    load,
    option_of,
    value_text,
)
from legato.cluster.cli.setting_error import SettingError
from legato.cluster.cli.setting_forms import Switch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic.fields import FieldInfo


def _config_path(text: str) -> Path:
    if not text.strip():  # which would be the folder where the command runs
        raise typer.BadParameter("must not be empty: give the name of a YAML file")
    return Path(text)


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        envvar="LEGATO_CONFIG",
        parser=_config_path,
        metavar="FILE",
        help="A YAML file of settings, named as the options with _ for -. Options go before "
        "variables (LEGATO_KV_MEMORY), and these before the file.",
        show_default=False,
    ),
]
MoreRanges = Annotated[  # an option takes one word: here is the other
    list[str] | None, typer.Argument(hidden=True, metavar="[POOL=MIN..MAX]...")
]


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """`command` takes a Loaded first; its other parameters stay options of its own."""

    def run(
        context: typer.Context,
        config: Path | None = None,
        more_ranges: list[str] | None = None,
        **given: Any,  # noqa: ANN401  # of the schema texts, of the command as it says
    ) -> None:
        taken = {name: given.pop(name) for name in ServeSettings.model_fields}
        options = {name: _text(value) for name, value in taken.items() if value is not None}
        if more_ranges and "autoscale" not in options:
            raise typer.BadParameter(f"takes options only, got {more_ranges[0]!r}", ctx=context)
        if more_ranges:
            options["autoscale"] = " ".join([options["autoscale"], *more_ranges])
        try:
            loaded = load(options, config)
        except SettingError as error:
            raise typer.BadParameter(str(error), ctx=context, param_hint=error.name) from error
        command(loaded, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(_parameters(command))  # type: ignore[attr-defined]  # Typer reads it
    return run


def part_of(name: str) -> str:
    """Under which title a setting is documented."""
    for cls in ServeSettings.__mro__:
        if name in inspect.get_annotations(cls):
            return next(str(value) for key, value in vars(cls).items() if key.endswith("_title"))
    raise AssertionError(name)


def help_of(field: FieldInfo) -> str:
    """What it is, within which limits, and what it is without being set."""
    text = (field.description or "").rstrip(".")
    if limits := form_of(field).limits:
        text += f"; {limits}"
    default = "" if field.is_required() else value_text(field, field.default)
    return f"{text}. Default: {default}." if default else f"{text}."


def _parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    found = [
        _parameter("context", typer.Context, inspect.Parameter.empty),
        _parameter("config", ConfigOption, None),
        *(_option(name, field) for name, field in ServeSettings.model_fields.items()),
        _parameter("more_ranges", MoreRanges, None),
    ]
    return found + [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    form, flag = form_of(field), option_of(name)
    is_switch = isinstance(form, Switch)

    def complete(incomplete: str) -> list[str]:
        return [word for word in form.choices if word.startswith(incomplete)]

    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        metavar=None if is_switch else form.metavar,
        help=help_of(field),
        show_default=False,
        autocompletion=complete if form.choices and not is_switch else None,
    )
    kind = bool if is_switch else str
    return _parameter(name, Annotated[kind | None, option], None)


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

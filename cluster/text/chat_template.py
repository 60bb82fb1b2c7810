"""ChatTemplate: a model's Jinja template, compiled once, rendered within bounds."""

from __future__ import annotations

import datetime
import json
import time
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes

from legato.cluster.errors import RequestError, invalid
from legato.cluster.text.template_bounds import BUDGET, LimitError, RenderBudget
from legato.cluster.text.template_sandbox import TemplateSandbox
from legato.protos.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_RENDERED_CHARS = 1 << 24
TIME_LIMIT_S = 5.0


class ChatTemplate:
    """Renders messages as Hugging Face's templates expect it; thread-safe.

    Templates come with downloaded models and see users' text, so they run in Jinja's sandbox, and
    neither endless loops nor huge output get far: every loop turn and macro call looks at the
    clock, every piece of output counts.
    """

    def __init__(
        self,
        source: str,
        names: Mapping[str, str],
        *,
        time_limit_s: float = TIME_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self._names = dict(names)
        self._time_limit_s = time_limit_s
        self._clock = clock
        self._sandbox = TemplateSandbox()
        self._sandbox.add_filter("tojson", _to_json)
        self._sandbox.globals["raise_exception"] = _raise_exception
        self._sandbox.globals["strftime_now"] = _strftime_now
        self._broken: str | None = None
        try:
            self._template = self._sandbox.from_string(source)
        except Exception as error:  # whatever a hostile source makes the compiler raise
            self._broken = _sentence(error)
        self._constants: frozenset[str] = frozenset()
        if self._broken is None:
            constants = self._sandbox.parse(source).find_all(nodes.Const)
            self._constants = frozenset(c.value for c in constants if isinstance(c.value, str))

    @property
    def texts(self) -> tuple[str, ...]:
        """All text that can come from the template itself, escapes resolved."""
        return (self.source, *self._names.values(), *self._constants)

    def names_role(self, role: str) -> bool:
        """Whether the template has this word as a string of its own."""
        return role in self._constants

    def render(self, messages: Sequence[Mapping[str, str]], *, max_chars: int | None = None) -> str:
        """The prompt, with the opening of the assistant's answer at its end.

        Raises:
            RequestError: INVALID_ARGUMENT with the template's own words.
        """
        if self._broken is not None:
            raise invalid(f"messages: the model's chat template is broken: {self._broken}")
        limit = min(MAX_RENDERED_CHARS, max_chars if max_chars is not None else MAX_RENDERED_CHARS)
        budget = RenderBudget(self._time_limit_s, self._clock)
        variables: dict[str, Any] = {
            **self._names,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        pieces: list[str] = []
        num_chars = 0
        outside = BUDGET.set(budget)
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > limit:
                    raise LimitError(f"it writes more than {limit} characters")
                budget.step()
                pieces.append(piece)
        except RequestError:
            raise
        except _RefusedError as error:
            raise invalid(
                f"messages: refused by the model's chat template: {printable(str(error))}"
            ) from error
        except Exception as error:  # a template is a program: anything can come out of it
            raise invalid(
                f"messages: the model's chat template failed: {_sentence(error)}"
            ) from error
        finally:
            BUDGET.reset(outside)
        return "".join(pieces)


class _RefusedError(TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object = "") -> None:
    raise _RefusedError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(layout)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _sentence(error: BaseException) -> str:
    if isinstance(error, LimitError):
        return str(error)
    return f"{type(error).__name__}: {printable(str(error))}"

"""TemplateSandbox: Jinja's sandbox, with the means to stop what would not stop by itself."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2.parser import Parser
    from jinja2.runtime import Context

STEP = "_legato_step"  # the variable that holds the function called at every turn
MAX_SIZE = 1 << 24  # of a text or list that one operation makes
MAX_INT_ARGUMENT = 1_000_000
# Field widths in "%" and in str.format strings.
_WIDE_PERCENT = re.compile(r"%[^A-Za-z%]*?(?:\*|\d{7,})")
_WIDE_BRACES = re.compile(r"\{[^{}]*\d{7,}")


class LimitError(SecurityError):
    """A template went beyond a bound."""


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Set up as transformers does; bounded where the sandbox is not.

    Calls STEP at every turn of a loop and every call of a macro; refuses operators, calls and
    filters that make something huge out of something small.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            optimized=False,  # constant expressions would be computed at load, without bounds
        )
        self.filters = {name: _bounded(filter_) for name, filter_ in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies = [
            *((block.lineno, block.body) for block in tree.find_all(nodes.For)),
            *((block.lineno, block.body) for block in tree.find_all(nodes.Macro)),
            *((block.lineno, block.body) for block in tree.find_all(nodes.CallBlock)),
        ]
        for lineno, body in bodies:
            call = nodes.Call(nodes.Name(STEP, "load"), [], [], None, None)
            body.insert(0, nodes.ExprStmt(call).set_lineno(lineno))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401  # Jinja's signature
        """`left operator right`, unless the result would be huge."""
        if operator == "**" and not (_small(left, 1 << 16) and _small(right, 64)):
            raise LimitError("a power of large numbers")
        if operator == "*":
            for sequence, factor in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(factor, int):
                    _check_size(len(sequence) * factor)
        if operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise LimitError("a format string with a wide field")
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805  # Jinja's signature: any name may be a keyword
        """A call in a template."""
        _check_arguments(args, kwargs)
        if getattr(__obj, "__name__", "") in ("format", "format_map"):
            _check_format(getattr(__obj, "__wrapped__", __obj))
        return _checked(super().call(__context, __obj, *args, **kwargs))


def _bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` keeps the attribute by which Jinja knows what a filter wants as its first argument.
    @functools.wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # any filter
        _check_arguments(args, kwargs)
        if filter_.__name__ == "do_format" and _WIDE_PERCENT.search(str(args[0])):
            raise LimitError("a format string with a wide field")
        return _checked(filter_(*args, **kwargs))

    return bounded


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and not _small(value, MAX_INT_ARGUMENT):
            raise LimitError(f"a number above {MAX_INT_ARGUMENT} as an argument")


def _check_format(method: Any) -> None:  # noqa: ANN401  # a bound method of str, or not
    layout = getattr(method, "__self__", None)
    if isinstance(layout, str) and _WIDE_BRACES.search(layout):
        raise LimitError("a format string with a wide field")


def _checked(value: Any) -> Any:  # noqa: ANN401  # passes it on
    if isinstance(value, (str, list, tuple)):
        _check_size(len(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise LimitError(f"it makes a value of {size} items; at most {MAX_SIZE} are allowed")


def _small(value: Any, limit: int) -> bool:  # noqa: ANN401  # numbers, or what Jinja will refuse
    return not isinstance(value, (int, float)) or abs(value) <= limit

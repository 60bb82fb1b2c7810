"""TemplateSandbox: Jinja's sandbox, with the means to stop what would not stop by itself."""

from __future__ import annotations

import functools
import unicodedata
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from legato.cluster.text.template_bounds import (
    BUDGET,
    LimitError,
    check_arguments,
    check_format,
    check_growth,
    check_size,
    checked,
    size,
    small,
    taken,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2.parser import Parser
    from jinja2.runtime import Context

STEP = "_legato_step"  # the variable that holds the function called at every turn
CONCAT = "_legato_concat"  # and the one that does what `~` says
MAX_SOURCE_CHARS = 1 << 20


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _NoConcat(NodeTransformer):
    """Turns `a ~ b`, which Jinja lets nobody look at, into a call."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802  # Jinja's name
        self.generic_visit(node)
        name = nodes.Name(CONCAT, "load")
        call = nodes.Call(name, node.nodes, [], None, None)
        call.set_lineno(node.lineno)
        return call


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
            finalize=_printable,
        )
        del self.globals["lipsum"]  # text out of nothing
        self.globals[STEP] = lambda: BUDGET.get().step()
        self.globals[CONCAT] = _concat
        for name, filter_ in tuple(self.filters.items()):
            self.add_filter(name, filter_)

    def add_filter(self, name: str, filter_: Callable[..., Any]) -> None:
        """A filter for templates, bounded as the built-in ones are."""
        self.filters[name] = _bounded(name, filter_)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise LimitError(f"it has {len(source)} characters; at most {MAX_SOURCE_CHARS}")
        # Python takes names that look alike for one, so the comparison must too.
        if "_legato_" in unicodedata.normalize("NFKC", source):
            raise TemplateSyntaxError("names with '_legato_' in them are taken", 1)
        tree = super()._parse(source, name, filename)
        bodies = [
            *((block.lineno, block.body) for block in tree.find_all(nodes.For)),
            *((block.lineno, block.body) for block in tree.find_all(nodes.Macro)),
            *((block.lineno, block.body) for block in tree.find_all(nodes.CallBlock)),
        ]
        for lineno, body in bodies:
            call = nodes.Call(nodes.Name(STEP, "load"), [], [], None, None)
            body.insert(0, nodes.ExprStmt(call).set_lineno(lineno))
        _NoConcat().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401  # Jinja's signature
        """`left operator right`, unless the result would be huge."""
        if operator == "**" and not (small(left, 1 << 16) and small(right, 64)):
            raise LimitError("a power of large numbers")
        if operator == "*":
            for sequence, factor in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(factor, int):
                    check_size(len(sequence) * factor)
        if operator == "%" and isinstance(left, str):
            check_format("%", left, right)
        return checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805  # Jinja's signature: any name may be a keyword
        """A call in a template."""
        if __obj is not _concat:
            check_arguments(args, kwargs)
        method = getattr(__obj, "__wrapped__", __obj)
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            name = getattr(method, "__name__", "")
            if name == "join" and args and not isinstance(args[0], (str, list, tuple, dict)):
                args = (taken(args[0]), *args[1:])
            check_growth(name, (subject, *args, *kwargs.values()))
        return checked(super().call(__context, __obj, *args, **kwargs))


def _bounded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` keeps the attribute by which Jinja knows what a filter wants as its first argument.
    wants_context = hasattr(filter_, "jinja_pass_arg")

    @functools.wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # any filter
        BUDGET.get()  # at load there is none: nothing is computed there
        values = args[1:] if wants_context else args
        check_arguments(values, kwargs)
        if name == "format":
            check_format("%", str(values[0]), (values[1:], kwargs))
        elif name in ("join", "sum") and not isinstance(values[0], (str, list, tuple, dict)):
            values = (taken(values[0]), *values[1:])
            args = (*args[:1], *values) if wants_context else values
        if name != "format":
            check_growth(name, (*values, *kwargs.values()))
        return checked(filter_(*args, **kwargs))

    return bounded


def _concat(*values: object) -> str:
    check_size(sum(map(size, values)))
    return "".join(map(str, values))


def _printable(value: Any) -> Any:  # noqa: ANN401  # passes it on
    check_size(size(value))
    return value

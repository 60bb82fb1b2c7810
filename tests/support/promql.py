"""selectors_of: the metrics and labels that a PromQL query names, without a PromQL library."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Whole words that are no metrics.
_WORDS = {
    *("by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"),
    *("and", "or", "unless", "inf", "nan", "atan2"),
}
_FUNCTIONS = {
    *("sum", "max", "min", "avg", "count", "topk", "quantile", "absent", "clamp_max", "clamp_min"),
    *("rate", "irate", "increase", "delta", "histogram_quantile", "time", "label_values"),
}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<matchers>\{[^{}]*\})"""
    r"""|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<word>[a-zA-Z_:][a-zA-Z0-9_:]*)"""
    r"""|(?P<other>\s+|==|!=|<=|>=|[-+*/%^<>(),])"""
)
_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"\s*(?:,|$)')


@dataclass(frozen=True)
class Selectors:
    """Of one query."""

    metrics: dict[str, set[str]]  # with the labels that their matchers name
    groupings: set[str]  # labels that results are grouped or joined by


def selectors_of(query: str) -> Selectors:
    """Raises ValueError where the query is not well formed, as far as this can tell."""
    groupings: set[str] = set()
    for names in _GROUPING.findall(query):
        groupings |= {name.strip() for name in names.split(",") if name.strip()}
    rest = _GROUPING.sub(" ", query)
    metrics: dict[str, set[str]] = {}
    last = ""
    depth = at = 0
    while at < len(rest):
        token = _TOKEN.match(rest, at)
        if token is None:
            raise ValueError(f"cannot read {rest[at:]!r} in {query!r}")
        at = token.end()
        kind, text = str(token.lastgroup), token.group()
        if kind == "other":
            depth += text.count("(") - text.count(")")
            if depth < 0:
                raise ValueError(f"a bracket too many in {query!r}")
        elif kind == "matchers":
            if not last:
                raise ValueError(f"matchers without a metric in {query!r}")
            inner, end = text[1:-1], 0
            while end < len(inner):
                matcher = _MATCHER.match(inner, end)
                if matcher is None:
                    raise ValueError(f"cannot read matcher {inner[end:]!r} in {query!r}")
                metrics[last].add(matcher[1])
                end = matcher.end()
        if kind == "word":
            is_called = rest[at:].lstrip().startswith("(")
            if is_called and text not in _FUNCTIONS | _WORDS:
                raise ValueError(f"unknown function {text!r} in {query!r}")
            last = ""
            if not is_called and text.lower() not in _WORDS | _FUNCTIONS:
                last = text
                metrics.setdefault(text, set())
        elif kind not in ("matchers", "range"):
            last = ""
    if depth:
        raise ValueError(f"a bracket is missing in {query!r}")
    if not metrics:
        raise ValueError(f"no metric in {query!r}")
    return Selectors(metrics, groupings)

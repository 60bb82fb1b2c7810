from __future__ import annotations

import re
import time

import pytest

from legato.worker.weights.name_pattern import NamePattern

NAMES = [
    "lm_head",
    "model.lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.self_attn.o_proj",
    "model.layers.3.mlp.down_proj",
    "model.layers.31.mlp.gate_proj",
    "model.layers.x.mlp.gate_proj",
    "xmodelxlayersx3xmlpx",
    "",
]


def matches(pattern: str, text: str) -> bool:
    return NamePattern(pattern).matches(text)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*lm_head",
        r".*lm_head$",
        r".*self_attn.*",
        r"model\.layers\.\d+\.mlp\..*",
        r".*(q|k|v)_proj",
        r".*mlp\.(gate|up|down)_proj$",
        r".*mlp.gate_proj$",
        r".*layers\.(?:[0-9]|[12][0-9])\.mlp(?:\..*)?$",
        r"model\.layers\.[0-9]{1,2}\.[^.]+\.\w*",
    ],
)
def test_patterns_of_real_configs_match_as_re_does(pattern: str) -> None:
    wanted = [re.match(pattern, name) is not None for name in NAMES]
    assert [matches(pattern, name) for name in NAMES] == wanted
    assert True in wanted
    assert False in wanted


@pytest.mark.parametrize(
    "pattern", [r"^(([a-z0-9._]+)+)+!$", r"((a|aa)+)+!", "(a?){1000}" + "b", "(.*)" * 240 + "!"]
)
def test_hostile_patterns_are_matched_at_once(pattern: str) -> None:
    compiled, started_s = NamePattern(pattern), time.monotonic()
    for name in ("a" * 100, "model.layers.12.self_attn.o_proj" * 3):
        assert not compiled.matches(name)
    assert time.monotonic() - started_s < 10  # of `re`: years


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"missing \)"),
        ("[z-a]", "character class range"),
        ("*", "repetition operator"),
        ("((|||||){1000}){1000}!", "repetition size"),
        (r"^(?!.*lm_head).*", r"operator: \(\?!"),
        (r"(a)\1", r"escape sequence: \\1"),
        ("x\ud800", "surrogates"),
        ("x" * 1001, "has 1001 characters, at most 1000"),
    ],
)
def test_what_is_no_pattern_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamePattern(pattern)

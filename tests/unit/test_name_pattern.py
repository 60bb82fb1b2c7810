from __future__ import annotations

import random
import re
import warnings
from typing import TYPE_CHECKING

import pytest

from legato.worker.weights.name_pattern import NamePattern
from legato.worker.weights.place_sets import Budget, TooManyStepsError

if TYPE_CHECKING:
    from collections.abc import Callable

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
    return NamePattern(pattern).matches(text, Budget())


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
        r"^(?!.*lm_head).*",
        r"model\.layers\.[0-9]{1,2}\.[^.]+\.\w*",
    ],
)
def test_patterns_of_real_configs_match_as_re_does(pattern: str) -> None:
    wanted = [re.match(pattern, name) is not None for name in NAMES]
    assert [matches(pattern, name) for name in NAMES] == wanted
    assert True in wanted
    assert False in wanted


def random_pattern(rng: random.Random, depth: int) -> str:
    atoms = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "[a-c.]", r"\D", "1", r"\s", "\n"]
    if depth == 0:
        return rng.choice(atoms)

    def inner() -> str:
        return random_pattern(rng, depth - 1)

    signs = ["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??"]
    forms: list[Callable[[], str]] = [
        lambda: rng.choice(atoms),
        lambda: inner() + inner(),
        lambda: f"({inner()}|{inner()})",
        lambda: f"(?:{inner()}|)",
        lambda: f"{rng.choice(['(?=', '(?!'])}{inner()}){inner()}",
        lambda: f"{rng.choice('^$')}{inner()}{rng.choice(['', '$'])}",
        lambda: f"(?:{inner()}){rng.choice(signs)}",
        lambda: f"(?:{inner()}){rng.choice(signs)}",
    ]
    return rng.choice(forms)()


def test_random_patterns_match_as_re_does() -> None:
    rng = random.Random(0)
    found = []
    for _ in range(4000):
        pattern = random_pattern(rng, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            theirs = re.compile(pattern)
        ours = NamePattern(pattern)
        for _ in range(5):
            text = "".join(rng.choice("aab.1c\n_") for _ in range(rng.randrange(9)))
            wanted = theirs.match(text) is not None
            assert ours.matches(text, Budget()) == wanted, (pattern, text)
            found.append(wanted)
    assert 2000 < sum(found) < len(found) - 2000


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(([a-z0-9._]+)+)+!$",
        r"(.*.*.*.*)*!",
        r"((((a*)*)*)*)*!",
        r"(a|a)*!",
        r"(a|aa)+!",
        r"(a{0,1000}){1000}!",
        ".*" * 400 + "!",
    ],
)
def test_hostile_patterns_take_few_steps(pattern: str) -> None:
    budget = Budget()
    before = budget.steps
    assert not NamePattern(pattern).matches("a" * 300, budget)
    assert before - budget.steps < 100_000  # `re` would take more than 2 ** 100


@pytest.mark.parametrize("pattern", [r"((|||||){1000}){1000}!", r"((^^^^^){1000}){1000}!"])
def test_what_still_takes_many_is_stopped(pattern: str) -> None:
    with pytest.raises(TooManyStepsError):
        NamePattern(f"(?:(?={pattern}).)*").matches("a" * 50, Budget(steps=1_000_000))


def test_a_huge_name_is_stopped() -> None:
    with pytest.raises(TooManyStepsError):
        NamePattern(r"(?:(?=.*).)*").matches("a" * 1_000_000, Budget())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?P<a>x)", r"\(\?P, which is not supported"),
        ("(?<=a)b", r"\(\?<, which is not supported"),
        ("(?i)a", r"\(\?i, which is not supported"),
        (r"\bx", r"\\b, which is not supported"),
        (r"(a)\1", r"\\1, which is not supported"),
        ("a*+", "possessive"),
        ("a**", "a quantifier of a quantifier"),
        ("*a", r"\*, which cannot stand there, at character 0"),
        ("^*a", "nothing to repeat"),
        ("(a", r"a missing \) at character 2"),
        ("a)", r"an unmatched \) at character 1"),
        ("[a", "an unfinished pattern"),
        ("[b-a]", "a bad range"),
        ("a{x}", "a { that is no quantifier"),
        ("a{5,2}", "least is above its most"),
        ("a{1001}", "a count above 1000"),
        ("a{99999999999999}", "a count above 1000"),
        ("a" * 1001, "1001 characters, at most 1000"),
        ("(" * 21 + ")" * 21, "groups deeper than 20"),
        ("\\", "an unfinished pattern"),
    ],
)
def test_what_is_not_known_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamePattern(pattern)

"""probe_grammar: compiles a grammar in a process of its own, which may hang, grow or end for it.

llguidance bounds much, but not all: some grammars of a few hundred bytes take it minutes and
gigabytes, or have it recurse until the stack is used up, which ends the process.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# They bound the time and the memory of most of what a guide may ask for, also of each mask.
GRAMMAR_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
PROBE_CPU_S = 1
PROBE_BYTES = 1 << 30
_TIMEOUT_S = 10.0  # on a busy machine the processor's second takes longer


def probe_grammar(grammar: str) -> None:
    """Takes a tenth of a second as a rule. What llguidance finds wrong is no matter here.

    Raises:
        ValueError: the grammar is more than can be compiled.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "legato.text.guide_probe"],
            input=grammar.encode("utf-8"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
        compiled = done.returncode == 0
    except subprocess.TimeoutExpired:
        compiled = False
    if not compiled:
        raise ValueError(
            f"it cannot be compiled within the limits of {PROBE_CPU_S} s and {PROBE_BYTES} bytes"
        )


def main() -> None:
    """The process: ends with 0 where the grammar on standard input was dealt with."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (PROBE_CPU_S, PROBE_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (PROBE_BYTES, PROBE_BYTES))
    grammar = sys.stdin.buffer.read().decode("utf-8")
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=GRAMMAR_LIMITS)
    matcher.compute_bitmask()


if __name__ == "__main__":
    main()

"""LocalPrefill: what prompts cost that a decode worker computes itself."""

from __future__ import annotations

from dataclasses import dataclass

# The mean's memory. Few enough that it follows the load, and no single piece decides.
_MEAN_TOKENS = 512
# Whoever finds it too dear does not ask for local prefill, and so it is never measured again.
_FORGOTTEN_AFTER_S = 30.0


@dataclass(frozen=True)
class LocalPrefill:
    """Sums since the engine started, and a running mean."""

    num_steps: int = 0
    num_tokens: int = 0
    _token_s: float = 0.0
    _measured_at_s: float = 0.0

    def after(self, num_tokens: int, step_s: float, now_s: float) -> LocalPrefill:
        """A step of `step_s`, others' tokens included, has computed `num_tokens` of prompts.

        The whole step counts: so long does the prompt wait.
        """
        total = self.num_tokens + num_tokens
        weight = min(1.0, num_tokens / min(total, _MEAN_TOKENS))
        mean = self._token_s + (step_s / num_tokens - self._token_s) * weight
        return LocalPrefill(self.num_steps + 1, total, mean, now_s)

    def token_s_at(self, now_s: float) -> float:
        """Seconds a token; 0 where it was not measured of late."""
        measured = self.num_steps > 0 and now_s - self._measured_at_s < _FORGOTTEN_AFTER_S
        return self._token_s if measured else 0.0

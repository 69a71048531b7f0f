"""How long a row may take before it is given up: from its `max_tokens` and from the rows seen so far. Pure."""

from __future__ import annotations

from collections import deque

_FIRST_S = 300.0  # before anything is seen: an endpoint may still be loading its model
_FIRST_PER_TOKEN_S = 0.25
_LEAST_S = 60.0
_MOST_S = 7200.0
_UNKNOWN_MAX_TOKENS = 4096
_ENOUGH_ROWS = 8
_REFRESH_ROWS = 16


class Deadlines:
    """Seconds that the next request may take.

    A row's latency is its wait plus its tokens times the time per token. The slowest of the last `window` rows, and the
    usual pace for the tokens that a reply may have beyond theirs, times `slack`, bound a row that is merely unlucky.

    Args:
        fixed_s: The user's own limit, which then is the limit.
    """

    def __init__(self, *, fixed_s: float | None = None, window: int = 256, slack: float = 4.0):
        self._fixed_s = fixed_s
        self._slack = slack
        self._seen: deque[tuple[float, int]] = deque(maxlen=window)
        self._news = 0
        self._slowest_s: float | None = None
        self._longest = 0
        self._pace_s = 0.0

    def observe(self, latency_s: float, completion_tokens: int) -> None:
        """Add a row that was answered."""
        self._seen.append((latency_s, completion_tokens))
        self._news += 1
        if len(self._seen) >= _ENOUGH_ROWS and (self._slowest_s is None or self._news >= _REFRESH_ROWS):
            self._news = 0
            self._slowest_s = max(latency_s for latency_s, _ in self._seen)
            self._longest = max(tokens for _, tokens in self._seen)
            # short replies say little about the pace: their latency is nearly all wait
            paces = sorted(s / tokens for s, tokens in self._seen if tokens and 2 * tokens >= self._longest)
            self._pace_s = paces[len(paces) // 2] if paces else 0.0

    def limit_s(self, max_tokens: int | None, *, timeouts: int = 0) -> float:
        """Seconds for the next attempt of a row.

        Args:
            max_tokens: Most tokens its reply can have; `None` when the server decides.
            timeouts: How often it has timed out; each time it gets twice as long.
        """
        if self._fixed_s is not None:
            return self._fixed_s
        tokens = max_tokens or _UNKNOWN_MAX_TOKENS
        if self._slowest_s is None:
            limit_s = _FIRST_S + _FIRST_PER_TOKEN_S * tokens
        else:
            limit_s = self._slack * (self._slowest_s + self._pace_s * max(0, tokens - self._longest))
        return float(min(_MOST_S, max(_LEAST_S, limit_s) * 2**timeouts))

"""How long a row may take before it is given up: from its `max_tokens` and from the rows seen so far. Pure."""

from __future__ import annotations

from collections import deque

_FIRST_S = 300.0  # before anything is seen: an endpoint may still be loading its model
_FIRST_PER_TOKEN_S = 0.25
_LEAST_S = 60.0
_MOST_S = 7200.0
_UNKNOWN_MAX_TOKENS = 4096


class Deadlines:
    """Seconds that the next request may take.

    A row's latency is its wait plus its tokens times the time per token. The slowest wait and the slowest usual pace of
    the last `window` rows, times `slack`, bound a row that is merely unlucky; one that takes longer is lost.

    Args:
        max_tokens: Most tokens a reply can have; `None` when the server decides.
        fixed_s: The user's own limit, which then is the limit.
    """

    def __init__(self, max_tokens: int | None, *, fixed_s: float | None = None, window: int = 256, slack: float = 4.0):
        self._max_tokens = max_tokens
        self._fixed_s = fixed_s
        self._slack = slack
        self._seen: deque[tuple[float, int]] = deque(maxlen=window)
        self._limit_s: float | None = None
        self._since = 0

    def observe(self, latency_s: float, completion_tokens: int) -> None:
        """Add a row that was answered."""
        self._seen.append((latency_s, completion_tokens))
        self._since += 1
        if self._since >= 16 or self._limit_s is None:
            self._since = 0
            self._limit_s = self._estimate() if len(self._seen) >= 8 else None

    def limit_s(self, *, timeouts: int = 0) -> float:
        """Seconds for the next attempt of a row that has timed out `timeouts` times: twice as long each time."""
        if self._fixed_s is not None:
            return self._fixed_s
        tokens = self._max_tokens or _UNKNOWN_MAX_TOKENS
        base = self._limit_s if self._limit_s is not None else _FIRST_S + _FIRST_PER_TOKEN_S * tokens
        return float(min(_MOST_S, base * 2**timeouts))

    def _estimate(self) -> float:
        slowest_s = max(latency_s for latency_s, _ in self._seen)
        longest = max(tokens for _, tokens in self._seen)
        # short replies say little about the pace: their latency is nearly all wait
        paces = sorted(latency_s / tokens for latency_s, tokens in self._seen if tokens and 2 * tokens >= longest)
        pace = paces[len(paces) // 2] if paces else 0.0
        more_tokens = max(0, (self._max_tokens or _UNKNOWN_MAX_TOKENS) - longest)
        return max(_LEAST_S, self._slack * (slowest_s + pace * more_tokens))

"""When an endpoint is away: stop everything but a probe now and then, and say when waiting has no use any more.

An endpoint that cannot be reached is failure, not congestion, so it is no matter of the limit. Pure: the clock is an
argument.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 5
FIRST_PROBE_S = 1.0
LAST_PROBE_S = 30.0


@dataclass(slots=True)
class Breaker:
    """Opens after `FAILURES` unreachable requests in a row, closes with the first answer.

    Attributes:
        stall_timeout_s: Seconds without any answer after which `stalled` is true.
        is_open: Only probes may be sent.
    """

    stall_timeout_s: float
    is_open: bool = False
    _failures: int = 0
    _trouble_s: float | None = None
    _probe_s: float = 0.0
    _probe_wait_s: float = FIRST_PROBE_S

    def record(self, now_s: float, *, answered: int = 0, dropped: int = 0, unreachable: int = 0) -> bool:
        """Take in what became of some requests. True when the endpoint is back after having been away.

        Args:
            answered: Requests with an answer, an error about the row included.
            dropped: Requests turned away; the endpoint lives, but lets nothing through.
            unreachable: Requests refused, reset or timed out.
        """
        if answered:
            was_open, self.is_open = self.is_open, False
            self._failures, self._trouble_s = 0, None
            self._probe_wait_s = FIRST_PROBE_S
            return was_open
        if (dropped or unreachable) and self._trouble_s is None:
            self._trouble_s = now_s
        if dropped:  # turned away by somebody who is there
            was_open, self.is_open, self._failures = self.is_open, False, 0
            return was_open
        self._failures += unreachable
        if self._failures >= FAILURES and not self.is_open:
            self.is_open = True
            self._probe_s = now_s + self._probe_wait_s
        return False

    def take_probe(self, now_s: float) -> bool:
        """True when one request may be sent to find out; the next one is due later and later."""
        if not self.is_open or now_s < self._probe_s:
            return False
        self._probe_wait_s = min(LAST_PROBE_S, 2 * self._probe_wait_s)
        self._probe_s = now_s + self._probe_wait_s
        return True

    def stalled(self, now_s: float) -> bool:
        """True when no request was answered for `stall_timeout_s`, although some were sent."""
        return self._trouble_s is not None and now_s - self._trouble_s >= self.stall_timeout_s

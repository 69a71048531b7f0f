"""The law of the limit on requests in flight: one window's figures and the clock in, a number out.

    limit <- limit + GAMMA * (alpha - share * limit)

`share` is the part of the requests in flight that waits at the server. The law is additive increase, multiplicative
decrease with the queue measured (the form of FAST TCP, https://doi.org/10.1109/TNET.2006.886335). Its fixed point
keeps `alpha` requests of this job waiting: the server never runs dry, others hardly notice, and since all jobs at an
endpoint see the same share, all get the same limit. Nothing here sleeps or reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_provider_raylm.spec import Priority

GAMMA = 0.5
ALPHA: dict[Priority, float] = {"low": 4.0, "normal": 16.0, "high": 64.0}
FIRST_LIMIT = 256
MAX_LIMIT = 8192.0
SAME_LIMIT = 0.85
"""Refusals at limits no further apart than this, one over the other, are of the same ceiling."""
MOST_REPEATS = 6
QUIET_WINDOWS = 3
"""Windows that must look the same before they are believed."""
SETTLE_S = 1.0
"""Requests sent within this time after a change met each other, not the queue that the change leaves."""
QUEUE_S = 1.0
"""Wait in the server's queue above which a job keeps fewer requests waiting."""
SEEN_QUEUE_S = 0.25
"""The same for a job that sees the queue itself: it can keep it shorter without letting the server run dry."""
MIN_ALPHA_SHARE = 0.125
SEEN_MIN_ALPHA_SHARE = 0.0625


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was seen since the last step.

    Attributes:
        now_s: The clock, in seconds; the same clock as `sent_s`.
        share: Waiting share in 0..1, `None` when there is nothing new.
        blind: No source can tell, and none is expected to.
        settled: Those that wait do not just await their first step: no more requests run than a window ago, or most of
            what is in flight waits and the wait does not pass.
        instant: `share` shows the server as it is now (its metrics), not as the ended requests met it.
        sent_s: Median time at which the requests that ended lately had been sent; `None` when none ended.
        used: Largest number in flight over the limit.
        dropped: Requests the server turned away (429, 503).
        latency_s: Mean latency of the requests that ended lately; 0 when none ended.
        work_per_s: Tokens (rows where there are none) finished per second.
        early: Share by the first rows sent after the last change of which something is known; `None` when not known.
            Near 0 it says that there is no queue, long before most of those rows end.
    """

    now_s: float
    share: float | None = None
    blind: bool = False
    settled: bool = False
    instant: bool = False
    sent_s: float | None = None
    used: float = 1.0
    dropped: int = 0
    latency_s: float = 0.0
    work_per_s: float = 0.0
    early: float | None = None


@dataclass(slots=True)
class Plateau:
    """Search for the smallest limit that gives the best throughput, for servers that show nothing else.

    Steps up while throughput may still rise, and looks three steps, a factor of four, past the best one, because
    servers have dips (a batch above the captured CUDA graphs is slower than one below, and a much larger one faster
    again). Then it stays, and looks again after `REST_FLIGHTS` flights.
    """

    STEP = 1.6
    PATIENCE = 3
    ENOUGH = 0.97
    REST_FLIGHTS = 30

    tried: dict[float, float] = field(default_factory=dict)
    resting: int = 0

    def step(self, limit: float, work_per_s: float) -> float:
        """The next limit, given the throughput of one whole flight at `limit`."""
        if self.resting > 0:
            self.resting -= 1
            if self.resting == 0:
                self.tried = {}
            return limit
        self.tried[limit] = work_per_s
        best = max(self.tried.values())
        best_limit = min(at for at, work in self.tried.items() if work >= self.ENOUGH * best)
        past = sum(1 for at in self.tried if at > best_limit)
        if past < self.PATIENCE:
            return max(self.tried) * self.STEP
        if best_limit == min(self.tried) and best_limit > 1:  # the first one tried was enough: is less, too?
            return max(1.0, best_limit / self.STEP)
        self.resting = self.REST_FLIGHTS
        return best_limit


@dataclass(slots=True)
class Limit:
    """The limit of one job on one model of one endpoint.

    Attributes:
        value: The limit; use its floor, at least 1.
        reason: Why it last changed.
    """

    value: float
    started_s: float
    alpha: float = ALPHA["normal"]
    most: float = MAX_LIMIT
    reason: str = "start"
    slow_start: bool = True
    _cut_s: float = field(init=False)
    _grown_s: float = field(init=False)
    _quiet: int = 0
    _held: int = 0
    _ceiling: float = field(default=float("inf"))
    _refused_at: float = field(default=float("inf"))
    _repeats: int = 0
    _free_at: float = 0.0
    _raised: int = 0
    _plateau: Plateau = field(default_factory=Plateau)

    def __post_init__(self) -> None:
        self._cut_s = self._grown_s = self.started_s

    @property
    def changed_s(self) -> float:
        """When the limit last changed."""
        return max(self._cut_s, self._grown_s)

    def rush(self, now_s: float) -> None:
        """Say that many requests have just been sent at once. They meet each other, as after a change."""
        self._grown_s = max(self._grown_s, now_s)

    def step(self, window: Window) -> float:
        """Take one window into account and return the new limit."""
        sent_s = window.sent_s
        flown = sent_s is not None and sent_s >= self.changed_s + SETTLE_S
        if window.dropped:
            if sent_s is None or sent_s >= self._cut_s:
                again = self.value >= SAME_LIMIT * self._refused_at
                self._repeats = min(MOST_REPEATS, self._repeats + 1) if again else 0
                self._ceiling = self._refused_at = self.value
                self._set(0.9 * self.value, window.now_s, "the server turned requests away")
            self.slow_start = False
            self._quiet = 0
        elif self.slow_start and window.early is not None and self._is_quiet(window, window.early):
            self._double(window)
        elif window.share is not None:
            if window.instant or flown or (self.slow_start and window.settled):
                self._follow(window, window.share, flown)
        elif window.blind:
            self._search(window, flown)
        return self.value

    def restart(self, now_s: float) -> None:
        """Begin again after the endpoint was away: it may have come back smaller, or cold."""
        self.slow_start = True
        self._quiet = 0
        self._free_at = 0.0
        self._set(min(self.value, FIRST_LIMIT), now_s, "the endpoint is back")
        self._cut_s = now_s

    def _follow(self, window: Window, share: float, flown: bool) -> None:
        queued = share * self.value
        alpha = self._alpha(window, share)
        if self.slow_start:
            if self._is_quiet(window, share):
                if window.instant or flown:
                    self._double(window)
                return
            self._held = self._held + 1 if window.settled else 0
            if not flown and self._held < QUIET_WINDOWS:  # prompts that were sent together wait for each other
                return
            self.slow_start = False
            if queued > alpha:
                # rows that ended early were short, and make the share too large; what had no queue still has none
                found = max(self.value * (1 - share) + alpha, self._free_at)
                self._set(found, window.now_s, "found the queue")
            return
        self._quiet = self._quiet + 1 if queued < alpha / 4 else 0
        self._raised = self._raised if self._quiet else 0
        change = GAMMA * (alpha - queued)
        if change < 0:
            if window.sent_s is not None and window.sent_s >= self._cut_s:
                self._set(self.value + change, window.now_s, "more waiting than wanted")
        elif window.used >= 0.8:
            if self.value >= 0.9 * self._ceiling:
                careful = 0.5
                if self._quiet >= QUIET_WINDOWS:
                    # the longer no queue shows, the likelier it was a burst that was refused, and not so many
                    doublings = min(4, max(0, self._quiet - 2 * QUIET_WINDOWS))
                    careful = self.value * min(0.25, 0.02 * 2.0**doublings)
                # each refusal costs a pause: a ceiling that stands is looked for ever more slowly
                careful /= 2.0**self._repeats
                self._set(self.value + min(change, careful), window.now_s, "near the last refusal")
                self._ceiling = max(self._ceiling, self.value)
                if self.value > self._refused_at / SAME_LIMIT:
                    self._repeats = 0
            elif self._quiet >= (QUIET_WINDOWS if window.instant else 1):
                self._raised += 1
                self._set(min(2.0, 1.0 + 0.25 * self._raised) * self.value, window.now_s, "no queue for a while")
            else:
                self._set(self.value + change, window.now_s, "fewer waiting than wanted")

    def _is_quiet(self, window: Window, share: float) -> bool:
        return share * self.value < self._alpha(window, share) / 2

    def _double(self, window: Window) -> None:
        if window.used >= 0.8:
            self._free_at = self.value
            self._set(2 * self.value, window.now_s, "no queue yet: doubled")

    def _alpha(self, window: Window, share: float) -> float:
        """Requests to keep waiting: fewer where each of them waits long, since others would wait behind them.

        The wait is the same for all jobs, so their shares stay equal.
        """
        wait_s = share * window.latency_s
        queue_s, least = (SEEN_QUEUE_S, SEEN_MIN_ALPHA_SHARE) if window.instant else (QUEUE_S, MIN_ALPHA_SHARE)
        return self.alpha * max(least, min(1.0, (queue_s / wait_s) ** 2 if wait_s > 0 else 1.0))

    def _search(self, window: Window, flown: bool) -> None:
        if flown and window.used >= 0.8 and window.work_per_s > 0:
            self._set(self._plateau.step(self.value, window.work_per_s), window.now_s, "searching the best throughput")

    def _set(self, value: float, now_s: float, reason: str) -> None:
        value = min(max(value, 1.0), self.most)
        if value == self.value:
            return
        if value < self.value:
            self._cut_s = now_s
        else:
            self._grown_s = now_s
        self.value, self.reason = value, reason

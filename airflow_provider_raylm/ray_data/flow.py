"""Flow control of one job on one model of one endpoint: the law, the signals and the breaker in one place.

Pure: what happened and the clock in, how many requests may start out. `limiter.py` runs it in a process of its own,
`keeper.py` in the actor that all query actors of a job share, the benchmarks in virtual time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_raylm.ray_data.breaker import Breaker
from airflow_provider_raylm.ray_data.contracts import Begun, Sample
from airflow_provider_raylm.ray_data.limit import ALPHA, FIRST_LIMIT, MAX_LIMIT, SETTLE_S, Limit, Window
from airflow_provider_raylm.ray_data.signals import (
    MIN_FIT_ROWS,
    MIN_PROBES,
    OVERHEAD_S,
    Load,
    plausible,
    share_from_beginnings,
    share_from_fit,
    share_from_probes,
)
from airflow_provider_raylm.spec import Priority

TICK_S = 1.0
FRESH_S = 2.5
"""Age in seconds up to which a reading of the server's metrics describes the present."""
SELDOM_S = 4.0
"""Seconds between two readings above which metrics come too late to show what each change of the limit does."""
IN_SIGHT = 0.1
"""Part of this job's requests that engines must hold for their figures to be believed where none can be missing."""
ARRIVED_S = 0.4
"""Time after a change of the limit before the server's metrics can show it."""
PROBES_PER_S = 6.0
STREAMED_TOKENS_PER_S = 600.0
"""Streamed rows, and tokens in them, aimed at. A streamed token costs a client 0.1 ms and Ray Serve LLM about 1 ms in
three processes, of which one is full before the GPU is."""
FIRST_PROBES = 64
"""Streamed rows of the first flight."""
FEW_PROBES = 8
"""Streamed rows in flight while slow start goes on between two readings of metrics that change seldom."""
BUSY_PROXY_S = 0.15
"""What Ray Serve's proxy, ingress and replica may add to a first token when they are busy, besides the queue. Ray's
pages tell soon if it was the queue after all."""
UNSTREAMED_ROWS = 512
"""Rows after which a server that has never streamed one is taken for one that cannot."""
MOSTLY = 0.5
"""Waiting share above which prompts that were sent together do not just wait for each other, unless it falls."""
BLIND_ROWS = 128
BLIND_S = 60.0
"""Rows, and seconds without a waiting share, after which throughput is the only thing left to go by."""
RAMP_S = 1.0
"""Seconds in which a server that turned requests away is filled again."""
LAGGING_S = 0.5
"""Lag of the client's event loop above which more requests in flight cannot help."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running totals of one sender. Totals, not differences: a lost or repeated report then does no harm."""

    success: int = 0
    ignore: int = 0
    dropped: int = 0
    unreachable: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rows: int = 0
    errors: int = 0
    resumed: int = 0

    def add(self, sample: Sample) -> None:
        """Count one request that ended."""
        setattr(self, sample.outcome, getattr(self, sample.outcome) + 1)
        self.prompt_tokens += sample.prompt_tokens
        self.completion_tokens += sample.completion_tokens

    def minus(self, other: Tally) -> Tally:
        """What was added since `other`."""
        return Tally(**{name: getattr(self, name) - getattr(other, name) for name in self.__slots__})

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(slots=True)
class Flow:
    """How many requests one job may have in flight, and why.

    Attributes:
        started_s: The clock now; all other times come from the same clock.
        first_limit: Where the limit starts; at most `FIRST_LIMIT`.
        priority: Requests to keep waiting at the server.
        members: Independent controllers that share that number, this one included.
        stall_timeout_s: See `Breaker`.
        total: Everything counted so far.
        signal: Where the waiting share came from: `metrics`, `ttft`, `fit`, `throughput`, or `none` yet.
        share: The last waiting share, `None` if not known.
        network_s: Seconds a packet takes to the endpoint and back, measured apart from its queue.
        loop_lag_s: Seconds by which the client's event loop is late.
    """

    started_s: float
    first_limit: int = FIRST_LIMIT
    priority: Priority = "normal"
    members: int = 1
    stall_timeout_s: float = 900.0
    total: Tally = field(default_factory=Tally)
    signal: str = "none"
    share: float | None = None
    network_s: float = 0.0
    loop_lag_s: float = 0.0
    _every_s: float = TICK_S
    _lately_in_flight: deque[int] = field(default_factory=lambda: deque([0], maxlen=4))
    _limit: Limit = field(init=False)
    _breaker: Breaker = field(init=False)
    _samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=512))
    _begun: deque[Begun] = field(default_factory=lambda: deque(maxlen=2 * MIN_PROBES))
    _share_s: float = -math.inf
    _load: Load | None = None
    _load_s: float = -math.inf
    _running: float = math.inf
    _load_is_new: bool = False
    _pause_until_s: float = -math.inf
    _refused_s: float = -math.inf
    _refused_at: int = 0
    _dropped: int = 0
    _peak: int = 0
    _in_flight: int = 0
    _rows_per_s: float = 0.0
    _tokens_per_s: float = 0.0
    _last_tick_s: float = field(init=False)
    _last_total: Tally = field(default_factory=Tally)
    _first_sent_s: float = math.inf
    _last_done_s: float = -math.inf
    _asked: int = 0
    _probes_seen: bool = False

    def __post_init__(self) -> None:
        start = float(max(1, min(self.first_limit, FIRST_LIMIT)))
        self._limit = Limit(start, self.started_s, alpha=ALPHA[self.priority] / self.members, most=MAX_LIMIT)
        self._breaker = Breaker(self.stall_timeout_s)
        self._last_tick_s = self.started_s

    @property
    def limit(self) -> int:
        """Requests this job may have in flight."""
        return int(self._limit.value)

    def add(self, now_s: float, counted: Tally, samples: Sequence[Sample], retry_after_s: float = 0.0) -> None:
        """Take in requests that ended.

        Args:
            now_s: The clock.
            counted: How many ended how, since the last call.
            samples: Some of them, drawn without regard to their length, in this clock.
            retry_after_s: Seconds for which the server wants to be left alone.
        """
        self.total = self.total.plus(counted)
        self._samples.extend(samples)
        self._first_sent_s = min([self._first_sent_s, *(s.sent_s for s in samples)])
        self._last_done_s = max([self._last_done_s, *(s.done_s for s in samples)])
        self._probes_seen = self._probes_seen or any(s.ttft_s is not None for s in samples)
        self._dropped += counted.dropped
        if counted.dropped:
            self._pause_until_s = max(self._pause_until_s, now_s + retry_after_s)
            self._refused_s, self._refused_at = now_s, self._in_flight
        if self._breaker.record(
            now_s,
            answered=counted.success + counted.ignore,
            dropped=counted.dropped,
            unreachable=counted.unreachable,
        ):
            self._limit.restart(now_s)

    def begun(self, requests: Sequence[Begun]) -> None:
        """Take in streamed requests whose first tokens have come, in this clock."""
        self._begun.extend(requests)

    def expect(self, now_s: float, every_s: float) -> None:
        """Say that the server's metrics can be read, and change every so many seconds.

        Until the first change, and from one to the next, the limit waits for them. What is timed from here instead
        cannot tell the server's queue from a busy proxy before it, which more requests in flight do not make longer.
        Only where that shows no queue at all does slow start go on without them.
        """
        if every_s != self._every_s:
            self._every_s, self._load_s = every_s, now_s

    @property
    def _seldom(self) -> bool:
        return self._every_s > SELDOM_S

    @property
    def _fresh_s(self) -> float:
        """Age up to which a reading is gone by."""
        return max(FRESH_S, 2.5 * self._every_s)

    def see(self, taken_s: float, load: Load) -> None:
        """Take in a reading of the server's metrics.

        Args:
            taken_s: The clock when it was taken, at the earliest.
            load: What it says. Where the engines hold less than what is in flight, though none of them is missing, the
                rest is held up on its way to them, by a busy proxy say. No queue of theirs then means nothing, and the
                limit stays.
        """
        in_network = self._rows_per_s * (self.network_s + OVERHEAD_S)
        # a page that changes seldom is read a few seconds after it did
        in_flight = min(self._lately_in_flight) if self._seldom else self._in_flight
        if plausible(load, in_flight=in_flight, in_network=in_network):
            self._load, self._load_s, self._load_is_new = load, taken_s, True
        elif load.whole and load.waiting + load.running >= IN_SIGHT * in_flight:
            self._load, self._load_s, self._load_is_new = load, taken_s, load.waiting > 0

    def holds(self, in_flight: int) -> None:
        """Say how many requests are in flight now."""
        self._in_flight = in_flight
        self._peak = max(self._peak, in_flight)

    def free(self, now_s: float) -> int:
        """How many more requests may start now. While the endpoint is away: one, when a probe is due."""
        if now_s < self._pause_until_s:
            self._refused_at = self._in_flight
            return 0
        if self._breaker.is_open:
            return int(self._breaker.take_probe(now_s))
        return max(0, min(self.limit, self._ramp(now_s)) - self._in_flight)

    def _ramp(self, now_s: float) -> int:
        """After a refusal the server is filled again little by little: a rush would be turned away too."""
        done = (now_s - max(self._refused_s, self._pause_until_s)) / RAMP_S
        return self.limit if done >= 1 else int(self._refused_at + done * max(0, self.limit - self._refused_at))

    def stalled(self, now_s: float) -> bool:
        """True when the endpoint has let nothing through for the whole stall limit."""
        return self._breaker.stalled(now_s)

    @property
    def away(self) -> bool:
        """True while only probes may be sent."""
        return self._breaker.is_open

    def paused_s(self, now_s: float) -> float:
        """Seconds left of a pause the server asked for."""
        return max(0.0, self._pause_until_s - now_s)

    def take_up(self, now_s: float, limit: int) -> None:
        """Go on from a limit found earlier."""
        self._limit = Limit(float(limit), now_s, alpha=self._limit.alpha, slow_start=False, reason="taken up")

    def stream_every(self, now_s: float) -> int:
        """Every so manieth request should be streamed, to measure its time to first token; 0 for none."""
        if self.total.success > UNSTREAMED_ROWS and not self._probes_seen:
            return 0
        if now_s - self._load_s <= max(2 * FRESH_S, self._fresh_s):
            return max(1, self.limit // FEW_PROBES) if self._seldom and self._limit.slow_start else 0
        if not self.total.success:
            return max(1, self.limit // FIRST_PROBES)
        tokens = max(1.0, self.total.completion_tokens / self.total.success)
        return max(1, round(self._rows_per_s / min(PROBES_PER_S, STREAMED_TOKENS_PER_S / tokens)))

    def wants_stream(self, now_s: float) -> bool:
        """True when the next request should be streamed."""
        every = self.stream_every(now_s)
        self._asked += 1
        return every > 0 and self._asked % every == 0

    def tick(self, now_s: float) -> dict[str, Any]:
        """Adjust the limit. Call it every `TICK_S`.

        Returns:
            One row of the trace.
        """
        self._measure_rates(now_s)
        if self._in_flight > 2 * max(self._lately_in_flight):
            self._limit.rush(now_s - TICK_S)
        self._lately_in_flight.append(self._in_flight)
        if not self._breaker.is_open:
            self._limit.step(self._window(now_s))
        self._dropped, self._peak, self._load_is_new = 0, self._in_flight, False
        return self.status(now_s)

    def status(self, now_s: float) -> dict[str, Any]:
        """Limit, signal, rates and totals at this moment, as JSON values.

        `elapsed_s` counts from the start of flow control, `asking_s` from the first request to the last reply so far.
        """
        state = "away" if self._breaker.is_open else "paused" if now_s < self._pause_until_s else "running"
        return {
            "elapsed_s": round(now_s - self.started_s, 3),
            "asking_s": round(max(0.0, self._last_done_s - self._first_sent_s), 3),
            "state": state,
            "limit": self.limit,
            "in_flight": self._in_flight,
            "signal": self.signal,
            "waiting_share": None if self.share is None else round(self.share, 4),
            "reason": self._limit.reason,
            "rows": self.total.rows,
            "errors": self.total.errors,
            "resumed": self.total.resumed,
            "dropped": self.total.dropped,
            "unreachable": self.total.unreachable,
            "prompt_tokens": self.total.prompt_tokens,
            "completion_tokens": self.total.completion_tokens,
            "rows_per_s": round(self._rows_per_s, 2),
            "completion_tokens_per_s": round(self._tokens_per_s, 1),
            "loop_lag_s": round(self.loop_lag_s, 4),
        }

    def _measure_rates(self, now_s: float) -> None:
        new = self.total.minus(self._last_total)
        elapsed = now_s - self._last_tick_s
        if elapsed <= 0:
            return
        weight = 1 - math.exp(-elapsed / 5.0)
        ended = new.success + new.ignore
        self._rows_per_s += weight * (ended / elapsed - self._rows_per_s)
        self._tokens_per_s += weight * (new.completion_tokens / elapsed - self._tokens_per_s)
        self._last_total, self._last_tick_s = self.total, now_s

    def _window(self, now_s: float) -> Window:
        successes = [s for s in self._samples if s.outcome == "success"]
        recent = _lately(now_s, successes, 2.0, 16)
        latency_s = statistics.fmean(s.done_s - s.sent_s for s in recent) if recent else 0.0
        overhead_s = OVERHEAD_S + self.network_s + self.loop_lag_s
        share: float | None = None
        basis, blind, settled = recent, False, False
        if now_s - self._load_s <= self._fresh_s:
            if self._load is not None and self._load_is_new and self._load_s >= self._limit.changed_s + ARRIVED_S:
                share, self.signal = self._load.waiting_share, "metrics"
                settled = self._load.running <= 1.02 * self._running + 1
                self._running = self._load.running
        else:
            probes = sorted((s for s in successes if s.ttft_s is not None), key=lambda s: s.sent_s)[-2 * MIN_PROBES :]
            since = [s for s in probes if s.sent_s >= self._limit.changed_s + SETTLE_S]
            probes = since if len(since) >= MIN_PROBES else probes
            rows = _lately(now_s, successes, 2.0, 2 * MIN_FIT_ROWS)
            if (share := share_from_probes(probes, latency_s=latency_s, overhead_s=overhead_s)) is not None:
                basis, self.signal = probes, "ttft"
                settled = share > MOSTLY and share >= (self.share or 0.0)
            elif (share := share_from_fit(rows, overhead_s=overhead_s)) is not None:
                basis, self.signal = rows, "fit"
            elif self.total.success > BLIND_ROWS and now_s - self._share_s > BLIND_S:
                blind, self.signal, self.share = True, "throughput", None
        if share is not None:
            self.share, self._share_s = share, now_s
        return Window(
            now_s=now_s,
            share=share,
            blind=blind,
            settled=settled,
            instant=self.signal == "metrics" and (self._limit.slow_start or not self._seldom),
            sent_s=statistics.median(s.sent_s for s in basis) if basis else None,
            used=0.0 if self.loop_lag_s > LAGGING_S else self._peak / max(1, self.limit),
            dropped=self._dropped,
            latency_s=latency_s,
            work_per_s=self._tokens_per_s or self._rows_per_s,
            early=self._early(now_s, successes, latency_s, overhead_s),
        )

    def _early(self, now_s: float, successes: Sequence[Sample], latency_s: float, overhead_s: float) -> float | None:
        """Share by rows sent since the last change: streamed ones that still run, and short ones that ended.

        The smaller one counts: that no queue shows in one of them is news, that one shows may be its delay on the way.
        `None` where the server's metrics say it better.
        """
        queue_seen = self._load is not None and self._load.waiting > 0
        if now_s - self._load_s <= (FRESH_S if self._seldom else self._fresh_s) and (queue_seen or not self._seldom):
            return None
        overhead_s += BUSY_PROXY_S if self._seldom else 0.0
        since_s = self._limit.changed_s + SETTLE_S
        shares = [share_from_fit([s for s in successes if s.sent_s >= since_s], overhead_s=overhead_s)]
        if begun := [b for b in self._begun if b.sent_s >= since_s]:
            typical_s = latency_s or now_s - begun[0].sent_s
            shares.append(share_from_beginnings(begun, latency_s=typical_s, overhead_s=overhead_s))
        return min((share for share in shares if share is not None), default=None)


def _lately(now_s: float, samples: list[Sample], seconds: float, least: int) -> list[Sample]:
    """Samples that ended in the last `seconds`, or the last `least` if those are more."""
    fresh = sum(1 for s in samples if s.done_s >= now_s - seconds)
    return samples[-max(fresh, least) :]

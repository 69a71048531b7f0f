"""Flow control against simulated engines in virtual time: minutes of load in a second, the same every time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from airflow_provider_raylm.ray_data.contracts import Begun, Outcome, Sample
from airflow_provider_raylm.ray_data.flow import Flow, Tally
from airflow_provider_raylm.ray_data.signals import Load
from benchmarks.engine import Engine, Request, Shape
from benchmarks.workload import Mix

BEGINNING = 8
"""Tokens of a stream by which its pace is known."""


class Controller(Protocol):
    """What decides how many requests a job has in flight. `Flow` is one; `Fixed` another."""

    def free(self, now_s: float) -> int: ...
    def holds(self, in_flight: int) -> None: ...
    def wants_stream(self, now_s: float) -> bool: ...
    def add(self, now_s: float, counted: Tally, samples: Sequence[Sample], retry_after_s: float = 0.0) -> None: ...
    def see(self, now_s: float, load: Load) -> None: ...
    def tick(self, now_s: float) -> dict[str, Any]: ...


@dataclass
class Fixed:
    """A limit that somebody has set by hand."""

    limit: int
    in_flight: int = 0

    def free(self, now_s: float) -> int:
        return self.limit - self.in_flight

    def holds(self, in_flight: int) -> None:
        self.in_flight = in_flight

    def wants_stream(self, now_s: float) -> bool:
        return False

    def add(self, now_s: float, counted: Tally, samples: Sequence[Sample], retry_after_s: float = 0.0) -> None:
        pass

    def see(self, now_s: float, load: Load) -> None:
        pass

    def tick(self, now_s: float) -> dict[str, Any]:
        return {"limit": self.limit, "in_flight": self.in_flight, "elapsed_s": now_s}


@dataclass
class Job:
    """One job: its controller and its rows. Rows turned away or cut off are sent again."""

    flow: Controller
    rows: Iterator[tuple[int, int]]
    start_s: float = 0.0
    stop_s: float = float("inf")
    holds_while_waiting: bool = False
    signals: str = "metrics ttft fit"
    in_flight: int = 0
    done: int = 0
    streamed: int = 0
    tokens: int = 0
    retries: list[tuple[int, int]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)

    def next_row(self) -> tuple[int, int] | None:
        """A row to send, `None` when there are none left."""
        return self.retries.pop() if self.retries else next(self.rows, None)


@dataclass
class _Sent:
    job: Job
    row: tuple[int, int]
    sent_s: float
    stream: bool
    cut: bool
    first_s: float | None = None


@dataclass
class Replay:
    """A simulated endpoint and the jobs that use it.

    Attributes:
        served: Tokens generated up to each whole second of virtual time.
        waits: `(second, seconds to first token)` of the interactive user's requests.
    """

    shape: Shape
    jobs: list[Job]
    seed: int = 0
    interactive_per_s: float = 0.0
    now_s: float = 0.0
    served: list[int] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    queue: list[tuple[float, float]] = field(default_factory=list)
    _engines: list[Engine] = field(default_factory=list)
    _busy: set[int] = field(default_factory=set)
    _front_free_s: float = 0.0
    _reported: Load | None = None
    _in_service: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _serial: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._in_service = self.shape.replicas
        most = max([self.shape.replicas, *(n for _, n in self.shape.changes)])
        self._engines = [Engine(self.shape) for _ in range(most)]
        for at, replicas in self.shape.changes:
            self._at(at, lambda n=replicas: self._change(n))
        for job in self.jobs:
            self._at(job.start_s, lambda j=job: self._start(j))
        self._at(0.0, self._second)
        if self.shape.report_s:
            self._at(0.5, self._report)
        if self.interactive_per_s:
            self._at(0.0, self._interactive)

    def run(self, until_s: float) -> Replay:
        """Run on to `until_s`."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self

    def tokens_per_s(self, from_s: int, to_s: int) -> float:
        """Tokens the endpoint generated per second in that time."""
        return (self.served[to_s] - self.served[from_s]) / (to_s - from_s)

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (when_s, self._serial, event))

    def _second(self) -> None:
        self.served.append(sum(e.tokens for e in self._engines))
        self.queue.append((sum(e.gauge[0] for e in self._engines), sum(e.gauge[1] for e in self._engines)))
        self._at(self.now_s + 1.0, self._second)

    def _start(self, job: Job) -> None:
        if isinstance(job.flow, Flow):
            job.flow.network_s = self.shape.network_s  # as `limiter.watch` measures it
        self._fill(job)
        self._at(self.now_s + 1.0, lambda: self._tick(job))

    def _tick(self, job: Job) -> None:
        if "metrics" in job.signals and self.shape.report_s:
            self._tell(job)
        elif "metrics" in job.signals:
            engines = self._engines[: self._in_service]
            if self.shape.metrics == "one":
                engines = engines[:1]
            if self.shape.metrics != "none":
                job.flow.see(self.now_s, Load(sum(e.gauge[0] for e in engines), sum(e.gauge[1] for e in engines)))
        job.trace.append(job.flow.tick(self.now_s))
        self._fill(job)
        self._at(self.now_s + 1.0, lambda: self._tick(job))

    def _tell(self, job: Job) -> None:
        """What Ray's pages show, as `limiter.watch` hands it on: when it was reported, and up to a second late."""
        if isinstance(job.flow, Flow):
            job.flow.expect(self.now_s, self.shape.report_s)
        if self._reported and int(self.now_s) % max(1, int(self.shape.report_s)) == 0:
            job.flow.see(self.now_s - 1.0, self._reported)

    def _report(self) -> None:
        waiting, running = (sum(e.gauge[i] for e in self._engines) for i in (0, 1))
        self._reported = Load(waiting, running, whole=True)
        self._at(self.now_s + self.shape.report_s, self._report)

    def _through_front(self, milliseconds: float) -> float:
        """When the process before the engines is done with something that takes it so long."""
        self._front_free_s = max(self.now_s, self._front_free_s) + milliseconds / 1000
        return self._front_free_s

    def _fill(self, job: Job) -> None:
        if self.now_s >= job.stop_s:
            return
        free = job.flow.free(self.now_s)
        while free > 0 and (row := job.next_row()) is not None:
            sent = _Sent(
                job=job,
                row=row,
                sent_s=self.now_s,
                stream=job.flow.wants_stream(self.now_s) and "ttft" in job.signals,
                cut=self._rng.random() < self.shape.hangup,
            )
            job.in_flight += 1
            job.streamed += sent.stream
            job.flow.holds(job.in_flight)
            self._at(self.now_s + self.shape.network_s / 2, lambda s=sent: self._arrive(s))
            free -= 1

    @property
    def _away(self) -> bool:
        return self._in_service == 0

    def _arrive(self, sent: _Sent) -> None:
        if self._away:
            self._later(sent, "unreachable")
            return
        engine = min(self._engines[: self._in_service], key=lambda e: e.load)
        if self.shape.reject_above is not None and len(engine.waiting) >= self.shape.reject_above:
            self._later(sent, "dropped")
            return
        request = Request(sent.row[0], sent.row[1], owner=sent)
        if self.shape.front_ms:
            self._at(self._through_front(self.shape.front_ms / 2), lambda: self._submit(engine, request))
        else:
            self._submit(engine, request)

    def _submit(self, engine: Engine, request: Request) -> None:
        engine.submit(request)
        if id(engine) not in self._busy:
            self._busy.add(id(engine))
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        seconds, first, done = engine.step()
        self._at(self.now_s + seconds, lambda: self._stepped(engine, seconds, first, done))

    def _stepped(self, engine: Engine, step_s: float, first: list[Request], done: list[Request]) -> None:
        for request in first:
            if isinstance(request.owner, float):
                self.waits.append((self.now_s, self.now_s - request.owner))
            else:
                request.owner.first_s = self.now_s + self.shape.network_s / 2
                if request.owner.stream and request.completion_tokens > BEGINNING:
                    begun_s = request.owner.first_s + (BEGINNING - 1) * step_s
                    self._at(begun_s, lambda r=request: self._begun(r.owner, step_s))
                if request.owner.cut:
                    engine.cancel(request)
                    self._later(request.owner, "unreachable")
        for request in done:
            if not isinstance(request.owner, float) and not request.owner.cut:
                self._later(request.owner, "success")
        if engine.load and engine in self._engines[: self._in_service]:
            self._step(engine)
        else:
            self._busy.discard(id(engine))

    def _begun(self, sent: _Sent, step_s: float) -> None:
        if isinstance(sent.job.flow, Flow) and sent.first_s is not None:
            sent.job.flow.begun([Begun(sent.sent_s, sent.first_s - sent.sent_s, step_s)])

    def _later(self, sent: _Sent, outcome: Outcome) -> None:
        streamed = sent.row[1] if sent.stream else 0
        done_s = self._through_front(self.shape.front_ms / 2 + self.shape.chunk_ms * streamed)
        self._at(done_s + self.shape.network_s / 2, lambda: self._ended(sent, outcome))

    def _ended(self, sent: _Sent, outcome: Outcome) -> None:
        job = sent.job
        success = outcome == "success"
        if success:
            job.done += 1
            job.tokens += sent.row[1]
        else:
            again_s = self.now_s + (self.shape.retry_after_s or 0.0) + self._rng.random()
            self._at(again_s, lambda: self._again(job, sent.row))
        if success or not job.holds_while_waiting:
            job.in_flight -= 1
        fit = success and "fit" in job.signals
        sample = Sample(
            sent_s=sent.sent_s,
            done_s=self.now_s,
            outcome=outcome,
            prompt_tokens=sent.row[0] if fit else 0,
            completion_tokens=sent.row[1] if fit else 0,
            ttft_s=sent.first_s - sent.sent_s if success and sent.stream and sent.first_s is not None else None,
            retry_after_s=self.shape.retry_after_s if outcome == "dropped" else None,
        )
        tally = Tally(rows=int(success))
        tally.add(sample)
        job.flow.holds(job.in_flight)
        job.flow.add(self.now_s, tally, [sample], sample.retry_after_s or 0.0)
        self._fill(job)

    def _again(self, job: Job, row: tuple[int, int]) -> None:
        job.retries.append(row)
        if job.holds_while_waiting:
            job.in_flight -= 1
            job.flow.holds(job.in_flight)
        self._fill(job)

    def _interactive(self) -> None:
        engine = min(self._engines[: self._in_service], key=lambda e: e.load, default=None)
        if engine is not None:
            self._submit(engine, Request(100, 100, owner=self.now_s))
        self._at(self.now_s + self._rng.expovariate(self.interactive_per_s), self._interactive)

    def _change(self, replicas: int) -> None:
        gone = self._engines[replicas : self._in_service]
        self._in_service = replicas
        for engine in gone:
            for request in [*engine.waiting, *engine.running]:
                if not request.cancelled:
                    engine.cancel(request)
                    if not isinstance(request.owner, float):
                        self._later(request.owner, "unreachable")
            engine.waiting.clear()


def job(mix: Mix, *, seed: int = 0, start_s: float = 0.0, signals: str = "metrics ttft fit", **flow: Any) -> Job:
    """A job under flow control."""
    return Job(Flow(start_s, **flow), mix.rows(seed), start_s=start_s, signals=signals)


def fixed(mix: Mix, limit: int, *, seed: int = 0) -> Job:
    """A job with a fixed limit."""
    return Job(Fixed(limit), mix.rows(seed), holds_while_waiting=True)

"""A continuous-batching engine, step by step, the way vLLM's scheduler works. No clock, no I/O.

One step of the model takes `base + per_seq x decoding + per_prefill x prompt tokens` milliseconds. Running sequences
come first, then prompts in the order of arrival, in chunks, as far as the token budget, the number of sequences and the
KV cache allow. When the KV cache is full the sequence admitted last is preempted and computes its tokens again later.
`server.py` runs it in real time behind HTTP, `replay.py` in virtual time.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a simulated endpoint is like.

    Attributes:
        max_num_seqs: Sequences one replica runs at once.
        kv_tokens: Tokens its KV cache holds.
        replicas: Engines behind the endpoint; a request goes to the one with fewest requests.
        base_ms, per_seq_ms, per_prefill_ms: Cost of one step.
        budget: Tokens a step may process.
        reject_above: Requests waiting at a replica above which it answers 429; `None` never does.
        retry_after_s: `Retry-After` of those replies; `None` sends none.
        network_s: Round trip to the endpoint.
        hangup: Share of requests whose connection is cut half-way.
        changes: `(second, replicas)`: the number of replicas in service from then on.
        metrics: Whether `/metrics` shows all replicas, one of them, or nothing.
        report_s: Seconds between two reports to Ray's metrics pages; 0 where the engines' own page is read.
        front_ms: Time of the one process before the engines for each request, half of it on the way back.
        chunk_ms: Its time for each streamed token.
    """

    name: str
    max_num_seqs: int = 256
    kv_tokens: int = 4_000_000
    replicas: int = 1
    base_ms: float = 10.0
    per_seq_ms: float = 0.02
    per_prefill_ms: float = 0.008
    budget: int = 2048
    reject_above: int | None = None
    retry_after_s: float | None = None
    network_s: float = 0.002
    hangup: float = 0.0
    changes: tuple[tuple[float, int], ...] = ()
    metrics: str = "all"
    report_s: float = 0.0
    front_ms: float = 0.0
    chunk_ms: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One request in an engine. `owner` is the caller's."""

    prompt_tokens: int
    completion_tokens: int
    owner: Any = None
    generated: int = 0
    to_prefill: int = 0
    joined: int = 0
    cancelled: bool = False
    epoch: int = 0


@dataclass(slots=True)
class Engine:
    """One replica. `step()` performs one step and returns how long it took and what ended in it."""

    shape: Shape
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: deque[Request] = field(default_factory=deque)
    running: dict[Request, None] = field(default_factory=dict)
    decoding: int = 0
    steps: int = 0
    kv_used: int = 0
    preempted: int = 0
    tokens: int = 0
    gauge: tuple[int, int] = (0, 0)
    _ends: list[tuple[int, int, int, Request]] = field(default_factory=list)
    _serial: int = 0

    @property
    def load(self) -> int:
        """Requests here, waiting or running."""
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        request.to_prefill = request.prompt_tokens + request.generated
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request whose client has gone."""
        if request in self.running:
            self._leave(request)
        request.cancelled = True

    def step(self) -> tuple[float, list[Request], list[Request]]:
        """Perform one step.

        Returns:
            Seconds it took, requests whose first token came, and requests that are finished.
        """
        shape = self.shape
        while self.kv_used + self.decoding > shape.kv_tokens and len(self.running) > 1:
            self._preempt()
        decoding = self.decoding
        budget = shape.budget - decoding
        prefilled = 0
        ready: list[Request] = []
        while budget > 0:
            if self.prefilling:
                request = self.prefilling[0]
            else:
                while self.waiting and self.waiting[0].cancelled:
                    self.waiting.popleft()
                if not self.waiting or len(self.running) >= shape.max_num_seqs:
                    break
                if self.kv_used + decoding + self.waiting[0].to_prefill > shape.kv_tokens and self.running:
                    break
                request = self.waiting.popleft()
                self.running[request] = None
                self.prefilling.append(request)
            chunk = min(budget, request.to_prefill)
            request.to_prefill -= chunk
            budget -= chunk
            prefilled += chunk
            self.kv_used += chunk
            if request.to_prefill == 0:
                self.prefilling.popleft()
                ready.append(request)
        self.steps += 1
        self.kv_used += decoding
        self.tokens += decoding + len(ready)
        first = [r for r in ready if r.generated == 0]
        for request in ready:
            request.joined = self.steps
            request.generated += 1
            self._serial += 1
            heapq.heappush(
                self._ends,
                (
                    self.steps + request.completion_tokens - request.generated,
                    self._serial,
                    request.epoch,
                    request,
                ),
            )
        self.decoding += len(ready)
        done: list[Request] = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, _, epoch, request = heapq.heappop(self._ends)
            if epoch == request.epoch and request in self.running:
                self._leave(request)
                done.append(request)
        self.gauge = len(self.waiting), len(self.running)  # what came during the step is not seen yet, as in vLLM
        seconds = (shape.base_ms + shape.per_seq_ms * decoding + shape.per_prefill_ms * prefilled) / 1000
        return seconds, first, done

    def _preempt(self) -> None:
        request = next(reversed(self.running))
        self._leave(request)
        request.to_prefill = request.prompt_tokens + request.generated
        self.waiting.appendleft(request)
        self.preempted += 1

    def _leave(self, request: Request) -> None:
        request.epoch += 1
        if request in self.prefilling:
            self.prefilling.remove(request)
            self.kv_used -= request.prompt_tokens + request.generated - request.to_prefill
        else:
            request.generated += self.steps - request.joined
            self.kv_used -= request.prompt_tokens + request.generated - 1  # the last token is not in the cache yet
            self.decoding -= 1
        del self.running[request]

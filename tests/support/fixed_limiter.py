"""A limiter that grants a fixed number of slots, and remembers what it was told."""

from __future__ import annotations

import asyncio

from airflow_provider_raylm.ray_data.contracts import Begun, Sample


class FixedLimiter:
    """`contracts.Limiter` with a limit that never moves.

    Args:
        limit: Slots.
        stream: Every request is a probe.
    """

    def __init__(self, limit: int, *, stream: bool = False, window: int | None = None) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._stream = stream
        self._window = window or 16 * limit
        self.held = 0
        self.most_held = 0
        self.samples: list[Sample] = []
        self.beginnings: list[Begun] = []
        self.rows = 0
        self.errors = 0
        self.resumed = 0
        self.closed = False

    async def acquire(self) -> bool:
        await self._slots.acquire()
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        return self._stream

    def release(self, sample: Sample) -> None:
        self.held -= 1
        self.samples.append(sample)
        self._slots.release()

    def begun(self, request: Begun) -> None:
        self.beginnings.append(request)

    def count(self, *, rows: int = 0, errors: int = 0, resumed: int = 0) -> None:
        self.rows += rows
        self.errors += errors
        self.resumed += resumed

    async def flush(self) -> None:
        pass

    @property
    def window(self) -> int:
        return self._window

    async def close(self) -> None:
        self.closed = True

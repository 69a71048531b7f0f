"""The seams inside the query job: who may hold a slot, and where finished replies are kept.

`engine.py` (rows in, rows out) knows only these; `limiter.py`/`keeper.py` (flow control) and `journal.py` (resume)
stand behind them. Each can be tested, replaced or left out alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

BLOCK_COL = "_raylm_block"
"""int64 column: which input block a row came from. Present between source and sink only."""
ROW_COL = "_raylm_row"
"""int64 column: position of the row in its input block."""

Outcome = Literal["success", "ignore", "dropped", "unreachable"]
"""`success` counts for capacity; `ignore` says nothing about it (HTTP 400); `dropped` is the server asking for less
(429, 503); `unreachable` is failure, not congestion (timeout, refused, reset)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that ended, as flow control sees it.

    Attributes:
        sent_s, done_s: `time.monotonic()` of the process that sent it, in seconds.
        outcome: See `Outcome`.
        prompt_tokens, completion_tokens: As the server reported; 0 when it did not.
        ttft_s: Seconds to the first streamed token; `None` when not streamed.
        retry_after_s: What a `dropped` reply asked for, in seconds, in which the limiter lets nothing start.
    """

    sent_s: float
    done_s: float
    outcome: Outcome
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A streamed request whose first tokens have come; its end may be minutes away.

    Attributes:
        sent_s: `time.monotonic()` of the process that sent it, in seconds.
        ttft_s: Seconds to the first token.
        step_s: Seconds from one token to the next.
    """

    sent_s: float
    ttft_s: float
    step_s: float


OnBegun = Callable[[float, float], None]
"""Called while a stream runs, with the seconds to its first token and from one token to the next."""


class Limiter(Protocol):
    """One actor's share of the job's limit on requests in flight. All methods run on the actor's event loop."""

    async def acquire(self) -> bool:
        """Wait for a slot. True when this request should be streamed, to measure its time to first token.

        Raises:
            TransientEndpointError: The endpoint has refused or been unreachable for the whole stall limit.
        """
        ...

    def release(self, sample: Sample) -> None:
        """Give the slot back with what became of the request. Call it before any back-off sleep. Never blocks."""
        ...

    def begun(self, request: Begun) -> None:
        """The first tokens of a streamed request have come. Never blocks."""
        ...

    def count(self, *, rows: int = 0, errors: int = 0, resumed: int = 0) -> None:
        """Add finished rows to the job's progress (`rows` includes `errors` and `resumed`)."""
        ...

    async def flush(self) -> None:
        """Return when all that was counted has been passed on, or cannot be."""
        ...

    @property
    def window(self) -> int:
        """Most rows that may be started ahead of the oldest unfinished one."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...


class ReplyStore(Protocol):
    """Replies that are stored already, by input block and row. Threads of one actor share it."""

    def load(self, block: int) -> dict[int, dict[str, Any]]:
        """Replies of one input block, `{row: output struct as a dict}`; empty when there are none."""
        ...

    def append(self, block: int, row: int, reply: dict[str, Any]) -> None:
        """Keep a finished reply; stored within about two seconds. Never blocks on the store."""
        ...

    def flush(self) -> None:
        """Return when everything appended is stored."""
        ...

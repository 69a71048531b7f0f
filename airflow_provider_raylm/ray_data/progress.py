"""The progress of a query job, as one line. Pure but for `Reporter`, which decides when and where it is shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_FIRST_EVERY_S = 5.0
_LONGEST_EVERY_S = 60.0


def progress_line(status: Mapping[str, Any], total: int | None) -> str:
    """One line: how far, how fast, the limit and why it last changed, the waiting share and where it came from.

    `1,200/5,000 rows (24 %), 80.1 rows/s, 5,012 tokens/s, limit 256 (found the queue), waiting 3 % (metrics), 2 errors,
    48 s left`

    Args:
        status: What the keeper says: `rows`, `errors`, `resumed`, `rows_per_s`, `completion_tokens_per_s`, `limit`,
            `reason`, `waiting_share`, `signal`, `state`. What is missing is left out.
        total: Rows to do; `None` when unknown.
    """
    rows = int(status.get("rows") or 0)
    rate = float(status.get("rows_per_s") or 0.0)
    parts = [f"{rows:,} rows" if not total else f"{rows:,}/{total:,} rows ({100 * rows // total} %)"]
    parts.append(f"{rate:,.1f} rows/s")
    if tokens := status.get("completion_tokens_per_s"):
        parts.append(f"{tokens:,.0f} tokens/s")
    if (limit := status.get("limit")) is not None:
        reason = status.get("reason")
        parts.append(f"limit {limit:,.0f}{f' ({reason})' if reason else ''}")
    if (share := status.get("waiting_share")) is not None:
        signal = status.get("signal")
        parts.append(f"waiting {100 * share:.0f} %{f' ({signal})' if signal else ''}")
    if resumed := status.get("resumed"):
        parts.append(f"{resumed:,} resumed")
    errors = int(status.get("errors") or 0)
    parts.append(f"{errors:,} error{'' if errors == 1 else 's'}")
    if status.get("state") == "away":
        parts.append("the endpoint does not answer, waiting for it")
    elif status.get("state") == "paused":
        parts.append("paused at the endpoint's request")
    elif total and rate > 0 and rows < total:
        parts.append(f"{_duration((total - rows) / rate)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def next_after_s(elapsed_s: float) -> float:
    """Seconds to the next line: every 5 s at first, then at every 50th part of the time passed, at most a minute.

    A run of an hour writes about 200 lines and a day about 1,600, instead of 17,000.
    """
    return min(_LONGEST_EVERY_S, max(_FIRST_EVERY_S, elapsed_s / 50))


class Reporter:
    """Shows progress: a bar when a person looks on, otherwise a line now and then.

    Args:
        total: Rows to do; `None` when unknown.
        say: Writes one line.
        interactive: Draw a bar; `None` looks at standard error and for a notebook.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        total: int | None,
        say: Callable[[str], object],
        *,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._say = say
        self._clock = clock
        self._started_s = clock()
        self._next_s = self._started_s + _FIRST_EVERY_S
        self._last = ""
        self._bar: Any = None
        if is_interactive() if interactive is None else interactive:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, unit=" rows", smoothing=0)

    def update(self, status: Mapping[str, Any]) -> None:
        """Take in the present state; call it as often as you like."""
        if self._bar is not None:
            self._bar.set_postfix_str(progress_line(status, None).split(" rows, ", 1)[-1], refresh=False)
            self._bar.update(int(status.get("rows") or 0) - self._bar.n)
            return
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + next_after_s(now_s - self._started_s)
            self._write(progress_line(status, self._total))

    def close(self, status: Mapping[str, Any]) -> None:
        """Show the final state."""
        if self._bar is not None:
            self.update(status)
            self._bar.close()
        else:
            self._write(progress_line(status, self._total))

    def _write(self, line: str) -> None:
        if line != self._last:
            self._last = line
            self._say(line)


def is_interactive() -> bool:
    """A person looks on: standard error is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules

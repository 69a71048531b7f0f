"""The driver log of one job, read piece by piece.

A stream that breaks starts again from the first character, so the position counts characters, and whoever reconnects
skips that many. Each line therefore comes out once. Memory is bounded: only the last lines are kept.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from airflow_provider_raylm.spec import ERROR_PREFIX, RESULT_PREFIX

TAIL_LINES = 20
MAX_LINE_CHARS = 2000
MAX_PARTIAL_CHARS = 2**20


class JobLog:
    """What was read of a job's log so far.

    Attributes:
        position: Characters read.
        tail: The last lines, oldest first.
        result: Content of the last `raylm.result` line.
        error: Content of the last `raylm.error` line.
    """

    def __init__(self) -> None:
        self.position = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.result: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self._partial = ""

    def feed(self, text: str) -> list[str]:
        """Take the next piece of the log.

        Args:
            text: What follows `position`.

        Returns:
            The lines that are now complete and meant for people; the answer lines are not among them.
        """
        self.position += len(text)
        *lines, self._partial = (self._partial + text).split("\n")
        answers = self._partial.startswith((RESULT_PREFIX, ERROR_PREFIX))
        if (
            len(self._partial) > MAX_PARTIAL_CHARS and not answers
        ):  # a progress bar that only ever returns to the start of its line
            self._partial = self._partial.rstrip("\r").rsplit("\r", 1)[-1][-MAX_PARTIAL_CHARS:]
        return [shown for line in lines if (shown := self._take(line)) is not None]

    def finish(self) -> list[str]:
        """The log has ended: its last line may lack a newline."""
        line, self._partial = self._partial, ""
        shown = self._take(line) if line else None
        return [shown] if shown is not None else []

    def _take(self, line: str) -> str | None:
        if line.startswith(RESULT_PREFIX) and (answer := _answer(line[len(RESULT_PREFIX) :])) is not None:
            self.result = answer
            return None
        if line.startswith(ERROR_PREFIX) and (answer := _answer(line[len(ERROR_PREFIX) :])) is not None:
            self.error = answer
            return None
        line = line.rstrip("\r").rsplit("\r", 1)[-1]  # of a progress bar, what a terminal would show
        if len(line) > MAX_LINE_CHARS:
            line = f"{line[:MAX_LINE_CHARS]} ... ({len(line)} characters)"
        if line.strip():
            self.tail.append(line)
        return line


def _answer(text: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None

"""The driver log, read piece by piece."""

from __future__ import annotations

import json

import pytest

from airflow_provider_raylm.job_log import MAX_LINE_CHARS, MAX_PARTIAL_CHARS, TAIL_LINES, JobLog

TEXT = 'one\ntwo\r\n10%\r 50%\r100%\nraylm.result {"a": 1}\n最后\nraylm.result {"a": 2}\nraylm.error {"type": "X"}\nend'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_any_cut_gives_the_same_lines(size: int) -> None:
    """Each line once, whatever the pieces; answers are taken out, and the last one counts."""
    log, lines = JobLog(), []
    for start in range(0, len(TEXT), size):
        lines += log.feed(TEXT[start : start + size])
    lines += log.finish()
    assert lines == ["one", "two", "100%", "最后", "end"]
    assert (log.result, log.error) == ({"a": 2}, {"type": "X"})
    assert log.position == len(TEXT)
    assert list(log.tail) == lines


@pytest.mark.parametrize("line", ["raylm.result", "raylm.result [1]", "raylm.result {broken", "x raylm.result {}"])
def test_what_is_no_answer_stays_a_line(line: str) -> None:
    """A line that merely looks like an answer is shown."""
    log = JobLog()
    assert log.feed(line + "\n") == [line]
    assert log.result is None


def test_memory_is_bounded() -> None:
    """Long logs keep their last lines, long lines their start, endless progress bars their last state."""
    log = JobLog()
    log.feed("".join(f"{i}\n" for i in range(1000)))
    assert list(log.tail) == [str(i) for i in range(1000 - TAIL_LINES, 1000)]
    (shown,) = log.feed("x" * 50_000 + "\n")
    assert len(shown) < MAX_LINE_CHARS + 50
    log.feed("50%\r" * MAX_PARTIAL_CHARS)
    assert len(log._partial) < 10


def test_an_answer_of_many_files_survives_being_cut() -> None:
    """A manifest of ten thousand files is one long line, and comes in pieces."""
    files = ["part-" + "0" * 100] * 12_000
    text = "raylm.result " + json.dumps({"files": files}) + "\n"
    assert len(text) > MAX_PARTIAL_CHARS
    log = JobLog()
    for start in range(0, len(text), 65536):
        log.feed(text[start : start + 65536])
    assert log.result == {"files": files}

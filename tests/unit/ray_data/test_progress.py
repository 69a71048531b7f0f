from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_raylm.ray_data.progress import Reporter, next_after_s, progress_line

STATUS = {
    "rows": 1200,
    "errors": 2,
    "resumed": 0,
    "rows_per_s": 80.12,
    "completion_tokens_per_s": 5012.4,
    "limit": 256,
    "waiting_share": 0.031,
    "state": "running",
}


@pytest.mark.parametrize(
    ("change", "total", "line"),
    [
        (
            {},
            5000,
            "1,200/5,000 rows (24 %), 80.1 rows/s, 5,012 tokens/s, limit 256, waiting 3 %, 2 errors, 47 s left",
        ),
        ({}, None, "1,200 rows, 80.1 rows/s, 5,012 tokens/s, limit 256, waiting 3 %, 2 errors"),
        (
            {"state": "away", "errors": 1},
            5000,
            "1,200/5,000 rows (24 %), 80.1 rows/s, 5,012 tokens/s, limit 256, "
            "waiting 3 %, 1 error, the endpoint does not answer, waiting for it",
        ),
        (
            {"waiting_share": None, "resumed": 1000, "rows_per_s": 0, "completion_tokens_per_s": 0},
            5000,
            "1,200/5,000 rows (24 %), 0.0 rows/s, limit 256, 1,000 resumed, 2 errors",
        ),
        (
            {"reason": "found the queue", "signal": "ttft"},
            None,
            "1,200 rows, 80.1 rows/s, 5,012 tokens/s, limit 256 (found the queue), waiting 3 % (ttft), 2 errors",
        ),
        (
            {"rows": 5000},
            5000,
            "5,000/5,000 rows (100 %), 80.1 rows/s, 5,012 tokens/s, limit 256, waiting 3 %, 2 errors",
        ),
    ],
)
def test_one_line_says_how_far_and_how_fast(change: dict[str, Any], total: int | None, line: str) -> None:
    """Rows, rates, limit, waiting share, errors and what is left."""
    assert progress_line({**STATUS, **change}, total) == line


def test_nothing_known_yet_is_a_line_too() -> None:
    """Before the first report."""
    assert progress_line({}, None) == "0 rows, 0.0 rows/s, 0 errors"


def test_a_day_writes_a_bounded_number_of_lines() -> None:
    """Lines grow rarer: a day stays under 2,000."""
    elapsed_s, lines = 0.0, 0
    while elapsed_s < 86_400:
        elapsed_s += next_after_s(elapsed_s)
        lines += 1
    assert lines < 2000


def test_lines_come_at_their_time_and_the_last_one_always() -> None:
    """However often the state is passed in; the same line is not written twice."""
    said: list[str] = []
    now_s = 0.0
    reporter = Reporter(5000, said.append, interactive=False, clock=lambda: now_s)
    for now_s in (0.0, 1.0, 4.9):  # noqa: B007
        reporter.update(STATUS)
    assert said == []
    now_s = 5.0
    reporter.update(STATUS)
    reporter.close(STATUS)
    assert len(said) == 1
    reporter.close({**STATUS, "rows": 5000})
    assert len(said) == 2

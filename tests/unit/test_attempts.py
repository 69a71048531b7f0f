"""Which job belongs to a task instance, and what a retry does about the jobs before it."""

from __future__ import annotations

import re

import pytest

from airflow_provider_raylm.attempts import Adopt, Attach, Choice, Reuse, Submit, Supersede, choose, id_stem
from airflow_provider_raylm.polling import STATUSES, JobInfo, JobStatus


def job(number: int, status: JobStatus, fingerprint: str = "same", try_number: int = 1) -> JobInfo:
    return JobInfo(
        submission_id=f"s-{number}",
        status=status,
        metadata={"fingerprint": fingerprint, "try_number": str(try_number)},
    )


def decide(
    *earlier: JobInfo | None,
    try_number: int = 2,
    first_try: int = 1,
    reuse: Reuse = "unreported",
    replace_cleared: bool = True,
) -> Choice:
    return choose(
        "s",
        earlier,
        fingerprint="same",
        try_number=try_number,
        first_try=first_try,
        reuse=reuse,
        replace_cleared=replace_cleared,
    )


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_of_the_job_before(status: JobStatus) -> None:
    """A running job is waited for, a failed or stopped one replaced, a success that nobody reported taken over."""
    expected = {
        "PENDING": Attach("s-1"),
        "RUNNING": Attach("s-1"),
        "FAILED": Submit("s-2"),
        "STOPPED": Submit("s-2"),
        "SUCCEEDED": Adopt("s-1"),
    }
    assert decide(job(1, status)) == expected[status]


@pytest.mark.parametrize(
    ("earlier", "arguments", "expected"),
    [
        ([], {}, Submit("s-1")),
        ([None, None], {}, Submit("s-3")),
        ([job(1, "FAILED"), job(2, "RUNNING")], {}, Attach("s-2")),
        ([job(1, "RUNNING"), None], {}, Attach("s-1")),
        ([job(1, "RUNNING", "other")], {}, Supersede("s-1", "s-2")),
        ([job(1, "SUCCEEDED", "other")], {}, Submit("s-2")),
        ([job(1, "SUCCEEDED", "other")], {"reuse": "always"}, Submit("s-2")),
        # the task was cleared after try 1
        ([job(1, "SUCCEEDED")], {"first_try": 2}, Submit("s-2")),
        ([job(1, "SUCCEEDED")], {"first_try": 2, "reuse": "always"}, Adopt("s-1")),
        ([job(1, "RUNNING")], {"first_try": 2}, Supersede("s-1", "s-2")),
        ([job(1, "RUNNING")], {"first_try": 2, "replace_cleared": False}, Attach("s-1")),
        ([job(1, "STOPPED"), job(2, "RUNNING", try_number=2)], {"first_try": 2, "try_number": 3}, Attach("s-2")),
        ([job(1, "STOPPED"), job(2, "SUCCEEDED", try_number=2)], {"first_try": 2, "try_number": 3}, Adopt("s-2")),
        ([job(1, "SUCCEEDED")], {"reuse": "never"}, Submit("s-2")),
        # a DAG run that was deleted and made anew starts at try 1 and finds the jobs of its namesake
        ([job(1, "SUCCEEDED")], {"try_number": 1}, Submit("s-2")),
        ([job(1, "SUCCEEDED", try_number=3)], {"try_number": 2}, Submit("s-2")),
        ([job(1, "SUCCEEDED"), job(2, "FAILED", try_number=2)], {"try_number": 3}, Submit("s-3")),
    ],
)
def test_choice(earlier: list[JobInfo | None], arguments: dict[str, object], expected: Choice) -> None:
    """The last job decides; another input is never taken for ours."""
    assert decide(*earlier, **arguments) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parts",
    [
        ("", "d", "t", "r", -1),
        ("https://airflow.example", "标签任务", "t.group.inner", "scheduled__2026-12-01T00:00:00+00:00", 17),
        ("x", "d" * 250, "t" * 250, "manual__" + "r" * 250, 99999),
        ("x", "a b/c'd\"$(e)", "../..", "r", 0),
    ],
)
def test_ids_are_safe_and_bounded(parts: tuple[str, str, str, str, int]) -> None:
    """An id is part of URLs, of a shell command and of a file name."""
    stem = id_stem(*parts)
    assert re.fullmatch(r"[A-Za-z0-9_.-]{12,80}", stem)
    assert stem == id_stem(*parts)


def test_ids_differ_where_any_part_differs() -> None:
    """Also two deployments with the same DAG on one cluster, and names that only differ where they are cut."""
    base = ("prod", "d" * 50 + "1", "t", "r", -1)
    others = [
        ("dev", *base[1:]),
        ("prod", "x" + "d" * 49 + "1", *base[2:]),
        ("prod", base[1], "u", "r", -1),
        ("prod", base[1], "t", "q", -1),
        ("prod", base[1], "t", "r", 0),
    ]
    assert len({id_stem(*parts) for parts in [base, *others]}) == 6

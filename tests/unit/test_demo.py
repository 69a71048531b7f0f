"""What `make demo` shows of Airflow's log."""

from __future__ import annotations

import pytest

from demo.__main__ import progress

JOB = "[airflow_provider_raylm.triggers.ray.RayJobTrigger] loc=ray.py:270"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("2026-12-02T03:16:45Z [info     ] [DAG TEST] starting task_id=deploy map_index=-1 [x]", "deploy"),
        (f"2026-12-02T03:17:28Z [info     ] deploying 'qwen' at /qwen      {JOB}", "  deploying 'qwen' at /qwen"),
        (f"2026-12-02T03:17:28Z [info     ] 2026-12-02 03:16:57,309\tINFO job_manager.py:581 -- up {JOB}", None),
        (f"2026-12-02T03:17:28Z [info     ] ::group::Log of Ray job x {JOB}", None),
        (f'2026-12-02T03:17:28Z [info     ] raylm.result {{"rows": 1}} {JOB}', None),
        ("2026-12-02T03:17:28Z [info     ] Task started [airflow.api_fastapi] x", None),
    ],
)
def test_shows_tasks_and_what_the_jobs_say(line: str, shown: str | None) -> None:
    """Task names and the jobs' own lines; neither Ray's nor Airflow's."""
    assert progress(line) == shown

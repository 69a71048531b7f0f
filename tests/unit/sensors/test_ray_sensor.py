"""The sensor waits for somebody else's job, and never touches it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import TaskDeferred

from airflow_provider_raylm.exceptions import RayJobFailedError, RayJobStoppedError, RayUnreachableError
from airflow_provider_raylm.hooks import loop
from airflow_provider_raylm.polling import STATUSES
from airflow_provider_raylm.sensors.ray import RayJobSensor
from tests.support.airflow_task import context
from tests.support.fake_dashboard import FakeDashboard

ANSWER = 'raylm.result {"rows": 7}\n'
RESULT = {"submission_id": "a-1", "status": "SUCCEEDED", "result": {"rows": 7}}
ERRORS: dict[str, Any] = {"FAILED": RayJobFailedError, "STOPPED": RayJobStoppedError}


def sensor(**arguments: Any) -> RayJobSensor:
    return RayJobSensor(
        **{"task_id": "s", "submission_id": "a-1", "poke_interval": 1, "deferrable": False, **arguments}
    )


@pytest.mark.parametrize("status", STATUSES)
def test_every_status(dashboard: FakeDashboard, status: str) -> None:
    """Success is true, failure raises, anything else is not yet."""
    dashboard.add("a-1", status=status, log=ANSWER)
    made = sensor()
    if status in ERRORS:
        with pytest.raises(ERRORS[status]):
            made.poke(context())
    else:
        value = made.poke(context())
        assert bool(value) == (status == "SUCCEEDED")
        assert value.xcom_value == (RESULT if value else None)


def test_same_result_in_the_triggerer(dashboard: FakeDashboard) -> None:
    """The deferred sensor returns what the poking one does, and its trigger owns nothing."""
    dashboard.add("a-1").succeed(log=ANSWER)
    with pytest.raises(TaskDeferred) as deferred:
        sensor(deferrable=True, timeout=60).execute(context())
    trigger = deferred.value.trigger
    assert not trigger.owns_job
    assert trigger.deadline == pytest.approx(time.time() + 60, abs=5)
    event = loop.run(trigger.watch).to_event()
    assert sensor().execute_complete(context(), event=event) == RESULT


def test_patience(dashboard: FakeDashboard) -> None:
    """Silence is not an end, until patience is over."""
    dashboard.add("a-1", status="RUNNING")
    dashboard.answer(503, times=2)
    assert not sensor().poke(context())
    with pytest.raises(RayUnreachableError):
        sensor(patience=0).poke(context())

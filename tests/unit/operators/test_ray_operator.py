"""The general operator: one job per attempt of intent, the same in both modes, and never green by accident."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException, AirflowTaskTimeout, TaskDeferred

from airflow_provider_raylm.exceptions import RayJobError, RayJobFailedError, RayJobStoppedError
from airflow_provider_raylm.hooks import loop
from airflow_provider_raylm.links import LINK_KEY
from airflow_provider_raylm.operators import ray as module
from airflow_provider_raylm.operators.ray import RECORD_KEY, RaySubmitJobOperator
from airflow_provider_raylm.polling import STATUSES
from airflow_provider_raylm.triggers.ray import RayJobTrigger
from tests.support.airflow_task import FakeStateStore, context
from tests.support.fake_dashboard import FakeDashboard, FakeJob

ANSWER = 'hello\nraylm.result {"rows": 7}\n'
MODES = [False, True]


def operator(**arguments: Any) -> RaySubmitJobOperator:
    return RaySubmitJobOperator(
        **{"task_id": "label", "entrypoint": "python job.py", "poll_interval": 0.02, "deferrable": False, **arguments}
    )


def run(made: RaySubmitJobOperator, ctx: dict[str, Any]) -> Any:
    """Run a task as Airflow does, through the triggerer if it defers."""
    try:
        return made.execute(ctx)
    except TaskDeferred as deferred:
        path, kwargs = deferred.trigger.serialize()
        assert path.endswith("RayJobTrigger")

        async def fire() -> dict[str, Any]:
            async for event in RayJobTrigger(**json.loads(json.dumps(kwargs))).run():
                return dict(event.payload)
            raise AssertionError("no event")

        resumed = operator(**{k: getattr(made, k) for k in ("entrypoint", "deferrable", "runtime_env")})
        return resumed.execute_complete(ctx, event=json.loads(json.dumps(loop.run(fire))), **(deferred.kwargs or {}))


@pytest.fixture
def jobs(dashboard: FakeDashboard) -> dict[str, FakeJob]:
    """Jobs of a cluster where every job succeeds at once."""
    dashboard.on_submit = lambda job: job.succeed(log=ANSWER)
    return dashboard.jobs


@pytest.mark.parametrize("deferrable", MODES)
def test_same_result_in_both_modes(dashboard: FakeDashboard, deferrable: bool) -> None:
    """Submitted, run, answered."""
    dashboard.on_submit = lambda job: job.run() if deferrable else job.succeed(log=ANSWER)
    made = operator(deferrable=deferrable)
    ctx = context()
    if deferrable:
        with pytest.raises(TaskDeferred) as deferred:
            made.execute(ctx)
        (job,) = dashboard.jobs.values()
        job.succeed(log=ANSWER)
        outcome = loop.run(deferred.value.trigger.watch)
        result = operator().execute_complete(ctx, event=outcome.to_event(), **(deferred.value.kwargs or {}))
    else:
        result = made.execute(ctx)
    (submission_id,) = dashboard.jobs
    assert result == {"submission_id": submission_id, "status": "SUCCEEDED", "result": {"rows": 7}}
    assert ctx["ti"].pushed == {LINK_KEY: f"{dashboard.url}/#/jobs/{submission_id}"}


@pytest.mark.parametrize("deferrable", MODES)
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda j: j.fail(log="oops\n"), RayJobFailedError),
        (lambda j: setattr(j, "status", "STOPPED"), RayJobStoppedError),
    ],
    ids=["FAILED", "STOPPED"],
)
def test_a_failed_job_is_never_green(dashboard: FakeDashboard, deferrable: bool, end: Any, error: Any) -> None:
    """In both modes, also if it failed before the task could be deferred."""
    dashboard.on_submit = end
    with pytest.raises(error) as caught:
        run(operator(deferrable=deferrable), context())
    assert caught.value.submission_id in dashboard.jobs


@pytest.mark.parametrize("deferrable", MODES)
def test_what_a_retry_cannot_mend_is_not_retried(dashboard: FakeDashboard, deferrable: bool) -> None:
    """A wrong specification, found by the operator before it submits or by the job, ends the task for good."""
    dashboard.on_submit = lambda job: job.fail(log='raylm.error {"type": "SpecError", "message": "no folder /mnt/m"}\n')
    with pytest.raises(AirflowFailException, match="no folder /mnt/m"):
        run(operator(deferrable=deferrable), context())
    dashboard.jobs.clear()
    with pytest.raises(AirflowFailException, match="is not JSON"):
        run(operator(deferrable=deferrable, runtime_env={"env_vars": {"A": object()}}), context())
    assert not dashboard.jobs


def test_labels_say_whose_job_it_is(dashboard: FakeDashboard, jobs: dict[str, FakeJob]) -> None:
    """Dag, task, run, map index, try and fingerprint; strings, because Ray takes no others."""
    run(operator(metadata={"team": "nlp"}), context(try_number=2, map_index=3))
    (job,) = jobs.values()
    assert set(job.metadata) == {"team", "dag_id", "task_id", "run_id", "map_index", "try_number", "fingerprint"}
    assert (job.metadata["try_number"], job.metadata["map_index"]) == ("2", "3")


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("store", [None, FakeStateStore()], ids=["3.1", "3.3"])
def test_a_retry_after_a_lost_worker(dashboard: FakeDashboard, status: str, store: Any) -> None:
    """The worker was killed after the submission: the retry finds the job, whatever became of it or is recorded."""
    dashboard.on_submit = lambda job: job.run()
    with pytest.raises(TaskDeferred):
        operator(deferrable=True).execute(context(store=store))
    (first,) = list(dashboard.jobs.values())
    first.status, first.log = status, ANSWER
    dashboard.on_submit = lambda job: job.succeed(log=ANSWER)
    retry = operator(deferrable=status in ("PENDING", "RUNNING"))
    if status in ("PENDING", "RUNNING"):
        with pytest.raises(TaskDeferred) as deferred:
            retry.execute(context(store=store, try_number=2))
        assert deferred.value.trigger.submission_id == first.submission_id
        assert len(dashboard.jobs) == 1
    else:
        result = retry.execute(context(store=store, try_number=2))
        assert len(dashboard.jobs) == (1 if status == "SUCCEEDED" else 2)
        assert result["submission_id"] == list(dashboard.jobs)[-1]
    if isinstance(store, FakeStateStore):
        store.clear()


@pytest.mark.parametrize(
    ("change", "reuse", "expected"),
    [
        ({}, "unreported", 2),
        ({}, "always", 1),
        ({}, "never", 2),
        ({"entrypoint": "python other.py"}, "always", 2),
        ({"runtime_env": {"env_vars": {"A": "b"}}}, "always", 2),
    ],
)
@pytest.mark.parametrize("store", [True, False], ids=["3.3", "3.1"])
def test_clearing_a_succeeded_task(
    dashboard: FakeDashboard, jobs: dict[str, FakeJob], change: dict[str, Any], reuse: Any, expected: int, store: bool
) -> None:
    """It runs again, unless the user said that an equal input needs no second run."""
    kept = FakeStateStore() if store else None
    run(operator(), context(store=kept))
    run(operator(reuse_succeeded=reuse, **change), context(store=kept, try_number=2, max_tries=1))
    assert len(jobs) == expected


def test_the_record_shows_jobs_behind_a_gap(dashboard: FakeDashboard) -> None:
    """Somebody deleted the jobs before the running one from Ray's history: the state store finds it all the same."""
    store = FakeStateStore()
    for try_number in (1, 2, 3, 4):
        dashboard.on_submit = (lambda job: job.run()) if try_number == 4 else (lambda job: job.fail())
        with pytest.raises(TaskDeferred if try_number == 4 else RayJobFailedError):
            operator(deferrable=True).execute(context(store=store, try_number=try_number, max_tries=9))
    for name in list(dashboard.jobs)[:3]:
        del dashboard.jobs[name]
    with pytest.raises(TaskDeferred) as deferred:
        operator(deferrable=True, retries=9).execute(context(store=store, try_number=5, max_tries=9))
    assert deferred.value.trigger.submission_id == store[RECORD_KEY]
    assert len(dashboard.jobs) == 1


def test_another_input_supersedes_a_running_job(dashboard: FakeDashboard) -> None:
    """Two jobs of one task never run side by side."""
    dashboard.on_submit = lambda job: job.run()
    with pytest.raises(TaskDeferred):
        operator(deferrable=True).execute(context())
    (first,) = list(dashboard.jobs.values())
    with pytest.raises(TaskDeferred):
        operator(deferrable=True, entrypoint="python other.py").execute(context(try_number=2))
    assert first.status == "STOPPED"
    assert [job.status for job in dashboard.jobs.values()] == ["STOPPED", "RUNNING"]


def test_no_second_job_beside_one_that_does_not_stop(dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be confirmed is said, and the task fails."""
    dashboard.on_submit = lambda job: job.run()
    with pytest.raises(TaskDeferred):
        operator(deferrable=True).execute(context())
    (first,) = list(dashboard.jobs.values())
    first.stop_works = False
    made = operator(deferrable=True, entrypoint="python other.py")
    cancel = made.hook.cancel
    monkeypatch.setattr(made.hook, "cancel", lambda job_id: cancel(job_id, within_s=0.6))
    with pytest.raises(RayJobError, match="No second job is started"):
        made.execute(context(try_number=2))
    assert len(dashboard.jobs) == 1


def test_clearing_a_running_task_replaces_its_job(dashboard: FakeDashboard) -> None:
    """Even if the new attempt comes before the old one's cancel."""
    dashboard.on_submit = lambda job: job.run()
    for try_number in (1, 2):
        with pytest.raises(TaskDeferred):
            operator(deferrable=True).execute(context(try_number=try_number, max_tries=try_number - 1))
    assert [job.status for job in dashboard.jobs.values()] == ["STOPPED", "RUNNING"]


def test_trouble_before_the_submission_does_not_double_the_job(
    dashboard: FakeDashboard, jobs: dict[str, FakeJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that does not answer whether a job exists is asked again, not assumed to have none."""
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    dashboard.answer(503, times=3)
    run(operator(), context())
    assert len(jobs) == 1


def test_deadlines_travel_with_the_trigger(dashboard: FakeDashboard) -> None:
    """Wall-clock; `execution_timeout` counts from the task's start; a deferral's own timeout would cancel nothing."""
    dashboard.on_submit = lambda job: job.run()
    ctx = context()
    start = ctx["ti"].start_date.timestamp()
    made = operator(deferrable=True, start_timeout=50, timeout=500, execution_timeout=datetime.timedelta(seconds=100))
    with pytest.raises(TaskDeferred) as deferred:
        made.execute(ctx)
    trigger = deferred.value.trigger
    assert trigger.deadline == pytest.approx(start + 100, abs=5)
    assert trigger.start_deadline == pytest.approx(start + 50, abs=5)
    assert deferred.value.timeout is None


@pytest.mark.parametrize(
    ("arguments", "state", "stops"),
    [
        ({}, "failed", 1),
        ({}, "success", 1),
        ({}, "restarting", 1),
        ({}, "running", 0),
        ({}, None, 0),
        ({"cancel_on_kill": False}, "failed", 0),
    ],
)
def test_on_kill(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], state: str | None, stops: int
) -> None:
    """It cancels if the task was ended, and leaves the job to the retry if only the worker goes down."""

    async def task_state(ti: Any, *, timeout_s: float) -> str | None:
        return state

    monkeypatch.setattr(module, "task_state", task_state)
    dashboard.on_submit = lambda job: job.run()
    made = operator(deferrable=True, **arguments)
    made.on_kill()  # before there is a job
    with pytest.raises(TaskDeferred):
        made.execute(context())
    (job,) = dashboard.jobs.values()
    made.on_kill()
    assert job.stops == stops


def test_execution_timeout_cancels(dashboard: FakeDashboard) -> None:
    """The task is still running in Airflow then, and its job must go all the same."""
    dashboard.on_submit = lambda job: job.run()
    made = operator(execution_timeout=datetime.timedelta(seconds=0.5))
    from airflow.sdk.execution_time.timeout import timeout

    with pytest.raises(AirflowTaskTimeout), timeout(1):
        made.execute(context())
    made.on_kill()
    (job,) = dashboard.jobs.values()
    assert job.status == "STOPPED"


def test_execution_timeout_during_the_submission_cancels(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster may have taken the job while the answer was still on its way."""
    made = operator()

    def late(**arguments: Any) -> None:
        dashboard.add(arguments["submission_id"]).run()
        raise AirflowTaskTimeout("Timeout")

    monkeypatch.setattr(made.hook, "submit_job", late)
    with pytest.raises(AirflowTaskTimeout):
        made.execute(context())
    made.on_kill()
    (job,) = dashboard.jobs.values()
    assert job.stops == 1


def test_only_content_of_local_files_is_input(
    dashboard: FakeDashboard, jobs: dict[str, FakeJob], tmp_path: Path
) -> None:
    """The same files in another folder are the same input; a changed file is another."""
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "job.py").write_text("print(1)" if folder.name != "c" else "print(2)")
        (folder / "__pycache__" / folder.name).write_text(folder.name)
        (folder / ".git").write_text(folder.name)
    for folder in folders:
        run(operator(runtime_env={"working_dir": str(folder)}), context(run_id=folder.name))
    a, b, c = [job.metadata["fingerprint"] for job in jobs.values()]
    assert a == b != c


def test_works_when_mapped(dashboard: FakeDashboard) -> None:
    """`.partial().expand()` takes every argument, and builds the operator."""
    from airflow.sdk import DAG

    with DAG("d", schedule=None) as dag:
        RaySubmitJobOperator.partial(task_id="t", poll_interval=1, deferrable=True).expand(entrypoint=["a", "b"])
    assert dag.task_dict["t"].operator_class is RaySubmitJobOperator

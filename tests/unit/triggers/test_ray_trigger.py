"""The trigger against a scripted dashboard: every ending, every trouble on the way, every line of the log once."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from airflow_provider_raylm import polling
from airflow_provider_raylm.hooks import ray as hook_module
from airflow_provider_raylm.outcome import Outcome
from airflow_provider_raylm.polling import STATUSES
from airflow_provider_raylm.triggers import ray as module
from airflow_provider_raylm.triggers.ray import RayJobTrigger
from tests.support.airflow_task import FakeTaskInstance
from tests.support.fake_dashboard import FakeDashboard, FakeJob, connection_env

ENDS: dict[str, str] = {"SUCCEEDED": "succeeded", "FAILED": "failed", "STOPPED": "stopped"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become hundredths."""
    monkeypatch.setattr(module, "LOG_GRACE_S", 2.0)
    monkeypatch.setattr(module, "STREAM_AGAIN_S", 0.05)
    monkeypatch.setattr(module, "STREAM_BACKOFF_S", 0.02)
    monkeypatch.setattr(polling, "MISSING_S", 0.05)
    monkeypatch.setattr(hook_module, "KILL_PENDING_S", 0.1)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the trigger wrote into the task's log."""
    lines: list[str] = []
    monkeypatch.setattr(RayJobTrigger, "_show", lambda self, new: lines.extend(new))
    return lines


def trigger(**arguments: Any) -> RayJobTrigger:
    return RayJobTrigger(**{"submission_id": "a-1", "poll_interval": 0.02, **arguments})


@asynccontextmanager
async def watching(made: RayJobTrigger) -> AsyncIterator[asyncio.Task[Outcome]]:
    task = asyncio.create_task(made.watch())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - the other side is a server in another thread
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 20)


def test_is_rebuilt_from_what_it_serializes() -> None:
    """A value other than the default for every argument; no argument may be forgotten."""
    values = {
        "submission_id": "x-3",
        "ray_conn_id": "other",
        "poll_interval": 3.5,
        "start_deadline": 12.5,
        "deadline": 99.5,
        "patience": 5.0,
        "stream_logs": False,
        "owns_job": False,
        "cancel_on_kill": False,
        "requested": {"entrypoint_num_gpus": 2},
    }
    parameters = inspect.signature(RayJobTrigger.__init__).parameters
    assert set(values) == set(parameters) - {"self"}
    assert all(values[name] != parameters[name].default for name in values)
    path, kwargs = RayJobTrigger(**values).serialize()
    assert kwargs == values
    assert json.loads(json.dumps(kwargs)) == kwargs
    assert path == "airflow_provider_raylm.triggers.ray.RayJobTrigger"
    assert RayJobTrigger(**kwargs).serialize() == (path, kwargs)


@pytest.mark.parametrize("status", STATUSES)
async def test_every_status(dashboard: FakeDashboard, status: str) -> None:
    """A terminal status at the first look ends the wait without a race; the others keep waiting."""
    dashboard.add("a-1", status=status)
    async with watching(trigger()) as task:
        done, _ = await asyncio.wait({task}, timeout=20 if status in ENDS else 0.1)
        assert bool(done) == (status in ENDS)
        if done:
            assert task.result().state == ENDS[status]


async def test_yields_exactly_one_event(dashboard: FakeDashboard) -> None:
    """The event is JSON, and says all that the operator needs."""
    dashboard.add("a-1").succeed(log='hello\nraylm.result {"rows": 7}\n')
    events = [event async for event in trigger().run()]
    assert len(events) == 1
    outcome = Outcome.from_event(json.loads(json.dumps(events[0].payload)))
    assert outcome == Outcome(
        submission_id="a-1", state="succeeded", exit_code=0, result={"rows": 7}, log_tail=("hello",)
    )


@pytest.mark.parametrize("way", ["stream", "polls", "cut streams"])
async def test_each_line_of_the_log_once(dashboard: FakeDashboard, shown: list[str], way: str) -> None:
    """With a stream, with a stream that is cut in the middle of a line, and where no stream gets through."""
    expected = [f"line {i} {'.' * i}" for i in range(60)]
    job = dashboard.add("a-1")
    dashboard.websockets = way != "polls"
    async with watching(trigger()) as task:
        job.run()
        for i, line in enumerate(expected):
            if way == "cut streams" and i % 20 == 10:
                dashboard.break_stream_after = len(job.log) + 5
            job.log += line + "\n"
            await asyncio.sleep(0.005)
        job.succeed(log='raylm.result {"a": 1}\n')
        outcome = await task
    assert shown == expected
    assert outcome.result == {"a": 1}


async def test_a_stream_is_not_read_again(dashboard: FakeDashboard, shown: list[str]) -> None:
    """However long the job, the log is transferred once: one stream, and no download at the end."""
    job = dashboard.add("a-1")
    async with watching(trigger()) as task:
        job.run("a\n")
        await until(lambda: shown == ["a"])
        job.succeed(log="b\n")
        await task
    paths = [path for _, path in dashboard.requests if "/logs" in path]
    assert paths == ["/api/jobs/a-1/logs/tail"]


async def test_without_a_stream_the_pause_grows_with_the_log(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch, shown: list[str]
) -> None:
    """A log that is read as a whole each time costs no more than a fixed rate on average."""
    monkeypatch.setattr(module, "LOG_CHARS_PER_S", 100)
    dashboard.websockets = False
    job = dashboard.add("a-1")
    job.run("x" * 99 + "\n")
    async with watching(trigger()):
        await until(lambda: len(shown) == 1)
        await asyncio.sleep(0.3)
        assert dashboard.requests.count(("GET", "/api/jobs/a-1/logs")) == 1


async def test_logs_can_be_left_out(dashboard: FakeDashboard, shown: list[str]) -> None:
    """Then nothing is shown, and the log is read once, for the answer and the last lines."""
    dashboard.add("a-1").succeed(log='hello\nraylm.result {"rows": 7}\n')
    outcome = await trigger(stream_logs=False).watch()
    assert (outcome.result, outcome.log_tail, shown) == ({"rows": 7}, ("hello",), [])


async def test_a_failure_says_why(dashboard: FakeDashboard) -> None:
    """The job's own words first, then the exit code and the last lines, each once."""
    dashboard.add("a-1").fail(log='working\nraylm.error {"type": "ServeError", "message": "needs 1 GPU, has 0"}\n')
    error = (await trigger().watch()).error()
    assert str(error) == ("needs 1 GPU, has 0 (ServeError in Ray job a-1)\nExit code 1.\nLast log lines:\nworking")


async def test_a_failure_without_own_words_takes_rays(dashboard: FakeDashboard) -> None:
    """Ray's message without the log lines that it repeats; all of it if there is no log."""
    dashboard.add("a-1").fail(exit_code=137, log="killed\n")
    error = str((await trigger().watch()).error())
    assert error == (
        "Ray job a-1 failed: Job entrypoint command failed with exit code 137.\nExit code 137.\nLast log lines:\nkilled"
    )
    dashboard.jobs["a-1"].fail("runtime_env setup failed: pip said no", exit_code=None)
    dashboard.jobs["a-1"].log = ""
    assert str((await trigger().watch()).error()) == "Ray job a-1 failed: runtime_env setup failed: pip said no."


@pytest.mark.parametrize(
    ("status", "deadline", "state", "said"),
    [
        ("PENDING", "start_deadline", "start_timeout", "num_gpus=1; the cluster has 0.0/4.0 CPU, 0B/21.30GiB"),
        ("RUNNING", "deadline", "timeout", "is STOPPED"),
        ("PENDING", "deadline", "timeout", "is FAILED"),
    ],
)
async def test_a_deadline_cancels_and_says_what_became_of_the_job(
    dashboard: FakeDashboard, status: str, deadline: str, state: str, said: str
) -> None:
    """Wall-clock deadlines, that a restarted trigger does not extend."""
    job = dashboard.add("a-1", status=status, log="last words\n")
    made = trigger(**{deadline: time.time() + 0.1}, requested={"entrypoint_num_gpus": 1})
    _, kwargs = made.serialize()
    outcome = await RayJobTrigger(**kwargs).watch()
    assert outcome.state == state
    assert said in outcome.reason
    assert job.status in ("STOPPED", "FAILED")
    assert job.stops == 1
    assert outcome.log_tail == ("last words",)


async def test_somebody_elses_job_is_not_cancelled(dashboard: FakeDashboard) -> None:
    """A sensor that runs out of time leaves the job alone."""
    job = dashboard.add("a-1", status="RUNNING")
    made = trigger(owns_job=False, deadline=time.time() - 1)
    assert "not cancelled, because" in (await made.watch()).reason
    made.task_instance = FakeTaskInstance()
    await made.on_kill()
    assert (job.status, job.stops) == ("RUNNING", 0)


@pytest.mark.parametrize(
    "trouble",
    [
        lambda d: d.answer(503, times=4),
        lambda d: d.answer(401, times=2),
        lambda d: d.answer(404, "no upstream", times=6),
        lambda d: d.answer(200, "<html>", times=2),
        lambda d: d.reset(6),
        lambda d: d.hang(2),
    ],
    ids=["503", "401", "404 of a gateway", "html", "reset", "hang"],
)
async def test_patience(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[FakeDashboard], None]
) -> None:
    """A cluster that does not answer for a while costs nothing but time."""
    for name, value in connection_env(dashboard.url, request_timeout=0.1).items():
        monkeypatch.setenv(name, value)
    job = dashboard.add("a-1", status="RUNNING")
    async with watching(trigger()) as task:
        await until(lambda: len(dashboard.requests) > 3)
        trouble(dashboard)
        await until(lambda: not dashboard._faults)
        job.succeed()
        assert (await task).state == "succeeded"


async def test_patience_ends(dashboard: FakeDashboard) -> None:
    """Then the failure says that the job may still run, and nothing is cancelled."""
    job = dashboard.add("a-1", status="RUNNING")
    dashboard.answer(503, "upstream", times=999)
    outcome = await trigger(patience=0.2, stream_logs=False).watch()
    assert outcome.state == "unreachable"
    assert "HTTP 503: upstream" in outcome.reason
    assert "may still run" in outcome.reason
    assert job.stops == 0


async def test_a_job_that_is_gone_for_good_is_lost(dashboard: FakeDashboard) -> None:
    """The head was replaced: a clear failure instead of a wait without end."""
    job = dashboard.add("a-1", status="RUNNING")
    async with watching(trigger()) as task:
        await until(lambda: len(dashboard.requests) > 3)
        dashboard.jobs.clear()
        outcome = await task
    assert outcome.state == "lost"
    assert "its head was replaced" in outcome.reason
    assert job.stops == 0


async def test_a_job_that_comes_back_is_not_lost(dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that restores its state answers 404 for a moment."""
    monkeypatch.setattr(polling, "MISSING_S", 5.0)
    job = dashboard.add("a-1", status="RUNNING")
    async with watching(trigger()) as task:
        await until(lambda: len(dashboard.requests) > 3)
        dashboard.jobs.clear()
        asked = len(dashboard.requests)
        await until(lambda: len(dashboard.requests) > asked + 4)
        job.succeed()
        dashboard.jobs["a-1"] = job
        assert (await task).state == "succeeded"


async def test_cancellation_and_cleanup_never_cancel_the_job(dashboard: FakeDashboard) -> None:
    """A triggerer that shuts down, or a trigger that moves, leaves the job running."""
    job = dashboard.add("a-1", status="RUNNING")
    made = trigger()

    async def consume() -> None:
        async for _ in made.run():
            pass

    task = asyncio.create_task(consume())
    await until(lambda: len(dashboard.requests) > 2)
    task.cancel()
    await asyncio.wait({task})
    await made.cleanup()
    assert task.cancelled()
    assert (job.status, job.stops) == ("RUNNING", 0)


@pytest.mark.parametrize(
    ("state", "cancels"),
    [("failed", True), ("success", True), ("cleared", True), ("running", True), ("deferred", False), (None, False)],
)
async def test_on_kill_asks_airflow_first(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch, state: str | None, cancels: bool
) -> None:
    """It is also called when the trigger moves to another triggerer; then the task is still deferred."""

    async def task_state(ti: Any, *, timeout_s: float) -> str | None:
        return state

    monkeypatch.setattr(module, "task_state", task_state)
    job = dashboard.add("a-1", status="RUNNING")
    await trigger().on_kill()
    assert job.status == ("STOPPED" if cancels else "RUNNING")


async def test_on_kill_can_be_told_to_leave_the_job(dashboard: FakeDashboard) -> None:
    """`cancel_on_kill=False`."""
    job = dashboard.add("a-1", status="RUNNING")
    await trigger(cancel_on_kill=False).on_kill()
    assert job.stops == 0


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"r": {"label": "failed"}}, "failed"),
        ({"r": {"label_7": "deferred"}}, "deferred"),
        ({"r": {"label": None}}, "cleared"),
        ({"r": {}}, "cleared"),
        ({}, "cleared"),
        (RuntimeError("no supervisor"), None),
    ],
)
async def test_task_state(monkeypatch: pytest.MonkeyPatch, states: Any, expected: str | None) -> None:
    """Every answer of Airflow, also for mapped tasks; an error is not an answer."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    def get_task_states(**asked: Any) -> Any:
        assert asked == {"dag_id": "label_reviews", "task_ids": ["label"], "run_ids": ["r"], "map_index": 7}
        if isinstance(states, Exception):
            raise states
        return states

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(get_task_states))
    assert await module.task_state(FakeTaskInstance(run_id="r", map_index=7), timeout_s=1) == expected


async def test_nothing_blocks_the_event_loop(dashboard: FakeDashboard) -> None:
    """A whole life of a job, with trouble, a deadline and a cancel, and no blocking call on the loop."""

    def succeed(job: FakeJob) -> None:
        job.succeed(log="done\n")

    with blockbuster_ctx(["airflow_provider_raylm"]):
        job = dashboard.add("a-1")
        async with watching(trigger()) as task:
            await until(lambda: len(dashboard.requests) > 2)
            job.run("hello\n")
            dashboard.answer(503)
            await until(lambda: not dashboard._faults)
            succeed(job)
            assert (await task).state == "succeeded"
        dashboard.add("b-1", status="RUNNING")
        outcome = await trigger(submission_id="b-1", deadline=time.time()).watch()
        assert outcome.state == "timeout"

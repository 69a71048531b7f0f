"""Wait for one Ray job: look at it, pass its log on, keep its deadlines, say how it ended.

The synchronous operator runs the very same `watch`, so both modes agree. What must stay true:

- Everything is rebuilt from `serialize()`; deadlines are wall-clock, so a restart does not extend them.
- `cleanup()` and shutdown never cancel. `on_kill` does, but only after Airflow says that the task no longer waits,
  because the triggerer also calls it when a trigger merely moves to another triggerer.
- A deferral's own timeout would end the task without cancelling the job, so none is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from airflow_provider_raylm.exceptions import RayJobError
from airflow_provider_raylm.hooks.jobs_client import RayJobsClient
from airflow_provider_raylm.hooks.ray import RayHook
from airflow_provider_raylm.job_log import JobLog
from airflow_provider_raylm.outcome import Outcome, State
from airflow_provider_raylm.polling import (
    Ended,
    Expired,
    JobInfo,
    Lost,
    Memory,
    Missing,
    Seen,
    Terms,
    Unanswered,
    Unreachable,
    Wait,
    next_step,
)

logger = logging.getLogger(__name__)

KILL_S = 25.0
"""Airflow gives `on_kill` 30 seconds."""
LOG_GRACE_S = 10.0
"""Seconds that a log stream gets to deliver its rest after the job ended."""
STREAM_AGAIN_S = 5.0
"""Seconds until a stream that ended is opened again, should the job go on (its head restarted)."""
STREAM_BACKOFF_S = 1.0
LOG_CHARS_PER_S = 65536
"""Without a stream the whole log is read again each time; the pause grows with its length to this rate on average."""
LastStep = Ended | Expired | Lost | Unreachable
STREAM_TRIES = 2
"""So many streams in a row that broke before their first character, and no more are tried: a gateway may block them."""


class RayJobTrigger(BaseTrigger):
    """Wait until a Ray job has ended.

    Args:
        submission_id: The job.
        ray_conn_id: Connection of type `ray`.
        poll_interval: Seconds between two looks at the status.
        start_deadline: Epoch seconds by which the job must have left PENDING.
        deadline: Epoch seconds by which it must have ended.
        patience: Seconds for which a cluster that does not answer is tolerated.
        stream_logs: Pass the driver log on to the task's log.
        owns_job: `False` for a job that somebody else submitted: it is never cancelled.
        cancel_on_kill: Cancel the job when the task is marked or cleared.
        requested: What the entrypoint asked for, for the message when it cannot start.
    """

    def __init__(
        self,
        submission_id: str,
        ray_conn_id: str = "ray_default",
        poll_interval: float = 10.0,
        start_deadline: float | None = None,
        deadline: float | None = None,
        patience: float = 600.0,
        stream_logs: bool = True,
        owns_job: bool = True,
        cancel_on_kill: bool = True,
        requested: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.submission_id = submission_id
        self.ray_conn_id = ray_conn_id
        self.poll_interval = poll_interval
        self.start_deadline = start_deadline
        self.deadline = deadline
        self.patience = patience
        self.stream_logs = stream_logs
        self.owns_job = owns_job
        self.cancel_on_kill = cancel_on_kill
        self.requested = requested or {}
        self.hook = RayHook(ray_conn_id)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "submission_id": self.submission_id,
                "ray_conn_id": self.ray_conn_id,
                "poll_interval": self.poll_interval,
                "start_deadline": self.start_deadline,
                "deadline": self.deadline,
                "patience": self.patience,
                "stream_logs": self.stream_logs,
                "owns_job": self.owns_job,
                "cancel_on_kill": self.cancel_on_kill,
                "requested": self.requested,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            outcome = await self.watch()
        except asyncio.CancelledError:
            if not hasattr(BaseTrigger, "on_kill"):  # Airflow 3.1 and 3.2 have only the cancellation itself
                await asyncio.wait_for(self.on_kill(), KILL_S + 5)
            raise
        yield TriggerEvent(outcome.to_event())  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Cancel the job, if someone really ended the task."""
        if not self.owns_job:
            return
        if not self.cancel_on_kill:
            self.log.info("Ray job %s is left running: cancel_on_kill is off", self.submission_id)
            return
        state = await task_state(self.task_instance, timeout_s=5.0)
        if state is None:
            self.log.warning(
                "Ray job %s is left running: Airflow did not say whether this task was killed", self.submission_id
            )
        elif state == "deferred":
            self.log.info("Ray job %s goes on: its trigger moves to another triggerer", self.submission_id)
        else:
            self.log.info("The task is %s: cancelling Ray job %s", state, self.submission_id)
            self.log.info("%s", await self.hook.acancel(self.submission_id, within_s=KILL_S))

    async def watch(self) -> Outcome:
        """Wait for the job's end."""
        log, stream_ended = JobLog(), asyncio.Event()
        terms = Terms(
            poll_interval_s=self.poll_interval,
            start_deadline=self.start_deadline,
            deadline=self.deadline,
            patience_s=self.patience,
        )
        async with await self.hook.client() as client:
            if not self.stream_logs:
                return await self._conclude(client, await self._wait(client, terms, stream_ended), log)
            self.log.info("::group::Log of Ray job %s", self.submission_id)
            follower = asyncio.create_task(self._follow(client, log, stream_ended))
            try:
                step = await self._wait(client, terms, stream_ended)
                if isinstance(step, Ended) and log.position:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(stream_ended.wait(), LOG_GRACE_S)
                await _cancel(follower)
                return await self._conclude(client, step, log, complete=stream_ended.is_set())
            finally:
                await _cancel(follower)
                self.log.info("::endgroup::")

    async def conclude(self, step: LastStep) -> Outcome:
        """The outcome of a job whose last step was found elsewhere."""
        async with await self.hook.client() as client:
            return await self._conclude(client, step, JobLog())

    async def _wait(self, client: RayJobsClient, terms: Terms, stream_ended: asyncio.Event) -> LastStep:
        memory = Memory()
        while True:
            log_had_ended = stream_ended.is_set()
            seen = await self._look(client)
            if isinstance(seen, Unanswered):
                self.log.warning("Ray job %s: %s", self.submission_id, seen.reason)
            memory, step = next_step(terms, memory, seen, time.time())
            if not isinstance(step, Wait):
                return step
            if log_had_ended:
                stream_ended.clear()
            # the end of the log is the end of the job, and comes sooner than the next look
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stream_ended.wait(), max(step.delay_s, 0.01))

    async def _look(self, client: RayJobsClient) -> Seen:
        try:
            return await client.job(self.submission_id) or Missing()
        except RayJobError as exc:
            return Unanswered(exc.message)

    async def _follow(self, client: RayJobsClient, log: JobLog, stream_ended: asyncio.Event) -> None:
        """Pass the log on, from where we are, for as long as this is not cancelled."""
        broken = 0
        while broken < STREAM_TRIES:
            known, got = log.position, 0
            try:
                async for piece in client.tail(self.submission_id):
                    got += len(piece)
                    if got > known:  # a new stream starts from the first character
                        self._show(log.feed(piece[-(got - known) :] if got - known < len(piece) else piece))
                stream_ended.set()
                broken = 0
                await asyncio.sleep(STREAM_AGAIN_S)
            except RayJobError as exc:
                broken = 0 if got else broken + 1
                self.log.debug("%s", exc.message)
                await asyncio.sleep(STREAM_BACKOFF_S * 2.0**broken)
        pause = self.poll_interval
        while True:
            try:
                text = await client.logs(self.submission_id)
                self._show(log.feed(text[log.position :]))
                pause = max(self.poll_interval, len(text) / LOG_CHARS_PER_S)
            except RayJobError as exc:
                pause = min(pause * 2, 300.0)
                self.log.debug("%s", exc.message)
            await asyncio.sleep(pause)

    async def _conclude(self, client: RayJobsClient, step: LastStep, log: JobLog, *, complete: bool = False) -> Outcome:
        """Cancel what must not go on, read the rest of the log, and say how the job ended."""
        name = f"Ray job {self.submission_id}"
        if isinstance(step, Lost):
            return self._failure(
                "lost",
                f"The cluster answers, but does not know {name} any more: its head was replaced, and what the job did "
                "is unknown. A retry submits it again.",
                log,
            )
        if isinstance(step, Unreachable):
            return self._failure(
                "unreachable",
                f"The cluster did not answer for {self.patience:.0f} s ({step.reason}). {name} may still run; a retry "
                "finds it.",
                log,
            )
        if isinstance(step, Ended):
            await self._read_rest(client, log, complete)
            return _ended(step.job, log)
        starved = f" {await self._starvation(client)}" if step.which == "start_timeout" else ""
        end = (
            await self.hook.acancel(self.submission_id)
            if self.owns_job
            else "It was not cancelled, because this task did not submit it."
        )
        await self._read_rest(client, log, complete=False)
        verb = "started" if step.which == "start_timeout" else "ended"
        return self._failure(step.which, f"{name} had not {verb} by its {step.which}.{starved} {end}", log)

    def _failure(self, state: State, reason: str, log: JobLog) -> Outcome:
        return Outcome(submission_id=self.submission_id, state=state, reason=reason, log_tail=tuple(log.tail))

    async def _read_rest(self, client: RayJobsClient, log: JobLog, complete: bool) -> None:
        lines: list[str] = []
        if not complete:
            try:
                lines = log.feed((await client.logs(self.submission_id))[log.position :])
            except RayJobError as exc:
                self.log.warning("The end of the log could not be read: %s", exc.message)
        lines += log.finish()
        if self.stream_logs:
            self._show(lines)

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self.log.info("%s", line)

    async def _starvation(self, client: RayJobsClient) -> str:
        """What the entrypoint asked for, and what the cluster says it has."""
        asked = ", ".join(f"{k}={v}" for k, v in self.requested.items()) or "no resources"
        try:
            status = await client.cluster_status()
        except RayJobError:
            status = ""
        return f"Its entrypoint asked for {asked}; the cluster has {_total(status) or '(it did not say)'}."


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _total(status: str) -> str:
    """The lines below `Total Usage:` in what `ray status` prints: `0.0/4.0 CPU, 0B/21.30GiB memory, ...`."""
    lines = [line.strip() for line in status.partition("Total Usage:")[2].splitlines()]
    used = [line for line in lines[1:] if line]
    end = next((i for i, line in enumerate(used) if "/" not in line), len(used))
    return ", ".join(used[:end])


def _ended(job: JobInfo, log: JobLog) -> Outcome:
    name = f"Ray job {job.submission_id}"
    state: State = "failed"
    reason, error_type = "", job.error_type
    if job.status == "SUCCEEDED":
        state = "succeeded"
    elif job.status == "STOPPED":
        state = "stopped"
        reason = f"{name} was stopped, and not by this task."
    elif log.error is not None:
        error_type = str(log.error.get("type"))
        reason = f"{log.error.get('message')} ({error_type} in {name})"
    else:
        # Ray repeats the last log lines below its first line; we have them ourselves
        said = job.message.partition(", last available logs")[0] if log.tail else job.message
        reason = f"{name} failed: {said.strip() or 'Ray gave no reason'}."
    return Outcome(
        submission_id=job.submission_id,
        state=state,
        reason=reason,
        exit_code=job.exit_code,
        error_type=error_type,
        result=log.result,
        log_tail=tuple(log.tail),
    )


async def task_state(ti: Any, *, timeout_s: float) -> str | None:
    """The state that Airflow now has for the task instance `ti`.

    Returns:
        `None` if it could not be found out; `cleared` if the task has no state or is gone.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    if ti is None:
        return None
    try:
        states = await asyncio.wait_for(
            # not asyncio.to_thread: Airflow 3.1 would read from its supervisor on two event loops at once, and die
            sync_to_async(RuntimeTaskInstance.get_task_states)(
                dag_id=ti.dag_id,
                task_ids=[ti.task_id],
                run_ids=[ti.run_id],
                map_index=ti.map_index,
            ),
            timeout_s,
        )
    except Exception as exc:
        logger.warning("The state of task %s could not be read: %r", ti.task_id, exc)
        return None
    return next((str(state) for state in (states.get(ti.run_id) or {}).values() if state), "cleared")

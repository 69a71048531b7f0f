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

from airflow_provider_raylm.exceptions import RayJobError, RayUnreachableError
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
LOG_BYTES_PER_S = 65536
"""Without a stream the whole log is read again each time; the pause grows with its length to this rate on average."""
STREAM_TRIES = 3
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
        log, terms = (
            JobLog(),
            Terms(
                poll_interval_s=self.poll_interval,
                start_deadline=self.start_deadline,
                deadline=self.deadline,
                patience_s=self.patience,
            ),
        )
        stream_ended = asyncio.Event()
        async with await self.hook.client() as client:
            follower = None
            if self.stream_logs:
                self.log.info("::group::Log of Ray job %s", self.submission_id)
                follower = asyncio.create_task(self._follow(client, log, stream_ended))
            try:
                step = await self._wait(client, terms, stream_ended)
                if isinstance(step, Ended):
                    await self._finish_log(client, log, follower, stream_ended)
            finally:
                if follower is not None:
                    follower.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await follower
                    self._show(log.finish())
                    self.log.info("::endgroup::")
            return await self._outcome(client, step, log)

    async def conclude(self, step: Ended | Expired | Lost | Unreachable) -> Outcome:
        """The outcome of a job whose last step was found elsewhere."""
        log = JobLog()
        async with await self.hook.client() as client:
            if isinstance(step, Ended):
                await self._finish_log(client, log, None, asyncio.Event())
            return await self._outcome(client, step, log)

    async def _wait(
        self, client: RayJobsClient, terms: Terms, stream_ended: asyncio.Event
    ) -> Ended | Expired | Lost | Unreachable:
        memory = Memory()
        while True:
            seen = await self._look(client)
            if isinstance(seen, Unanswered):
                self.log.warning("Ray job %s: %s", self.submission_id, seen.reason)
            memory, step = next_step(terms, memory, seen, time.time())
            if not isinstance(step, Wait):
                return step
            # the end of the log is the end of the job, and comes sooner than the next look
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stream_ended.wait(), max(step.delay_s, 0.01))
            stream_ended.clear()

    async def _look(self, client: RayJobsClient) -> Seen:
        try:
            return await client.job(self.submission_id) or Missing()
        except RayJobError as exc:
            return Unanswered(exc.message)

    async def _follow(self, client: RayJobsClient, log: JobLog, stream_ended: asyncio.Event) -> None:
        """Pass the log on, from where we are, for as long as this is not cancelled."""
        broken = 0
        while broken < STREAM_TRIES:
            skip, got = log.position, 0
            try:
                async for piece in client.tail(self.submission_id):
                    got += len(piece)
                    if new := piece[max(0, len(piece) - (got - skip)) :] if got > skip else "":
                        self._show(log.feed(new))
                stream_ended.set()
                broken = 0
            except RayUnreachableError as exc:
                broken = 0 if got else broken + 1
                self.log.debug("%s", exc.message)
            await asyncio.sleep(min(2.0**broken, 30.0))
        pause = self.poll_interval
        while True:
            try:
                text = await client.logs(self.submission_id)
                self._show(log.feed(text[log.position :]))
                pause = max(self.poll_interval, len(text) / LOG_BYTES_PER_S)
            except RayJobError as exc:
                pause = min(pause * 2, 300.0)
                self.log.debug("%s", exc.message)
            await asyncio.sleep(pause)

    async def _finish_log(
        self, client: RayJobsClient, log: JobLog, follower: asyncio.Task[None] | None, stream_ended: asyncio.Event
    ) -> None:
        """Read what is left of the log of a job that has ended."""
        if follower is not None and log.position:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stream_ended.wait(), LOG_GRACE_S)
        if follower is not None:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follower
        try:
            text = await client.logs(self.submission_id)
        except RayJobError as exc:
            self.log.warning("The end of the log could not be read: %s", exc.message)
            return
        lines = log.feed(text[log.position :]) + log.finish()
        if self.stream_logs:
            self._show(lines)

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self.log.info("%s", line)

    async def _outcome(self, client: RayJobsClient, step: Ended | Expired | Lost | Unreachable, log: JobLog) -> Outcome:
        name = f"Ray job {self.submission_id}"
        tail = tuple(log.tail)
        if isinstance(step, Ended):
            return _ended(step.job, log)
        state: State
        if isinstance(step, Lost):
            state, reason = (
                "lost",
                f"The cluster answers, but does not know {name} any more: its head was replaced, "
                "and what the job did is unknown. A retry submits it again.",
            )
        elif isinstance(step, Unreachable):
            state, reason = (
                "unreachable",
                f"The cluster did not answer for {self.patience:.0f} s ({step.reason}). {name} may still run; "
                "a retry finds it.",
            )
        elif step.which == "start_timeout":
            state = "start_timeout"
            reason = f"{name} had not started by its start_timeout.{await self._starvation(client)} {await self._end()}"
        else:
            state, reason = "timeout", f"{name} had not ended by its timeout. {await self._end()}"
        return Outcome(submission_id=self.submission_id, state=state, reason=reason, log_tail=tail)

    async def _end(self) -> str:
        if not self.owns_job:
            return "It was not cancelled, because this task did not submit it."
        return await self.hook.acancel(self.submission_id)

    async def _starvation(self, client: RayJobsClient) -> str:
        """What the entrypoint asked for, and what the cluster says it has."""
        asked = ", ".join(f"{k}={v}" for k, v in self.requested.items() if v) or "no resources"
        try:
            status = await client.cluster_status()
        except RayJobError:
            status = ""
        _, _, resources = status.partition("Resources")
        has = "; ".join(line.strip(" -") for line in resources.splitlines() if line.strip(" -"))
        return f" Its entrypoint asked for {asked}; the cluster has: {has[:600] or 'it did not say'}."


def _ended(job: JobInfo, log: JobLog) -> Outcome:
    name = f"Ray job {job.submission_id}"
    error_type = job.error_type
    if job.status == "SUCCEEDED":
        return Outcome(submission_id=job.submission_id, state="succeeded", exit_code=job.exit_code, result=log.result)
    if job.status == "STOPPED":
        state: State = "stopped"
        reason = f"{name} was stopped. This task did not do it: someone else did, or an earlier attempt was cancelled."
    else:
        state = "failed"
        # Ray repeats the last log lines below its first line; we have them ourselves
        said = job.message.partition(", last available logs")[0] if log.tail else job.message
        reason = f"{name} failed: {said.strip() or 'Ray gave no reason'}."
        if log.error is not None:
            error_type = str(log.error.get("type") or error_type)
            reason = f"{log.error.get('message')} ({error_type}, {name})"
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
            asyncio.to_thread(
                RuntimeTaskInstance.get_task_states,
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

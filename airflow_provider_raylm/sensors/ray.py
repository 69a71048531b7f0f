"""Wait for a Ray job that somebody else submitted. It is never cancelled from here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk import BaseSensorOperator, PokeReturnValue

from airflow_provider_raylm.exceptions import RayJobError
from airflow_provider_raylm.hooks import loop
from airflow_provider_raylm.hooks.ray import RayHook
from airflow_provider_raylm.outcome import Outcome
from airflow_provider_raylm.polling import Memory, Missing, Seen, Terms, Unanswered, Wait, next_step
from airflow_provider_raylm.triggers.ray import RayJobTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class RayJobSensor(BaseSensorOperator):
    """Wait until a Ray job has SUCCEEDED; fail when it FAILED or was STOPPED.

    Returns `{"submission_id", "status", "result"}`, as `RaySubmitJobOperator` does.

    Args:
        submission_id: The job.
        ray_conn_id: Connection of type `ray`.
        deferrable: Wait in the triggerer. Default from `[operators] default_deferrable`.
        patience: Seconds for which a cluster that does not answer is tolerated. In `reschedule` mode every look is a
            new process, and only the sensor's own `timeout` counts.
        stream_logs: Copy the driver log into the task's log, if deferrable.
        **kwargs: `poke_interval`, `timeout`, `mode`, ... of every sensor.
    """

    template_fields: Sequence[str] = ("submission_id", "ray_conn_id")
    ui_color = "#e3f2fd"

    def __init__(
        self,
        *,
        submission_id: str,
        ray_conn_id: str = RayHook.default_conn_name,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        patience: float = 600.0,
        stream_logs: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.submission_id = submission_id
        self.ray_conn_id = ray_conn_id
        self.deferrable = deferrable
        self.patience = patience
        self.stream_logs = stream_logs
        self._memory = Memory()

    @cached_property
    def hook(self) -> RayHook:
        """The hook of `ray_conn_id`."""
        return RayHook(self.ray_conn_id)

    def execute(self, context: Context) -> Any:
        """Wait in the triggerer, or look again and again here."""
        if self.deferrable:
            self.defer(trigger=self._trigger(time.time() + self.timeout), method_name="execute_complete")
        return super().execute(context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Take up the task where the trigger left it."""
        return self._conclude(Outcome.from_event(event))

    def poke(self, context: Context) -> PokeReturnValue:
        """Look once."""
        self._memory, step = next_step(Terms(patience_s=self.patience), self._memory, self._look(), time.time())
        if isinstance(step, Wait):
            return PokeReturnValue(is_done=False)
        trigger = self._trigger(None)
        trigger.hook, trigger.stream_logs = self.hook, False
        return PokeReturnValue(is_done=True, xcom_value=self._conclude(loop.run(lambda: trigger.conclude(step))))

    def _look(self) -> Seen:
        try:
            return self.hook.get_job(self.submission_id) or Missing()
        except RayJobError as exc:
            self.log.warning("Ray job %s: %s", self.submission_id, exc.message)
            return Unanswered(exc.message)

    def _trigger(self, deadline: float | None) -> RayJobTrigger:
        return RayJobTrigger(
            submission_id=self.submission_id,
            ray_conn_id=self.ray_conn_id,
            poll_interval=float(self.poke_interval),
            deadline=deadline,
            patience=self.patience,
            stream_logs=self.stream_logs,
            owns_job=False,
        )

    def _conclude(self, outcome: Outcome) -> dict[str, Any]:
        if error := outcome.error():
            raise error
        return {"submission_id": outcome.submission_id, "status": "SUCCEEDED", "result": outcome.result}

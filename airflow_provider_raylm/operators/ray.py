"""Submit a Ray job and wait for it, once per attempt of intent.

Whatever happens to the worker, the triggerer or the network, there is one job per task instance and input: ids are
deterministic, so a retry finds the job of the attempt before it (`attempts.py` decides). Nothing ends green that the
job did not end green.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import BaseOperator
from pydantic import TypeAdapter, ValidationError

from airflow_provider_raylm import job_package
from airflow_provider_raylm.attempts import (
    FINGERPRINT_LABEL,
    TRY_LABEL,
    Adopt,
    Attach,
    Reuse,
    Submit,
    Supersede,
    attempt_id,
    choose,
    id_stem,
)
from airflow_provider_raylm.exceptions import RayJobError, RayJobFailedError, RayUnreachableError, SpecError
from airflow_provider_raylm.hooks import loop
from airflow_provider_raylm.hooks.ray import CANCEL_S, RayHook
from airflow_provider_raylm.links import LINK_KEY, RayJobLink
from airflow_provider_raylm.outcome import Outcome
from airflow_provider_raylm.polling import JobInfo
from airflow_provider_raylm.spec import RESULT_PREFIX, Spec, one_of
from airflow_provider_raylm.triggers.ray import RayJobTrigger, task_state

if TYPE_CHECKING:
    from airflow.sdk import Context

RECORD_KEY = "raylm_job"
"""Key in Airflow's task state store (3.3 and later) of the last submission id: no gap hides a job from a retry."""
ON_KILL_S = 3.5
"""Airflow kills a task process for good 5 seconds after it told it to stop."""
NATIVE_HINT = ". If it is a template, set render_template_as_native_obj=True on the DAG"
SECRET_FIELDS = frozenset({"api_key", "access_key_id", "secret_access_key", "session_token"})
"""Of a spec; they change with every short-lived credential, and are no input."""


class RaySubmitJobOperator(BaseOperator):
    """Run a command on a Ray cluster as a Ray job.

    Returns `{"submission_id", "status", "result"}`; `result` is what the job printed as `raylm.result {json}`.

    Args:
        entrypoint: Shell command.
        runtime_env: As Ray takes it: `working_dir`, `py_modules`, `pip`, `env_vars`, ... Shown in clear by the
            dashboard.
        entrypoint_num_cpus, entrypoint_num_gpus, entrypoint_memory, entrypoint_resources: What the command itself
            reserves. With none it runs on the head node.
        metadata: More labels for the job.
        submission_id: Instead of the id made from dag, task, run and map index. An attempt number is added
            all the same.
        ray_conn_id: Connection of type `ray`.
        deferrable: Wait in the triggerer. Default from `[operators] default_deferrable`.
        poll_interval: Seconds between two looks at the job.
        start_timeout: Seconds the job may be PENDING. `None` waits as long as Ray does.
        timeout: Seconds from this attempt's start to the job's end. `None` has no limit but `execution_timeout`.
            On either the job is cancelled and the task fails.
        patience: Seconds for which a cluster that does not answer is asked again.
        cancel_on_kill: Cancel the job when the task is marked failed or success, or cleared.
        stream_logs: Copy the driver log into the task's log.
        reuse_succeeded: When a job that SUCCEEDED with the same input answers for this attempt: `unreported` (default)
            only if the attempt that ran it died before it could hand on the result, so that a cleared task runs again;
            `always`, also for a cleared task; `never`. The content of input data is no part of the comparison.
    """

    template_fields: Sequence[str] = (
        "entrypoint",
        "runtime_env",
        "entrypoint_resources",
        "metadata",
        "submission_id",
        "ray_conn_id",
    )
    template_fields_renderers = {"entrypoint": "bash", "runtime_env": "json", "metadata": "json"}  # noqa: RUF012
    operator_extra_links = (RayJobLink(),)
    ui_color = "#e3f2fd"

    def __init__(
        self,
        *,
        entrypoint: str,
        runtime_env: dict[str, Any] | None = None,
        entrypoint_num_cpus: float | None = None,
        entrypoint_num_gpus: float | None = None,
        entrypoint_memory: int | None = None,
        entrypoint_resources: dict[str, float] | None = None,
        metadata: dict[str, str] | None = None,
        submission_id: str | None = None,
        ray_conn_id: str = RayHook.default_conn_name,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poll_interval: float = 10.0,
        start_timeout: float | None = 900.0,
        timeout: float | None = None,
        patience: float = 600.0,
        cancel_on_kill: bool = True,
        stream_logs: bool = True,
        reuse_succeeded: Reuse = "unreported",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        one_of("reuse_succeeded", reuse_succeeded, Reuse)
        self.entrypoint = entrypoint
        self.runtime_env = runtime_env
        self.entrypoint_num_cpus = entrypoint_num_cpus
        self.entrypoint_num_gpus = entrypoint_num_gpus
        self.entrypoint_memory = entrypoint_memory
        self.entrypoint_resources = entrypoint_resources
        self.metadata = metadata
        self.submission_id = submission_id
        self.ray_conn_id = ray_conn_id
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self.start_timeout = start_timeout
        self.timeout = timeout
        self.patience = patience
        self.cancel_on_kill = cancel_on_kill
        self.stream_logs = stream_logs
        self.reuse_succeeded = reuse_succeeded
        self.job_url = ""
        self._job_id: str | None = None
        self._ti: Any = None
        self._timed_out = False

    def spec(self, context: Context) -> Any:
        """What the job is told: a dataclass of `spec.py`, or `None` for a job that needs no spec of ours.

        Raises:
            SpecError: What was asked for is wrong.
        """
        return None

    def job_runtime_env(self) -> dict[str, Any]:
        """The `runtime_env` to submit with."""
        return dict(self.runtime_env or {})

    def result(self, outcome: Outcome, context: Context) -> Any:
        """What the task returns after a success.

        Raises:
            RayJobFailedError: The job ended well but did not say what it did.
        """
        return {"submission_id": outcome.submission_id, "status": "SUCCEEDED", "result": outcome.result}

    @cached_property
    def hook(self) -> RayHook:
        """The hook of `ray_conn_id`."""
        return RayHook(self.ray_conn_id)

    def execute(self, context: Context) -> Any:
        """Find or submit the job, then wait for it here or in the triggerer.

        Raises:
            AirflowFailException: What was asked for is wrong; the task fails at once, since a retry does not help.
            RayJobError: The job did not end well; see its subclasses.
        """
        try:
            self._check_seconds()
            self._start(context)
        except SpecError as exc:
            raise AirflowFailException(exc.message) from None
        except BaseException as exc:
            self._note_timeout(exc)
            raise
        trigger = self._trigger(context)
        if self.deferrable:
            job = self._ask(trigger.submission_id)
            if job is None or not job.ended:  # a job that has ended needs no trigger
                self.defer(trigger=trigger, method_name="execute_complete")
        trigger.hook = self.hook
        try:
            outcome = loop.run(trigger.watch)
        except BaseException as exc:
            self._note_timeout(exc)
            raise
        return self._conclude(context, outcome)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Take up the task where the trigger left it."""
        outcome = Outcome.from_event(event)
        self._job_id = outcome.submission_id
        self.job_url = self.hook.job_url(outcome.submission_id)
        return self._conclude(context, outcome)

    def on_kill(self) -> None:
        """Cancel this attempt's job, if the task was really ended and not just its worker."""
        if self._job_id is None:
            return
        if not self.cancel_on_kill:
            self.log.info("Ray job %s is left running: cancel_on_kill is off", self._job_id)
            return
        if not self._timed_out:
            ti = self._ti
            state = loop.run(lambda: task_state(ti, timeout_s=1.0))
            if state in (None, "running"):
                self.log.warning(
                    "Ray job %s is left running: the task is %s in Airflow, so only its worker is going down, and a "
                    "retry will find the job",
                    self._job_id,
                    state or "of unknown state",
                )
                return
        self.log.info("Cancelling Ray job %s", self._job_id)
        self.log.info("%s", self.hook.cancel(self._job_id, within_s=CANCEL_S if self._timed_out else ON_KILL_S))

    def _note_timeout(self, exc: BaseException) -> None:
        self._timed_out = type(exc).__name__ == "AirflowTaskTimeout"  # Airflow calls on_kill next

    # --- before -----------------------------------------------------------------------------------------------------

    def _start(self, context: Context) -> None:
        """Find the job of an earlier attempt, or submit a new one."""
        spec = self.spec(context)
        env = self.job_runtime_env()
        fingerprint = self._fingerprint(spec, env)
        ti = context["ti"]
        stem = self.submission_id or id_stem(
            conf.get("api", "base_url", fallback=""), ti.dag_id, ti.task_id, ti.run_id, map_index(ti)
        )
        choice = choose(
            stem,
            self._earlier(stem, self._recorded(context)),
            fingerprint=fingerprint,
            try_number=ti.try_number,
            first_try=ti.max_tries - (self.retries or 0) + 1,  # clearing a task raises its max_tries
            reuse=self.reuse_succeeded,
            replace_cleared=self.cancel_on_kill,
        )
        self._ti, self._job_id = ti, choice.submission_id
        self.job_url = self.hook.job_url(choice.submission_id)
        ti.xcom_push(key=LINK_KEY, value=self.job_url)
        if isinstance(choice, Attach):
            self.log.info("Ray job %s of an earlier attempt still runs: waiting for it", choice.submission_id)
        elif isinstance(choice, Adopt):
            self.log.info("Ray job %s succeeded with the same input: taking its result", choice.submission_id)
        else:
            if isinstance(choice, Supersede):
                self.log.warning("Ray job %s of an earlier attempt is out of date: cancelling", choice.running_id)
                became = self.hook.cancel(choice.running_id)
                if (old := self._ask(choice.running_id)) is not None and not old.ended:
                    raise RayJobError(f"{became} No second job is started beside it.", submission_id=choice.running_id)
                self.log.info("%s", became)
            self._submit(choice, spec, env, self._labels(ti, fingerprint))
        if (store := context.get("task_state_store")) is not None:
            store.set(RECORD_KEY, choice.submission_id)

    def _check_seconds(self) -> None:
        """Numbers may come as text, from templates and variables; better found before there is a job."""
        for name in ("poll_interval", "start_timeout", "timeout", "patience"):
            value = getattr(self, name)
            if value is None and name in ("start_timeout", "timeout"):
                continue
            setattr(self, name, seconds(name, value))

    def _submit(self, choice: Submit | Supersede, spec: Any, env: dict[str, Any], labels: dict[str, str]) -> None:
        package: AbstractContextManager[Path | None]
        package = contextlib.nullcontext() if spec is None else job_package.staged(spec)
        with package as module:
            self.hook.submit_job(
                entrypoint=self.entrypoint,
                submission_id=choice.submission_id,
                runtime_env=env,
                modules=[str(module)] if module else None,
                metadata=labels,
                patience_s=self.patience,
                **self._requested(),
            )
        self.log.info("Submitted Ray job %s: %s", choice.submission_id, self.job_url)

    def _requested(self) -> dict[str, Any]:
        return {
            name: value
            for name in ("entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_memory", "entrypoint_resources")
            if (value := getattr(self, name))
        }

    def _labels(self, ti: Any, fingerprint: str) -> dict[str, str]:
        labels = {
            **(self.metadata or {}),
            "dag_id": ti.dag_id,
            "task_id": ti.task_id,
            "run_id": ti.run_id,
            "map_index": map_index(ti),
            TRY_LABEL: ti.try_number,
            FINGERPRINT_LABEL: fingerprint,
        }
        return {str(k): str(v) for k, v in labels.items()}

    def _fingerprint(self, spec: Any, env: dict[str, Any]) -> str:
        what = {
            "entrypoint": self.entrypoint,
            "runtime_env": {**env, **_local_files(env)},
            "requested": self._requested(),
            "spec": None if spec is None else _without_secrets(dataclasses.asdict(spec)),
            "code": None if spec is None else job_package.code_version(),
        }
        try:
            text = json.dumps(what, sort_keys=True)
        except TypeError as exc:
            raise SpecError(f"runtime_env or spec of {self.task_id!r} is not JSON: {exc}") from exc
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _recorded(self, context: Context) -> str:
        store = context.get("task_state_store")
        return str(store.get(RECORD_KEY) or "") if store is not None else ""

    def _earlier(self, stem: str, recorded: str) -> list[JobInfo | None]:
        """The jobs stem-1, stem-2, ... up to the first two numbers in a row that the cluster does not know."""
        number = recorded.removeprefix(f"{stem}-")
        floor = int(number) if number.isdigit() else 0
        jobs: list[JobInfo | None] = []
        while len(jobs) < floor or not jobs or jobs[-1] is not None or jobs[-2:-1] != [None]:
            jobs.append(self._ask(attempt_id(stem, len(jobs) + 1)))
        while len(jobs) > floor and jobs[-1] is None:
            jobs.pop()
        return jobs

    def _ask(self, submission_id: str) -> JobInfo | None:
        """Ask for one job, for as long as patience lasts: not knowing might run a job twice."""
        deadline, pause = time.monotonic() + self.patience, 1.0
        while True:
            try:
                return self.hook.get_job(submission_id)
            except RayUnreachableError as exc:
                if time.monotonic() + pause > deadline:
                    raise
                self.log.warning("%s; trying again in %.0f s", exc.message, pause)
                time.sleep(pause)
                pause = min(pause * 2, 30.0)

    def _trigger(self, context: Context) -> RayJobTrigger:
        now = time.time()
        deadlines = [now + self.timeout] if self.timeout is not None else []
        if self.deferrable and self.execution_timeout is not None:
            deadlines.append(context["ti"].start_date.timestamp() + self.execution_timeout.total_seconds())
        if self._job_id is None:
            raise RayJobError("no job was submitted")
        return RayJobTrigger(
            submission_id=self._job_id,
            ray_conn_id=self.ray_conn_id,
            poll_interval=self.poll_interval,
            start_deadline=now + self.start_timeout if self.start_timeout is not None else None,
            deadline=min(deadlines, default=None),
            patience=self.patience,
            stream_logs=self.stream_logs,
            cancel_on_kill=self.cancel_on_kill,
            requested=self._requested(),
        )

    def _conclude(self, context: Context, outcome: Outcome) -> Any:
        if error := outcome.error():
            if outcome.error_type == SpecError.__name__:
                raise AirflowFailException(outcome.reason)
            raise error
        return self.result(outcome, context)


def required_result(outcome: Outcome) -> dict[str, Any]:
    """The answer of a job that has to give one.

    Raises:
        RayJobFailedError: The job ended SUCCEEDED, but its log holds no answer.
    """
    if outcome.result is None:
        raise RayJobFailedError(
            f"Ray job {outcome.submission_id} ended SUCCEEDED, but its log holds no {RESULT_PREFIX.strip()!r} line, so "
            "what it did is unknown. Was its entrypoint replaced, or its log lost with its node?",
            submission_id=outcome.submission_id,
        )
    return outcome.result


def seconds(name: str, value: Any) -> float:
    """A duration as a number.

    Raises:
        SpecError: It is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SpecError(f"{name} is a number of seconds, got {value!r}") from None


def checked(spec: Spec, task_id: str) -> Spec:
    """The spec with every value of its declared type; numbers that came as text are numbers.

    Raises:
        SpecError: Naming each field that is of another type. Values are not shown: they may be secret.
    """
    try:
        return TypeAdapter(type(spec)).validate_python(dataclasses.asdict(spec))  # type: ignore[call-overload]
    except ValidationError as exc:
        wrong = [
            f"{'.'.join(map(str, error['loc']))}: {error['msg'].lower()}, got {type(error['input']).__name__}"
            for error in exc.errors(include_url=False)
        ]
        hint = NATIVE_HINT if any(isinstance(error["input"], str) for error in exc.errors()) else ""
        raise SpecError(f"{task_id}: {'; '.join(wrong)}{hint}") from None


def map_index(ti: Any) -> int:
    index = getattr(ti, "map_index", None)
    return -1 if index is None else int(index)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_secrets(v) for k, v in value.items() if k not in SECRET_FIELDS}
    if isinstance(value, (list, tuple)):
        return [_without_secrets(item) for item in value]
    return value


def _local_files(env: dict[str, Any]) -> dict[str, Any]:
    """`working_dir` and `py_modules` of `env` with local paths replaced by what is there: only content is input.

    The path of the same folder differs between workers, and so do hidden files (`.git`) and `__pycache__`.
    """
    named = {key: env[key] for key in ("working_dir", "py_modules") if env.get(key)}
    return {
        key: [_content(path) for path in value] if isinstance(value, list) else _content(value)
        for key, value in named.items()
    }


def _content(path: Any) -> Any:
    if not isinstance(path, str) or "://" in path:
        return path
    root, digest = Path(path), hashlib.sha256()
    for file in [root] if root.is_file() else sorted(root.rglob("*")):
        inside = file.relative_to(root).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inside):
            digest.update("/".join(inside).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()

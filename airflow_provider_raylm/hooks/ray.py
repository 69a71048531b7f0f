"""Airflow connection in, Ray Jobs API out.

A connection of type `ray`: host is the URL of the dashboard or of a gateway before it, password is the token, and the
extras say what else the gateway wants. Everything the cluster is asked goes to that address and carries only what the
connection holds, whatever the worker's environment says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException
from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_provider_raylm.exceptions import (
    RayAccessError,
    RayJobError,
    RaylmError,
    RaySubmitError,
    RayUnreachableError,
    SpecError,
)
from airflow_provider_raylm.hooks import loop
from airflow_provider_raylm.hooks.jobs_client import Cluster, RayJobsClient
from airflow_provider_raylm.hooks.submission import submission_client
from airflow_provider_raylm.polling import JobInfo

if TYPE_CHECKING:
    from airflow.sdk import Connection
    from ray.job_submission import JobSubmissionClient

CANCEL_S = 60.0
"""Seconds within which a cancelled job must be terminal before we say that we could not confirm it."""
KILL_PENDING_S = 3.0
"""Seconds that a job which is asked to stop may stay PENDING; it may be about to start, and then stops by itself."""
_LOOK_AGAIN_S = 0.5
KNOWN_EXTRAS = frozenset({"headers", "cookies", "verify", "request_timeout", "dashboard_url", "auth_from_environment"})
log = logging.getLogger(__name__)
_KILL_ACTOR = (
    "import ray; ray.init(address='auto', log_to_driver=False); "
    "ray.kill(ray.get_actor({actor!r}, namespace='SUPERVISOR_ACTOR_RAY_NAMESPACE'))"
)


class RayHook(BaseHook):
    """Talk to one Ray cluster through its Jobs API.

    Args:
        ray_conn_id: Connection of type `ray`.
    """

    conn_name_attr = "ray_conn_id"
    default_conn_name = "ray_default"
    conn_type = "ray"
    hook_name = "Ray"

    def __init__(self, ray_conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.ray_conn_id = ray_conn_id
        self._cluster: Cluster | None = None

    def cluster(self) -> Cluster:
        """The cluster that the connection describes; read once."""
        if self._cluster is None:
            self._cluster = _masked(cluster_from_connection(connection_of(self.ray_conn_id, "ray_conn_id")))
        return self._cluster

    async def acluster(self) -> Cluster:
        """`cluster` without blocking the event loop."""
        if self._cluster is None:
            try:
                connection = await self.aget_connection(self.ray_conn_id)
            except AirflowNotFoundException:
                raise _no_connection(self.ray_conn_id, "ray_conn_id") from None
            self._cluster = _masked(await asyncio.to_thread(cluster_from_connection, connection))
        return self._cluster

    async def client(self) -> RayJobsClient:
        """An asynchronous client, to be entered with `async with`."""
        return RayJobsClient(await self.acluster())

    def get_conn(self) -> JobSubmissionClient:
        """Ray's own client, with timeouts, bound to the connection's address."""
        return submission_client(self.cluster())

    def submit_job(
        self,
        *,
        entrypoint: str,
        submission_id: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        modules: list[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        patience_s: float = 600.0,
        **resources: Any,
    ) -> str:
        """Upload what the job needs and submit it once, however often the network fails.

        Args:
            entrypoint: Shell command, run on the head node unless `resources` are asked for.
            submission_id: The job's id; Ray makes one if `None`, and a lost reply is then not repeated.
            runtime_env: As Ray takes it; local `working_dir` and `py_modules` are uploaded.
            modules: Local package folders, uploaded whole: the `excludes` of `runtime_env` do not apply to them.
            metadata: Labels; shown in clear.
            patience_s: Seconds for which a cluster that does not answer is asked again.
            **resources: `entrypoint_num_cpus`, `entrypoint_num_gpus`, `entrypoint_memory`, `entrypoint_resources`.

        Returns:
            The submission id.

        Raises:
            RaySubmitError: The cluster did not take the job.
            RayAccessError: The credentials were refused.
        """
        client = self.get_conn()
        deadline, pause = time.monotonic() + patience_s, 1.0
        while True:
            try:
                env = dict(runtime_env or {})
                if modules:
                    uploaded: dict[str, Any] = {"py_modules": list(modules)}
                    client._upload_py_modules_if_needed(uploaded)
                    env["py_modules"] = [*uploaded["py_modules"], *env.get("py_modules", [])]
                return str(
                    client.submit_job(
                        entrypoint=entrypoint,
                        submission_id=submission_id,
                        runtime_env=env,
                        metadata=dict(metadata or {}),
                        **resources,
                    )
                )
            except RayUnreachableError as exc:
                # Ray answers 500 also to what can never succeed, and quotes the 400 of its agent
                final = submission_id is None or "status code 400" in exc.message
                if submission_id is not None and self._submitted(submission_id):
                    return submission_id  # it got through, and only the answer was lost
                if final or time.monotonic() + pause > deadline:
                    raise RaySubmitError(
                        f"the job was not submitted: {exc.message}", submission_id=submission_id
                    ) from exc
                self.log.warning("Submitting %s: %s; trying again in %.0f s", submission_id, exc.message, pause)
                time.sleep(pause)
                pause = min(pause * 2, 30.0)
            except RayAccessError:
                raise
            except RaylmError as exc:
                raise RaySubmitError(f"the job was not submitted: {exc.message}", submission_id=submission_id) from exc
            except (RuntimeError, ValueError, TypeError, OSError) as exc:  # Ray's own, before anything is sent
                raise RaySubmitError(
                    f"the job was not submitted: {type(exc).__name__}: {exc}", submission_id=submission_id
                ) from exc

    def _submitted(self, submission_id: str) -> bool:
        try:
            return self.get_job(submission_id) is not None
        except (RayUnreachableError, RayAccessError):
            return False

    def get_job(self, submission_id: str) -> JobInfo | None:
        """The job, `None` if the cluster has no such job."""

        async def ask() -> JobInfo | None:
            async with RayJobsClient(cluster) as client:
                return await client.job(submission_id)

        cluster = self.cluster()
        return loop.run(ask)

    def get_logs(self, submission_id: str) -> str:
        """The whole driver log so far."""

        async def ask() -> str:
            async with RayJobsClient(cluster) as client:
                return await client.logs(submission_id)

        cluster = self.cluster()
        return loop.run(ask)

    def cancel(self, submission_id: str, *, within_s: float = CANCEL_S) -> str:
        """`acancel` from synchronous code."""
        self.cluster()
        return loop.run(lambda: self.acancel(submission_id, within_s=within_s))

    async def acancel(self, submission_id: str, *, within_s: float = CANCEL_S) -> str:
        """Stop a job and see that it stopped.

        A job that is still PENDING does not notice Ray's stop: it would start, perhaps hours later, only to be stopped
        then. Its supervisor is killed instead, by a small job, because the Jobs API has no other way to do it.

        Returns:
            One sentence that says what became of the job, also when that could not be confirmed.
        """
        started = time.monotonic()
        last, asked, killed = "no answer", False, False
        async with await self.client() as client:
            while True:
                try:
                    job = await client.job(submission_id)
                    if job is None:
                        return f"Ray job {submission_id} is not known to the cluster any more."
                    if job.ended:
                        return f"Ray job {submission_id} is {job.status}."
                    last = job.status
                    if not asked:
                        await client.stop(submission_id)
                        asked = True
                    elif (
                        last == "PENDING"
                        and not killed
                        and time.monotonic() - started > min(KILL_PENDING_S, within_s / 3)
                    ):
                        await self._kill_pending(client, submission_id)
                        killed = True
                except RayJobError as exc:
                    last = exc.message
                if time.monotonic() - started + _LOOK_AGAIN_S > within_s:
                    return (
                        f"Ray job {submission_id} was asked to stop, but that could not be confirmed within "
                        f"{within_s:.0f} s (last seen: {last}). Look at it in the Ray dashboard."
                    )
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _kill_pending(self, client: RayJobsClient, submission_id: str) -> None:
        actor = f"_ray_internal_job_actor_{submission_id}"
        await client.submit(
            submission_id=f"{submission_id}-cancel-{int(time.time())}",
            entrypoint=f"python -c {shlex.quote(_KILL_ACTOR.format(actor=actor))}",
            metadata={"cancels": submission_id},
        )

    def job_url(self, submission_id: str) -> str:
        """The job's page in the Ray dashboard."""
        return f"{self.cluster().browser_url}/#/jobs/{submission_id}"

    def test_connection(self) -> tuple[bool, str]:
        """Ask the cluster for its version and for its jobs' route, as a task would."""

        async def ask() -> str:
            async with RayJobsClient(cluster) as client:
                version = str((await client.version()).get("ray_version"))
                await client.job("raylm-test-connection")  # a gateway may let the one through and not the other
                return version

        try:
            cluster = self.cluster()
            return True, f"Ray {loop.run(ask)} answers at {cluster.url}"
        except RaylmError as exc:
            return False, exc.message


def _masked(cluster: Cluster) -> Cluster:
    """Airflow hides the password of a connection in logs, but not what is inside a header."""
    for value in (*cluster.headers.values(), *cluster.cookies.values()):
        mask_secret(value)
    return cluster


def connection_of(conn_id: str, argument: str) -> Connection:
    """An Airflow connection.

    Raises:
        SpecError: There is none of that name.
    """
    try:
        return BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise _no_connection(conn_id, argument) from None


def _no_connection(conn_id: str, argument: str) -> SpecError:
    return SpecError(f"there is no connection {conn_id!r} for {argument}: add it, or name one that exists")


def cluster_from_connection(connection: Connection) -> Cluster:
    """Read a connection of type `ray`.

    Raises:
        SpecError: It has no host, or an extra that cannot be understood.
    """
    where = f"connection {connection.conn_id!r}"
    extra = connection.extra_dejson
    if unknown := sorted(set(extra) - KNOWN_EXTRAS):
        log.warning("%s: extras %s are not known and do nothing; known are %s", where, unknown, sorted(KNOWN_EXTRAS))
    headers = {str(k): str(v).strip() for k, v in _mapping(extra, "headers", where).items()}
    token = connection.password or (_token_of_environment(where) if _flag(extra, "auth_from_environment") else None)
    if token and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {token.strip()}"
    url = _url(connection, where)
    try:
        timeout_s = float(extra.get("request_timeout") or 30.0)
    except (TypeError, ValueError) as exc:
        raise SpecError(f"{where}: extra 'request_timeout' is seconds, got {extra['request_timeout']!r}") from exc
    return Cluster(
        url=url,
        headers=headers,
        cookies={str(k): str(v) for k, v in _mapping(extra, "cookies", where).items()},
        verify=_verify(extra),
        timeout_s=timeout_s,
        browser_url=str(extra.get("dashboard_url") or url).rstrip("/"),
    )


def _url(connection: Connection, where: str) -> str:
    host = (connection.host or "").strip().rstrip("/")
    if not host:
        raise SpecError(f"{where} has no host: expected the URL of the Ray dashboard or gateway, http://head:8265")
    if "://" not in host:
        host = f"{connection.schema or 'http'}://{host}"
    scheme, rest = host.split("://", 1)
    if scheme not in ("http", "https"):
        raise SpecError(f"{where}: the Jobs API is reached over http or https, got {scheme!r}://")
    authority, slash, path = rest.partition("/")
    if connection.port and ":" not in authority.rsplit("]", 1)[-1]:
        authority = f"{authority}:{connection.port}"
    return f"{scheme}://{authority}{slash}{path}"


def _mapping(extra: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = extra.get(name) or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: extra {name!r} must be a JSON object")
    return value


def _flag(extra: Mapping[str, Any], name: str) -> bool:
    value = extra.get(name)
    return value.strip().lower() in ("1", "true", "yes") if isinstance(value, str) else bool(value)


def _verify(extra: Mapping[str, Any]) -> bool | str:
    value = extra.get("verify")
    if value is None or value == "":
        return True
    if isinstance(value, str) and value.strip().lower() not in ("true", "false", "0", "1", "yes", "no"):
        return value
    return _flag(extra, "verify")


def _token_of_environment(where: str) -> str | None:
    """The token Ray itself would use here: `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH` or `~/.ray/auth_token`."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError as exc:
        raise SpecError(f"{where} asks for the token of the environment, and there is none: {exc}") from exc

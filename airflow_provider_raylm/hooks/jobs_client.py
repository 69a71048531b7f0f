"""The part of Ray's Jobs API that is asked again and again: asynchronous, with a limit on every exchange.

`ray.job_submission.JobSubmissionClient` blocks and has no timeouts, so one dashboard that hangs would stop every
trigger of a triggerer. This client speaks the same HTTP (the routes of `ray.dashboard.modules.job.job_head`).
Redirects are not followed, because a redirect to another host would carry the gateway's token there.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp

from airflow_provider_raylm.exceptions import RayAccessError, RayJobError, RayUnreachableError
from airflow_provider_raylm.polling import JobInfo

BODY_CHARS = 300
"""Of the body of a refused request, what goes into the message."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a cluster's Jobs API answers, and what it wants to see.

    Attributes:
        url: Dashboard or gateway, `http(s)://host[:port][/prefix]`, no slash at the end.
        headers: Sent with every request, the token among them.
        cookies: Sent with every request.
        verify: `False` turns TLS verification off; a string is a CA bundle.
        timeout_s: Limit on one exchange in seconds.
        browser_url: Where people open the dashboard.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    cookies: Mapping[str, str] = field(default_factory=dict, repr=False)
    verify: bool | str = True
    timeout_s: float = 30.0
    browser_url: str = ""


class RayJobsClient:
    """One HTTP session with one cluster. Use it as an asynchronous context manager, on one event loop.

    Every method raises `RayUnreachableError` when the cluster could not be asked (no connection, no answer in time,
    HTTP 429 or 5xx, an answer that is not Ray's) and `RayAccessError` on HTTP 401 and 403. Both say nothing about the
    job.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RayJobsClient:
        self._session = aiohttp.ClientSession(
            headers=dict(self._cluster.headers),
            cookies=dict(self._cluster.cookies),
            timeout=aiohttp.ClientTimeout(total=self._cluster.timeout_s),
            connector=aiohttp.TCPConnector(ssl=await asyncio.to_thread(_tls, self._cluster.verify)),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def version(self) -> dict[str, Any]:
        """`ray_version`, `ray_commit`, `session_name`, `version` of the cluster."""
        return await self._ask("GET", "/api/version")

    async def job(self, submission_id: str) -> JobInfo | None:
        """The job, `None` if the cluster says it has no such job."""
        path = f"/api/jobs/{quote(submission_id, safe='')}"
        try:
            raw = await self._ask("GET", path)
        except _NoSuchJob:
            return None
        try:
            return JobInfo.from_api(raw)
        except ValueError as exc:
            raise RayUnreachableError(f"{self._cluster.url}{path}: {exc}") from exc

    async def stop(self, submission_id: str) -> None:
        """Ask the job to stop. True or false, Ray's answer proves nothing: look at the status."""
        try:
            await self._ask("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop")
        except _NoSuchJob:
            return

    async def submit(self, *, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        """Submit a job that uploads nothing."""
        await self._ask(
            "POST",
            "/api/jobs/",
            {"submission_id": submission_id, "entrypoint": entrypoint, "metadata": dict(metadata)},
        )

    async def logs(self, submission_id: str) -> str:
        """The whole driver log so far. Costs its whole length."""
        try:
            raw = await self._ask("GET", f"/api/jobs/{quote(submission_id, safe='')}/logs")
        except _NoSuchJob:
            return ""
        return str(raw.get("logs") or "")

    async def tail(self, submission_id: str) -> AsyncIterator[str]:
        """The driver log from its start, piece by piece, until the job has ended.

        Raises:
            RayUnreachableError: The stream broke, or the gateway does not let web sockets through.
        """
        url = f"{self._cluster.url}/api/jobs/{quote(submission_id, safe='')}/logs/tail"
        try:
            async with self._live.ws_connect(url, heartbeat=30.0, max_msg_size=2**24) as socket:
                async for message in socket:
                    if message.type == aiohttp.WSMsgType.TEXT:
                        yield message.data
                if socket.close_code != aiohttp.WSCloseCode.OK:
                    raise RayUnreachableError(f"log stream of {submission_id} broke (code {socket.close_code})")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as exc:
            raise RayUnreachableError(f"log stream of {submission_id}: {_words(exc)}") from exc

    async def cluster_status(self) -> str:
        """What `ray status` prints: nodes, usage, pending demands."""
        raw = await self._ask("GET", "/api/cluster_status?format=1")
        return str((raw.get("data") or {}).get("clusterStatus") or "")

    @property
    def _live(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RayJobError("RayJobsClient is used outside `async with`")
        return self._session

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        url = f"{self._cluster.url}{path}"
        try:
            async with self._live.request(method, url, json=body, allow_redirects=False) as reply:
                text = await reply.text()
                status, location = reply.status, reply.headers.get("Location", "")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as exc:
            raise RayUnreachableError(f"{url} did not answer: {_words(exc)}") from exc
        check_status(url, status, text, location)
        try:
            raw = json.loads(text)
        except ValueError:
            raw = None
        if not isinstance(raw, dict):
            raise RayUnreachableError(f"{url} answered, but not like Ray: {text[:BODY_CHARS]!r}")
        return raw


class _NoSuchJob(RayJobError):
    """HTTP 404 in Ray's own words."""


def check_status(url: str, status: int, text: str, location: str = "") -> None:
    """Translate an HTTP status that is not a success into the error it means."""
    if status < 300:
        return
    text = text.strip()
    said = f"HTTP {status}: {text[-BODY_CHARS:]}"  # of a traceback, the end says what happened
    if status < 400:
        raise RayAccessError(
            f"{url} redirects to {location or 'another place'} (HTTP {status}). Redirects are not followed, "
            "because they would carry the token along: put the final address into the connection"
        )
    if status in (401, 403):
        raise RayAccessError(
            f"{url} refused the credentials ({said}). Check the password (token) and the headers of the connection"
        )
    if status == 404 and "does not exist" in text:
        raise _NoSuchJob(said)
    if status in (400, 409, 413, 422):
        raise RayJobError(f"{url} refused the request ({said})")
    raise RayUnreachableError(f"{url} answered {said}")


def _words(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


def _tls(verify: bool | str) -> ssl.SSLContext | bool:
    if isinstance(verify, str):
        return ssl.create_default_context(cafile=verify)
    return verify

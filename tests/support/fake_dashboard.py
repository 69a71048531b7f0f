"""A Ray dashboard that does what a test scripts: the Jobs API over real HTTP, a state machine, and faults on demand.

It behaves as Ray 2.60 does, and `tests/integration/test_jobs_contract.py` holds it to that by asking a real head the
same questions. Nothing here runs a job: a test says what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSCloseCode, web

TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
ACTOR = "_ray_internal_job_actor_"


@dataclass
class FakeJob:
    """One job; a test moves it on by assigning `status`.

    Attributes:
        log: The driver log so far.
        stops: How often it was asked to stop.
        stop_works: Whether a RUNNING job follows.
    """

    submission_id: str
    entrypoint: str = ""
    status: str = "PENDING"
    message: str = "Job has not started yet."
    error_type: str | None = None
    exit_code: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)
    log: str = ""
    stops: int = 0
    stop_works: bool = True
    start_time: int = field(default_factory=lambda: int(time.time() * 1000))

    def run(self, log: str = "") -> None:
        self.status, self.message, self.log = "RUNNING", "Job is currently running.", self.log + log

    def succeed(self, log: str = "") -> None:
        self.log += log
        self.status, self.message, self.exit_code = "SUCCEEDED", "Job finished successfully.", 0

    def fail(self, message: str = "", *, exit_code: int | None = 1, log: str = "") -> None:
        self.log += log
        self.status, self.exit_code = "FAILED", exit_code
        self.error_type = "JOB_ENTRYPOINT_COMMAND_ERROR"
        self.message = message or (
            f"Job entrypoint command failed with exit code {exit_code}, "
            f"last available logs (truncated to 20,000 chars):\n{self.log}"
        )

    def details(self) -> dict[str, Any]:
        return {
            "type": "SUBMISSION",
            "job_id": None,
            "submission_id": self.submission_id,
            "driver_info": None,
            "status": self.status,
            "entrypoint": self.entrypoint,
            "message": self.message,
            "error_type": self.error_type,
            "start_time": self.start_time,
            "end_time": int(time.time() * 1000) if self.status in TERMINAL else None,
            "metadata": self.metadata,
            "runtime_env": self.runtime_env,
            "driver_agent_http_address": None,
            "driver_node_id": None,
            "driver_exit_code": self.exit_code,
        }


class FakeDashboard:
    """The server. Every public attribute may be changed while it runs.

    Attributes:
        jobs: By submission id. `jobs.clear()` is a replaced head.
        on_submit: Called with each new job.
        token: What `Authorization: Bearer` must carry; `None` lets everyone in.
        websockets: `False` is a gateway that lets no web socket through.
        break_stream_after: Characters after which a log stream is cut, once.
        requests: `(method, path)` of each request, in order.
        headers: Headers of each request, in order.
        packages: Uploaded packages by name.
        stream_tick_s: How often a log stream looks for more; a real one takes a second.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, FakeJob] = {}
        self.on_submit: Callable[[FakeJob], None] = lambda job: None
        self.token: str | None = None
        self.websockets = True
        self.break_stream_after: int | None = None
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.packages: dict[str, bytes] = {}
        self.stream_tick_s = 0.01
        self.url = ""
        self._faults: deque[Callable[[web.Request], Any]] = deque()
        self._lost_answers = 0
        self._release: asyncio.Event

    def add(self, submission_id: str, **fields: Any) -> FakeJob:
        self.jobs[submission_id] = job = FakeJob(submission_id, **fields)
        return job

    def answer(self, status: int, text: str = "scripted", *, times: int = 1, headers: Any = None) -> None:
        """The next `times` requests get this instead."""
        self._faults.extend([lambda _: web.Response(status=status, text=text, headers=headers)] * times)

    def reset(self, times: int = 1) -> None:
        """The next `times` connections are cut without an answer."""

        def cut(request: web.Request) -> web.Response:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

        self._faults.extend([cut] * times)

    def hang(self, times: int = 1) -> None:
        """The next `times` requests are never answered."""

        async def sleep(_: web.Request) -> web.Response:
            await self._release.wait()
            return web.Response(status=503)

        self._faults.extend([sleep] * times)

    def lose_next_submit_answer(self) -> None:
        """The next job is taken, and the connection cut before the answer."""
        self._lost_answers += 1

    # --- the server -------------------------------------------------------------------------------------------------

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._script], client_max_size=2**28)
        app.router.add_get("/api/version", self._version)
        app.router.add_get("/api/packages/gcs/{name}", self._package)
        app.router.add_put("/api/packages/gcs/{name}", self._upload)
        app.router.add_post("/api/jobs/", self._submit)
        app.router.add_get("/api/jobs/", self._list)
        app.router.add_get("/api/jobs/{id}", self._get)
        app.router.add_delete("/api/jobs/{id}", self._delete)
        app.router.add_post("/api/jobs/{id}/stop", self._stop)
        app.router.add_get("/api/jobs/{id}/logs", self._logs)
        app.router.add_get("/api/jobs/{id}/logs/tail", self._tail)
        app.router.add_get("/api/cluster_status", self._cluster_status)
        return app

    @web.middleware
    async def _script(self, request: web.Request, handler: Any) -> web.StreamResponse:
        tail = request.path.endswith("/tail")
        self.requests.append((request.method, request.path))
        self.headers.append(dict(request.headers))
        if self._faults and not tail:
            reply = self._faults.popleft()(request)
            return await reply if asyncio.iscoroutine(reply) else reply
        if self.token is not None:
            given = request.headers.get("Authorization", "")
            if not given:
                return web.Response(status=401, text="Unauthorized: Missing authentication token")
            if given != f"Bearer {self.token}":
                return web.Response(status=403, text="Forbidden: Invalid authentication token")
        return await handler(request)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"version": "4", "ray_version": "2.60.0", "ray_commit": "fake", "session_name": "fake"}
        )

    async def _package(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name in self.packages:
            return web.Response()
        return web.Response(status=404, text=f"Package gcs://{name} does not exist")

    async def _upload(self, request: web.Request) -> web.Response:
        self.packages[request.match_info["name"]] = await request.read()
        return web.Response()

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        submission_id = body["submission_id"]
        if submission_id in self.jobs:
            text = f"ValueError: Job with submission_id {submission_id} already exists. Please use a different one."
            return web.Response(status=500, text=f"RuntimeError: Request failed with status code 400: {text}")
        job = self.add(
            submission_id,
            entrypoint=body["entrypoint"],
            metadata=body.get("metadata") or {},
            runtime_env=body.get("runtime_env") or {},
        )
        if any(body.get(name) for name in body if name.startswith("entrypoint_")):
            job.message += (
                " It may be waiting for resources (CPUs, GPUs, memory, custom resources) to become available."
            )
        if ACTOR in job.entrypoint:
            self._kill(job.entrypoint)
            job.succeed()
        else:
            self.on_submit(job)
        if self._lost_answers:
            self._lost_answers -= 1
            if request.transport is not None:
                request.transport.abort()
        return web.json_response({"job_id": submission_id, "submission_id": submission_id})

    def _kill(self, entrypoint: str) -> None:
        for job in self.jobs.values():
            if f"{ACTOR}{job.submission_id}'" in entrypoint.replace('"', "'") and job.status == "PENDING":
                job.status, job.error_type = "FAILED", "JOB_SUPERVISOR_ACTOR_DIED"
                job.message = "Job supervisor actor died: killed"

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response([job.details() for job in self.jobs.values()])

    def _job(self, request: web.Request) -> FakeJob:
        submission_id = request.match_info["id"]
        if submission_id not in self.jobs:
            raise web.HTTPNotFound(text=f"Job {submission_id} does not exist")
        return self.jobs[submission_id]

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request).details())

    async def _delete(self, request: web.Request) -> web.Response:
        job = self._job(request)
        if job.status not in TERMINAL:
            text = f"Attempted to delete job '{job.submission_id}', but it is in a non-terminal state {job.status}."
            return web.Response(status=500, text=text)
        del self.jobs[job.submission_id]
        return web.json_response({"deleted": True})

    async def _stop(self, request: web.Request) -> web.Response:
        job = self._job(request)
        if job.status in TERMINAL:
            return web.json_response({"stopped": False})
        job.stops += 1
        if job.status == "RUNNING" and job.stop_works:
            job.status, job.message = "STOPPED", "Job was intentionally stopped."
        return web.json_response({"stopped": True})  # also for a PENDING job, which stays PENDING

    async def _logs(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": self._job(request).log})

    async def _tail(self, request: web.Request) -> web.StreamResponse:
        job = self._job(request)
        if not self.websockets:
            return web.Response(status=403, text="no upgrades here")
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        sent = 0
        while not socket.closed:
            ended = job.status in TERMINAL
            piece = job.log[sent : sent + 200]
            cut = self.break_stream_after
            if cut is not None and sent + len(piece) >= cut:
                self.break_stream_after = None
                await socket.send_str(piece[: cut - sent])
                if request.transport is not None:
                    request.transport.abort()
                return socket
            if piece:
                await socket.send_str(piece)
                sent += len(piece)
            elif ended or job.submission_id not in self.jobs:
                break
            else:
                await asyncio.sleep(self.stream_tick_s)
        await socket.close(code=WSCloseCode.OK)
        return socket

    async def _cluster_status(self, _: web.Request) -> web.Response:
        status = (
            "======== Autoscaler status ========\nResources\n-----\nTotal Usage:\n 0.0/4.0 CPU\n 0B/21.30GiB memory\n\n"
            "From request_resources:\n (none)\nPending Demands:\n (no resource demands)"
        )
        return web.json_response(
            {"result": True, "msg": "Got formatted cluster status.", "data": {"clusterStatus": status}}
        )


@contextlib.contextmanager
def fake_dashboard() -> Iterator[FakeDashboard]:
    """A `FakeDashboard` on a free port of loopback, in a thread of its own."""
    dashboard = FakeDashboard()
    started, stop = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        dashboard._release = asyncio.Event()
        runner = web.AppRunner(dashboard.app(), handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        dashboard.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await asyncio.to_thread(stop.wait)
        dashboard._release.set()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield dashboard
    finally:
        stop.set()
        thread.join(10)
        loop.close()


def connection_env(url: str, token: str | None = None, **extra: Any) -> dict[str, str]:
    """The environment variable that makes `ray_default` this dashboard."""
    connection = {"conn_type": "ray", "host": url, "password": token, "extra": extra}
    return {"AIRFLOW_CONN_RAY_DEFAULT": json.dumps(connection)}

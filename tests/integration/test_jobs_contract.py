"""The same questions to a real Ray head and to the scripted dashboard: both must answer alike.

The tests of timing and trouble trust the script; this is why they may.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from airflow_provider_raylm.hooks.jobs_client import Cluster, RayJobsClient
from airflow_provider_raylm.hooks.ray import RayHook
from demo.ray_head import RayNode, ray_head
from tests.support.fake_dashboard import FakeDashboard, connection_env, fake_dashboard

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def head() -> Iterator[RayNode]:
    with ray_head(num_cpus=2) as node:
        asker, deadline = Asker(node.dashboard_url, node.token), time.monotonic() + 120
        while True:  # until its agent runs, a head answers 500 to a job
            first = f"first-{uuid.uuid4().hex[:8]}"
            answer = asker.ask("POST", "/api/jobs/", {"submission_id": first, "entrypoint": "true"})
            if answer[0] == 200:
                break
            assert time.monotonic() < deadline, answer
            time.sleep(1)
        asker.until(first, "SUCCEEDED")
        yield node


@pytest.fixture
def fake(head: RayNode) -> Iterator[FakeDashboard]:
    with fake_dashboard() as dashboard:
        dashboard.token = head.token
        yield dashboard


class Asker:
    """Raw requests, as neither client would send or hide them."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url, self.token = url, token

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = "right") -> tuple[int, Any]:
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, data=None if body is None else json.dumps(body).encode()
        )
        request.add_header("Content-Type", "application/json")
        if token:
            request.add_header("Authorization", f"Bearer {self.token if token == 'right' else token}")
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as exc:
            status, text = exc.code, exc.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def until(self, submission_id: str, *statuses: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            _, job = self.ask("GET", f"/api/jobs/{submission_id}")
            if job["status"] in statuses:
                return dict(job)
            time.sleep(0.1)
        raise AssertionError(f"{submission_id} did not become {statuses}: {job}")


@pytest.fixture
def both(head: RayNode, fake: FakeDashboard) -> list[Asker]:
    return [Asker(head.dashboard_url, head.token), Asker(fake.url, head.token)]


def shape(answer: Any) -> Any:
    """Names and kinds, without the values that differ from one cluster to the next."""
    if isinstance(answer, dict):
        return {k: type(v).__name__ for k, v in answer.items()}
    return type(answer).__name__


@pytest.mark.parametrize(
    ("method", "path", "token"),
    [
        ("GET", "/api/version", "right"),
        ("GET", "/api/version", None),
        ("GET", "/api/jobs/nope", "right"),
        ("GET", "/api/jobs/nope", None),
        ("GET", "/api/jobs/nope", "wrong"),
        ("POST", "/api/jobs/nope/stop", "right"),
        ("DELETE", "/api/jobs/nope", "right"),
        ("GET", "/api/jobs/nope/logs", "right"),
        ("GET", "/api/packages/gcs/_ray_pkg_nope.zip", "right"),
        ("GET", "/api/cluster_status?format=1", "right"),
    ],
)
def test_simple_questions(both: list[Asker], method: str, path: str, token: str | None) -> None:
    """Status, kind of answer, and the words that the client reads."""
    (real_status, real), (fake_status, faked) = [one.ask(method, path, token=token) for one in both]
    assert fake_status == real_status
    assert shape(faked) == shape(real)
    if real_status == 404:
        assert "does not exist" in real
        assert "does not exist" in faked


def test_a_job_that_is_stopped(both: list[Asker], fake: FakeDashboard) -> None:
    """Submitted twice, deleted while it runs, stopped, stopped again."""
    fake.on_submit = lambda job: job.run("hello\n")
    answers = []
    for one in both:
        said: list[Any] = []
        body = {"submission_id": "stop-1", "entrypoint": "echo hello; sleep 60", "metadata": {"a": "b"}}
        said.append(one.ask("POST", "/api/jobs/", body))
        job = one.until("stop-1", "RUNNING")
        said.append((job["message"], job["metadata"], sorted(job)))
        status, text = one.ask("POST", "/api/jobs/", body)
        said.append((status, "already exists" in text, "status code 400" in text))
        status, text = one.ask("DELETE", "/api/jobs/stop-1")
        said.append((status, "non-terminal state" in text))
        said.append(one.ask("POST", "/api/jobs/stop-1/stop"))
        job = one.until("stop-1", "STOPPED")
        said.append((job["message"], job["driver_exit_code"], job["error_type"]))
        deadline = time.monotonic() + 60
        while (again := one.ask("POST", "/api/jobs/stop-1/stop")) != (200, {"stopped": False}):
            assert time.monotonic() < deadline, again  # the supervisor of a stopped job takes a moment to leave
        said.append(one.ask("POST", "/api/jobs/", body)[0])
        answers.append(said)
    assert answers[1] == answers[0]


def test_a_pending_job_does_not_stop(both: list[Asker]) -> None:
    """Ray says that it stopped the job, and the job stays PENDING; killing its supervisor ends it."""
    answers = []
    for one in both:
        said: list[Any] = []
        body = {"submission_id": "pending-1", "entrypoint": "true", "entrypoint_num_gpus": 1}
        one.ask("POST", "/api/jobs/", body)
        job = one.until("pending-1", "PENDING")
        said.append(job["message"])
        said.append(one.ask("POST", "/api/jobs/pending-1/stop"))
        time.sleep(1.5 if one is both[0] else 0)
        said.append(one.ask("GET", "/api/jobs/pending-1")[1]["status"])
        code = (
            "import ray; ray.init(address='auto', log_to_driver=False); "
            "ray.kill(ray.get_actor('_ray_internal_job_actor_pending-1', namespace='SUPERVISOR_ACTOR_RAY_NAMESPACE'))"
        )
        one.ask("POST", "/api/jobs/", {"submission_id": "killer-1", "entrypoint": f'python -c "{code}"'})
        job = one.until("pending-1", "FAILED")
        said.append((job["error_type"], job["driver_exit_code"], "actor died" in job["message"]))
        answers.append(said)
    assert answers[1] == answers[0]


def test_jobs_that_end_by_themselves(both: list[Asker], fake: FakeDashboard) -> None:
    """What a success and a failure look like, and how long the message repeats the log."""
    fake.on_submit = lambda job: (
        job.succeed("hi\n") if job.submission_id == "ok-1" else job.fail(exit_code=3, log="hi\n")
    )
    answers = []
    for one in both:
        said: list[Any] = []
        for name, entrypoint in (("ok-1", "echo hi"), ("bad-1", "echo hi; exit 3")):
            one.ask("POST", "/api/jobs/", {"submission_id": name, "entrypoint": entrypoint})
            job = one.until(name, "SUCCEEDED", "FAILED")
            said.append((job["status"], job["driver_exit_code"], job["error_type"], job["message"].partition("\n")[0]))
            said.append("hi\n" in one.ask("GET", f"/api/jobs/{name}/logs")[1]["logs"])
        answers.append(said)
    assert answers[1] == answers[0]


def test_the_log_stream(head: RayNode, fake: FakeDashboard) -> None:
    """The stream of an ended job is its whole log, then a normal close; and a stream follows a running job."""
    fake.on_submit = lambda job: job.succeed("hi\nbye\n")
    for url in (head.dashboard_url, fake.url):
        cluster = Cluster(url=url, headers={"Authorization": f"Bearer {head.token}"})

        async def read(cluster: Cluster = cluster) -> None:
            async with RayJobsClient(cluster) as client:
                await client.submit(submission_id="tail-1", entrypoint="echo hi; sleep 2; echo bye", metadata={})
                pieces = [piece async for piece in client.tail("tail-1")]
                assert "".join(pieces) == await client.logs("tail-1")
                assert "bye\n" in "".join(pieces)
                again = [piece async for piece in client.tail("tail-1")]
                assert "".join(again) == "".join(pieces)

        asyncio.run(read())


@pytest.mark.parametrize(("resources", "ends"), [({}, "STOPPED"), ({"entrypoint_num_gpus": 1}, "FAILED")])
def test_the_hook_cancels_on_a_real_head(
    head: RayNode, monkeypatch: pytest.MonkeyPatch, resources: dict[str, Any], ends: str
) -> None:
    """Running or PENDING, submitted and cancelled by the hook, whatever `RAY_ADDRESS` says."""
    for name, value in connection_env(head.dashboard_url, head.token).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    hook, submission_id = RayHook(), f"cancel-{ends}"
    assert hook.test_connection() == (True, f"Ray {ray.__version__} answers at {head.dashboard_url}")
    hook.submit_job(entrypoint="sleep 60", submission_id=submission_id, **resources)
    if not resources:
        Asker(head.dashboard_url, head.token).until(submission_id, "RUNNING")
    assert hook.cancel(submission_id) == f"Ray job {submission_id} is {ends}."

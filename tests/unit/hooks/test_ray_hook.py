"""The hook: what it sends, where, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import Connection

from airflow_provider_raylm.exceptions import (
    RayAccessError,
    RayJobError,
    RaySubmitError,
    RayUnreachableError,
    SpecError,
)
from airflow_provider_raylm.hooks import loop
from airflow_provider_raylm.hooks import ray as hook_module
from airflow_provider_raylm.hooks.jobs_client import RayJobsClient
from airflow_provider_raylm.hooks.ray import RayHook, cluster_from_connection
from tests.support.fake_dashboard import FakeDashboard, connection_env, fake_dashboard


def connection(**fields: Any) -> Connection:
    extra = fields.pop("extra", {})
    return Connection(conn_id="c", conn_type="ray", extra=json.dumps(extra), **fields)


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "http://head:8265"}, "http://head:8265"),
        ({"host": "https://gateway.example/ray/v1/"}, "https://gateway.example/ray/v1"),
        ({"host": "head", "port": 8265}, "http://head:8265"),
        ({"host": "head", "port": 443, "schema": "https"}, "https://head:443"),
        ({"host": "https://gateway.example/ray", "port": 8443}, "https://gateway.example:8443/ray"),
        ({"host": "http://head:8265", "port": 1}, "http://head:8265"),
        ({"host": "http://[::1]", "port": 8265}, "http://[::1]:8265"),
    ],
)
def test_address(fields: dict[str, Any], url: str) -> None:
    """Host, port and schema of a connection in every form that people write."""
    assert cluster_from_connection(connection(**fields)).url == url


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no host"),
        ({"host": "ray://head:10001"}, "http or https"),
        ({"host": "h", "extra": {"headers": "not json"}}, "'headers' must be a JSON object"),
        ({"host": "h", "extra": {"request_timeout": "soon"}}, "seconds"),
    ],
)
def test_a_wrong_connection_is_named(fields: dict[str, Any], message: str) -> None:
    """The error says which connection and which field."""
    with pytest.raises(SpecError, match=message) as caught:
        cluster_from_connection(connection(**fields))
    assert "connection 'c'" in str(caught.value)


async def test_a_missing_connection_is_named() -> None:
    """In the worker and in the triggerer."""
    with pytest.raises(SpecError, match="no connection 'gone' for ray_conn_id"):
        RayHook("gone").cluster()
    with pytest.raises(SpecError, match="no connection 'gone' for ray_conn_id"):
        await RayHook("gone").acluster()


def test_a_misspelt_extra_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A token header that is never sent would only show as a refusal by the gateway."""
    cluster_from_connection(connection(host="h", extra={"header": {"ray-token": "x"}}))
    assert "extras ['header'] are not known" in caplog.text


@pytest.mark.parametrize(
    ("extra", "verify"),
    [
        ({}, True),
        ({"verify": None}, True),
        ({"verify": ""}, True),
        ({"verify": "true"}, True),
        ({"verify": False}, False),
        ({"verify": "False"}, False),
        ({"verify": "/etc/ca.pem"}, "/etc/ca.pem"),
    ],
)
def test_tls_is_verified_unless_someone_turns_it_off(extra: dict[str, Any], verify: object) -> None:
    """An empty form field does not turn verification off."""
    assert cluster_from_connection(connection(host="h", extra=extra)).verify == verify


def test_token_and_gateway_headers() -> None:
    """The token goes as a bearer token; a header that a gateway wants goes as it is and wins."""
    cluster = cluster_from_connection(
        connection(host="h", password="secret", extra={"headers": '{"ray-token": "t"}', "cookies": {"a": "b"}})
    )
    assert dict(cluster.headers) == {"ray-token": "t", "Authorization": "Bearer secret"}
    assert dict(cluster.cookies) == {"a": "b"}
    own = cluster_from_connection(connection(host="h", password="x", extra={"headers": {"authorization": "Basic y"}}))
    assert dict(own.headers) == {"authorization": "Basic y"}
    assert "secret" not in repr(cluster)


def test_a_token_of_the_environment_goes_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker that has a token for one cluster does not show it to another."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-worker")
    assert "Authorization" not in cluster_from_connection(connection(host="h")).headers
    asked = connection(host="h", extra={"auth_from_environment": "true"})
    assert cluster_from_connection(asked).headers["Authorization"] == "Bearer of-the-worker"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "token").write_text("of-the-file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert cluster_from_connection(asked).headers["Authorization"] == "Bearer of-the-file"


def test_the_environment_cannot_redirect_a_submission(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray's own client would follow these variables, send the worker's token along, and let ~/.netrc replace ours."""
    with fake_dashboard() as elsewhere:
        monkeypatch.setenv("RAY_ADDRESS", elsewhere.url)
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", elsewhere.url)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-worker")
        netrc = tmp_path / "netrc"
        netrc.write_text("machine 127.0.0.1 login netrc password netrc\n")
        monkeypatch.setenv("NETRC", str(netrc))
        for name, value in connection_env(dashboard.url, None, headers={"ray-token": "gateway"}).items():
            monkeypatch.setenv(name, value)
        hook = RayHook()
        assert hook.submit_job(entrypoint="true", submission_id="a-1") == "a-1"
        assert hook.get_job("a-1") is not None
        assert elsewhere.requests == []
    assert all(h.get("ray-token") == "gateway" and "Authorization" not in h for h in dashboard.headers)


def test_what_ray_says_of_an_upload_is_no_error_in_the_task_log(dashboard: FakeDashboard) -> None:
    """Ray's loggers write to stderr, which Airflow shows as errors."""
    RayHook().get_conn()
    for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO)


def test_modules_travel_whatever_the_users_excludes_say(dashboard: FakeDashboard, tmp_path: Path) -> None:
    """`excludes` of the user's runtime_env apply to the user's files, not to ours."""
    module = tmp_path / "package"
    module.mkdir()
    (module / "job_spec.json").write_text("{}")
    (module / "__init__.py").write_text("")
    env = {"excludes": ["*.json"], "env_vars": {"A": "b"}}
    RayHook().submit_job(entrypoint="true", submission_id="a-1", runtime_env=env, modules=[str(module)])
    (package,) = dashboard.packages.values()
    assert b"package/job_spec.json" in package
    sent = dashboard.jobs["a-1"].runtime_env
    assert sent["py_modules"][0].startswith("gcs://_ray_pkg_")
    assert sent["env_vars"] == {"A": "b"}
    assert env == {"excludes": ["*.json"], "env_vars": {"A": "b"}}


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    "trouble",
    [
        lambda d: d.answer(503, times=3),
        lambda d: d.answer(500, "No available agent to submit job, please try again later."),
        lambda d: d.answer(429),
        lambda d: d.reset(2),
        lambda d: d.lose_next_submit_answer(),
    ],
    ids=["503", "500", "429", "reset", "lost answer"],
)
def test_submits_once_through_trouble(dashboard: FakeDashboard, trouble: Callable[[FakeDashboard], None]) -> None:
    """Whatever the network does, there is one job at the end, also if only the answer got lost."""
    trouble(dashboard)
    assert RayHook().submit_job(entrypoint="true", submission_id="a-1") == "a-1"
    assert list(dashboard.jobs) == ["a-1"]


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        (lambda d: d.answer(400, "Failed to parse"), RaySubmitError, "HTTP 400: Failed to parse"),
        (lambda d: d.answer(500, "x" * 999 + "status code 400: bad label"), RaySubmitError, "bad label"),
        (lambda d: d.answer(401, "Unauthorized"), RayAccessError, "Check the password"),
        (lambda d: d.answer(302, headers={"Location": "https://login.example/"}), RayAccessError, "redirects to https"),
        (lambda d: d.answer(503, times=9), RaySubmitError, "HTTP 503"),
        (lambda d: d.hang(9), RaySubmitError, "did not answer"),
    ],
    ids=["400", "400 within 500", "401", "redirect", "503 for ever", "hang"],
)
def test_a_refused_submission_says_why(
    dashboard: FakeDashboard,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[FakeDashboard], None],
    error: type[RayJobError],
    message: str,
) -> None:
    """What a retry cannot change fails at once, and the rest when patience ends."""
    for name, value in connection_env(dashboard.url, request_timeout=0.2).items():
        monkeypatch.setenv(name, value)
    trouble(dashboard)
    with pytest.raises(error, match=message):
        RayHook().submit_job(entrypoint="true", submission_id="a-1", patience_s=0)
    assert dashboard.jobs == {}


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        (lambda d: d.answer(503, "upstream"), RayUnreachableError, "HTTP 503: upstream"),
        (lambda d: d.answer(404, "no such route"), RayUnreachableError, "HTTP 404"),
        (lambda d: d.answer(200, "<html>login</html>"), RayUnreachableError, "not like Ray"),
        (lambda d: d.answer(200, '{"status": "QUEUED"}'), RayUnreachableError, "'QUEUED'"),
        (lambda d: d.answer(403, "Forbidden"), RayAccessError, "refused the credentials"),
        (lambda d: d.answer(302, headers={"Location": "http://other/"}), RayAccessError, "redirects to http://other/"),
        (lambda d: d.reset(2), RayUnreachableError, "did not answer"),  # one is asked again by aiohttp
        (lambda d: d.hang(), RayUnreachableError, "did not answer"),
    ],
)
def test_could_not_find_out_is_never_not_there(
    dashboard: FakeDashboard,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[FakeDashboard], None],
    error: type[RayJobError],
    message: str,
) -> None:
    """Only Ray's own 404 means that there is no such job."""
    for name, value in connection_env(dashboard.url, request_timeout=0.2).items():
        monkeypatch.setenv(name, value)
    hook = RayHook()
    assert hook.get_job("a-1") is None
    trouble(dashboard)
    with pytest.raises(error, match=message):
        hook.get_job("a-1")


def test_test_connection(dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs the right token, not only a host that answers."""
    dashboard.token = "right"
    ok, message = RayHook().test_connection()
    assert not ok
    assert "Missing authentication token" in message
    for name, value in connection_env(dashboard.url, "right").items():
        monkeypatch.setenv(name, value)
    assert RayHook().test_connection() == (True, f"Ray 2.60.0 answers at {dashboard.url}")
    monkeypatch.setenv("AIRFLOW_CONN_RAY_DEFAULT", '{"conn_type": "ray"}')
    assert RayHook().test_connection()[0] is False


def test_job_ids_are_quoted(dashboard: FakeDashboard) -> None:
    """An id from a user cannot reach another route."""
    assert RayHook().get_job("../version") is None
    assert dashboard.requests[-1] == ("GET", "/api/jobs/../version")  # one segment, as the server decodes it


@pytest.mark.parametrize(
    ("status", "within_s", "said"),
    [("RUNNING", 5, "is STOPPED"), ("SUCCEEDED", 5, "is SUCCEEDED"), ("PENDING", 5, "is FAILED")],
)
def test_cancel_is_confirmed(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch, status: str, within_s: float, said: str
) -> None:
    """It ends when the job has, also for a PENDING one, which Ray's own stop leaves PENDING."""
    monkeypatch.setattr(hook_module, "KILL_PENDING_S", 0.1)
    job = dashboard.add("a-1", status=status)
    assert said in RayHook().cancel("a-1", within_s=within_s)
    assert job.status in said
    assert job.stops == (0 if status == "SUCCEEDED" else 1)


def test_a_cancel_that_cannot_be_confirmed_says_so(dashboard: FakeDashboard) -> None:
    """The bound holds, and the message names the last thing that was seen."""
    dashboard.add("a-1", status="RUNNING", stop_works=False)
    said = RayHook().cancel("a-1", within_s=0.6)
    assert "could not be confirmed within 1 s (last seen: RUNNING)" in said
    assert "is not known" in RayHook().cancel("b-1", within_s=0.6)


def test_cancel_survives_trouble(dashboard: FakeDashboard) -> None:
    """A 503 on the way does not leave the job running."""
    job = dashboard.add("a-1", status="RUNNING")
    dashboard.answer(503, times=2)
    dashboard.reset()
    assert "is STOPPED" in RayHook().cancel("a-1", within_s=10)
    assert job.stops == 1


async def test_the_log_stream_ends_with_the_job(dashboard: FakeDashboard) -> None:
    """All of the log, in order; a stream that is cut raises."""
    job = dashboard.add("a-1", status="RUNNING", log="x" * 450 + "\n")
    async with RayJobsClient(RayHook().cluster()) as client:
        seen = ""
        async for piece in client.tail("a-1"):
            seen += piece
            if seen == job.log and job.status == "RUNNING":
                job.succeed(log="end\n")
        assert seen == "x" * 450 + "\nend\n"
        dashboard.break_stream_after = 100
        with pytest.raises(RayUnreachableError):
            async for _ in client.tail("a-1"):
                pass
        dashboard.websockets = False
        with pytest.raises(RayUnreachableError, match="403"):
            async for _ in client.tail("a-1"):
                pass


async def test_sync_methods_work_on_a_running_loop(dashboard: FakeDashboard) -> None:
    """Airflow may call an operator where a loop already runs."""
    dashboard.add("a-1", log="text")
    assert RayHook().get_logs("a-1") == "text"


def test_an_interrupted_wait_cancels_its_coroutine() -> None:
    """What interrupts the waiting thread is raised at once, and the coroutine is told."""
    import signal

    ended: list[str] = []

    class Interrupted(BaseException):
        pass

    def interrupt(signum: int, frame: object) -> None:
        raise Interrupted

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupted):
            loop.run(wait)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ended == ["cancelled"]

"""Real Airflow processes and what people do to them: mark, clear, kill, restart. Ray is the scripted dashboard.

One scheduler, one triggerer, one API server for all tests; each test has a DAG run of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tenacity

from demo.airflow_home import airflow_env, migrate
from demo.ray_head import free_ports
from tests.support.fake_dashboard import FakeDashboard, FakeJob, fake_dashboard

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DAG = """
import datetime, os
from airflow.sdk import DAG
from airflow_provider_raylm.operators.ray import RaySubmitJobOperator

def tell(context):
    ti = context["ti"]
    with open(os.environ["PIDS"] + "/" + ti.run_id + "-" + ti.task_id, "w") as file:
        file.write(str(os.getpid()))

for mode in ("worker", "triggerer"):
    with DAG(mode, schedule=None, default_args={"retries": 1, "retry_delay": datetime.timedelta(seconds=1)}):
        RaySubmitJobOperator(
            task_id="job",
            entrypoint="true",
            deferrable=mode == "triggerer",
            poll_interval=0.5,
            on_execute_callback=tell,
        )
"""


def is_broken(exc: BaseException) -> bool:
    """Airflow's answer when requests waited for each other's SQLite lock: a person would click again."""
    return isinstance(exc, urllib.error.HTTPError) and exc.code == 500


@dataclass
class Airflow:
    """The running processes, and the REST API that people's clicks use."""

    url: str
    env: dict[str, str]
    home: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    token: str = ""

    def start(self, name: str, *arguments: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "airflow", name, *arguments],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self, *names: str) -> None:
        stopping = [self.processes.pop(name) for name in names]
        for sig, grace in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            for process in stopping:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sig)
            for process in stopping:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)

    @tenacity.retry(retry=tenacity.retry_if_exception(is_broken), stop=tenacity.stop_after_attempt(3), reraise=True)
    def call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, data=None if body is None else json.dumps(body).encode()
        )
        request.add_header("Content-Type", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as reply:
            return json.loads(reply.read() or b"null")

    def run(self, dag: str, run_id: str) -> None:
        self.call("PATCH", f"/api/v2/dags/{dag}", {"is_paused": False})
        self.call("POST", f"/api/v2/dags/{dag}/dagRuns", {"dag_run_id": run_id, "logical_date": None})

    def task(self, dag: str, run_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/job"))

    def mark(self, dag: str, run_id: str, state: str) -> None:
        self.call("PATCH", f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/job", {"new_state": state})

    def clear(self, dag: str, run_id: str) -> None:
        body = {"dry_run": False, "dag_run_id": run_id, "task_ids": ["job"], "only_failed": False}
        self.call("POST", f"/api/v2/dags/{dag}/clearTaskInstances", body)

    def logs(self) -> str:
        return "\n".join(p.read_text(errors="replace")[-1500:] for p in sorted(self.home.rglob("*.log")))


def until(condition: Callable[[], Any], airflow: Airflow, within_s: float = 60) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"did not happen within {within_s} s\n{airflow.logs()[-12000:]}")


@pytest.fixture(scope="module")
def ray() -> Iterator[FakeDashboard]:
    with fake_dashboard() as dashboard:
        dashboard.on_submit = lambda job: job.run("working\n")
        yield dashboard


@pytest.fixture(scope="module")
def airflow(ray: FakeDashboard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("airflow")
    (home / "dags").mkdir()
    (home / "pids").mkdir()
    (home / "dags" / "jobs.py").write_text(DAG)
    (port, serve_port, trigger_port) = free_ports(3)
    url = f"http://127.0.0.1:{port}"
    env = {
        **airflow_env(home, connections={"ray_default": {"conn_type": "ray", "host": ray.url}}),
        "PIDS": str(home / "pids"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": "2",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "true",
        "AIRFLOW__API_AUTH__JWT_SECRET": "test" * 16,
        "AIRFLOW__API__SECRET_KEY": "test",
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(serve_port),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_port),
        "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    }
    migrate(env)
    made = Airflow(url=url, env=env, home=home)
    try:
        made.start("api-server", "--port", str(port), "--host", "127.0.0.1", "--workers", "1")
        made.start("dag-processor")
        made.start("scheduler")
        made.start("triggerer")
        until(lambda: made.call("GET", "/api/v2/monitor/health"), made, 90)
        made.token = made.call("GET", "/auth/token")["access_token"]
        until(lambda: made.call("GET", "/api/v2/dags")["total_entries"] == 2, made, 60)
        yield made
    finally:
        made.stop(*made.processes)


def job_of(ray: FakeDashboard, run_id: str, attempt: int = 1) -> FakeJob | None:
    found = [j for j in ray.jobs.values() if j.metadata.get("run_id") == run_id]
    return next((j for j in found if j.submission_id.endswith(f"-{attempt}")), None)


def started(airflow: Airflow, ray: FakeDashboard, dag: str, run_id: str) -> FakeJob:
    """A run whose job is running, and whose task waits for it."""
    airflow.run(dag, run_id)
    job: FakeJob = until(lambda: job_of(ray, run_id), airflow)
    waiting = "deferred" if dag == "triggerer" else "running"
    until(lambda: airflow.task(dag, run_id)["state"] == waiting, airflow)
    asked = f"/api/jobs/{job.submission_id}/logs/tail"
    until(lambda: ("GET", asked) in ray.requests, airflow)
    return job


@pytest.mark.parametrize("dag", ["worker", "triggerer"])
@pytest.mark.parametrize("state", ["failed", "success"])
def test_marking_a_task_cancels_its_job(airflow: Airflow, ray: FakeDashboard, dag: str, state: str) -> None:
    """In both modes, and only this run's job."""
    other = ray.add(f"somebody-elses-{dag}-{state}", status="RUNNING")
    job = started(airflow, ray, dag, state)
    airflow.mark(dag, state, state)
    until(lambda: job.status == "STOPPED", airflow)
    assert airflow.task(dag, state)["state"] == state
    assert (other.status, other.stops, job_of(ray, state, 2)) == ("RUNNING", 0, None)


@pytest.mark.parametrize("dag", ["worker", "triggerer"])
def test_clearing_a_task_replaces_its_job(airflow: Airflow, ray: FakeDashboard, dag: str) -> None:
    """The old job is cancelled, the new attempt has one of its own, and the task ends green by that one."""
    run_id = f"clear-{dag}"
    first = started(airflow, ray, dag, run_id)
    airflow.clear(dag, run_id)
    until(lambda: first.status == "STOPPED", airflow)
    second: FakeJob = until(lambda: job_of(ray, run_id, 2), airflow)
    second.succeed()
    until(lambda: airflow.task(dag, run_id)["state"] == "success", airflow)
    assert job_of(ray, run_id, 3) is None


def test_a_killed_worker_leads_to_the_same_job(airflow: Airflow, ray: FakeDashboard) -> None:
    """SIGKILL in the middle of the wait: the retry attaches, and the job runs once."""
    job = started(airflow, ray, "worker", "kill")
    os.kill(int((airflow.home / "pids" / "kill-job").read_text()), signal.SIGKILL)
    until(lambda: airflow.task("worker", "kill")["try_number"] == 2, airflow)
    until(lambda: airflow.task("worker", "kill")["state"] == "running", airflow)
    job.succeed('raylm.result {"rows": 7}\n')
    until(lambda: airflow.task("worker", "kill")["state"] == "success", airflow)
    assert (job.stops, job_of(ray, "kill", 2)) == (0, None)
    path = "/api/v2/dags/worker/dagRuns/kill/taskInstances/job/xcomEntries/return_value"
    assert json.loads(airflow.call("GET", f"{path}?stringify=true")["value"].replace("'", '"'))["result"] == {"rows": 7}


def test_a_restarted_triggerer_takes_the_job_up_again(airflow: Airflow, ray: FakeDashboard) -> None:
    """Its shutdown cancels nothing, and the next triggerer waits for the same job."""
    job = started(airflow, ray, "triggerer", "restart")
    airflow.stop("triggerer")
    time.sleep(1)
    assert (job.status, job.stops) == ("RUNNING", 0)
    airflow.start("triggerer")
    job.succeed()
    until(lambda: airflow.task("triggerer", "restart")["state"] == "success", airflow, 90)
    assert job.stops == 0

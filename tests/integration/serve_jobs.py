"""Run the provider's Serve jobs on a test cluster as operators do: package and spec uploaded, nothing installed."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import airflow_provider_raylm
from airflow_provider_raylm.spec import ERROR_PREFIX, RESULT_PREFIX, SPEC_FILENAME, to_json
from demo.ray_head import RayNode

ECHO_DIR = Path(__file__).parent / "serve_apps"


@dataclass(frozen=True)
class Answer:
    """What a job said: `result` or `error` of its last line, the log, and the package it was uploaded as."""

    result: dict[str, Any] | None
    error: dict[str, Any] | None
    log: str
    package_uri: str


class Cluster:
    """A Ray head and jobs on it."""

    def __init__(self, node: RayNode) -> None:
        from ray.job_submission import JobSubmissionClient

        self.node = node
        headers = {"Authorization": f"Bearer {node.token}"} if node.token else None
        self.jobs = JobSubmissionClient(node.dashboard_url, headers=headers)

    def start(self, module: str, spec: Any, *, working_dir: Path | None = None) -> tuple[str, str]:
        """Submit a job of `ray_serve`; returns its submission id and the uri of the uploaded package."""
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "airflow_provider_raylm"
            ignored = shutil.ignore_patterns("__pycache__", "hooks", "operators", "sensors", "triggers")
            shutil.copytree(Path(airflow_provider_raylm.__file__).parent, package, ignore=ignored)
            (package / SPEC_FILENAME).write_text(to_json(spec))
            runtime_env: dict[str, Any] = {"py_modules": [str(package)]}
            if working_dir is not None:
                runtime_env["working_dir"] = str(working_dir)
            submission_id = self.jobs.submit_job(
                entrypoint=f"python -m airflow_provider_raylm.ray_serve.{module}",
                submission_id=f"{module}-{uuid.uuid4().hex[:8]}",
                runtime_env=runtime_env,
            )
        return submission_id, runtime_env["py_modules"][0]

    def finish(self, submission_id: str, package_uri: str = "", *, timeout_s: float = 800) -> Answer:
        """Wait for a job and read its answer."""
        deadline = time.monotonic() + timeout_s
        while not self.jobs.get_job_status(submission_id).is_terminal():
            assert time.monotonic() < deadline, self.jobs.get_job_logs(submission_id)
            time.sleep(0.2)
        log = self.jobs.get_job_logs(submission_id)
        print(log)  # pytest shows it when the test fails
        return Answer(_line(log, RESULT_PREFIX), _line(log, ERROR_PREFIX), log, package_uri)

    def run(self, module: str, spec: Any, *, working_dir: Path | None = None) -> Answer:
        return self.finish(*self.start(module, spec, working_dir=working_dir))


def _line(log: str, prefix: str) -> dict[str, Any] | None:
    found = [line[len(prefix) :] for line in log.splitlines() if line.startswith(prefix)]
    return json.loads(found[-1]) if found else None

"""The frame around every job on the cluster."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from airflow_provider_raylm import job_main
from airflow_provider_raylm.exceptions import ServeError
from airflow_provider_raylm.spec import ERROR_PREFIX, RESULT_PREFIX, TeardownResult, TeardownSpec

SPEC = TeardownSpec(app_name="qwen")


@pytest.fixture(autouse=True)
def uploaded_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_main, "read_job_spec", lambda cls: SPEC)
    monkeypatch.setattr(job_main, "end_within", lambda seconds, code: None)  # it would end this process


def test_result_is_one_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever stood on the line before, the result starts a new one."""

    def main(spec: TeardownSpec) -> TeardownResult:
        print("progress without an end", end="")
        return TeardownResult(app_name=spec.app_name, state="absent")

    job_main.run_job(TeardownSpec, main)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(RESULT_PREFIX)]
    assert json.loads(line[len(RESULT_PREFIX) :])["state"] == "absent"


@pytest.mark.parametrize(
    ("error", "traceback"), [(ServeError("the port is taken"), False), (KeyError("surprise"), True)]
)
def test_error_is_one_line_and_exit_code_1(
    error: Exception, traceback: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own errors are one sentence; others bring their traceback along, on stderr."""

    def main(spec: TeardownSpec) -> TeardownResult:
        raise error

    with pytest.raises(SystemExit) as exited:
        job_main.run_job(TeardownSpec, main)
    assert exited.value.code == 1
    captured = capsys.readouterr()
    (line,) = [line for line in captured.out.splitlines() if line.startswith(ERROR_PREFIX)]
    assert json.loads(line[len(ERROR_PREFIX) :]) == {"type": type(error).__name__, "message": str(error)}
    assert ("Traceback" in captured.err) is traceback


@pytest.mark.parametrize(("work", "code"), [("TeardownResult(app_name='a', state='absent')", 0), ("1 / 0", 1)])
def test_a_thread_that_is_left_behind_does_not_keep_the_job(work: str, code: int) -> None:
    """A function of the user's may start one; the result is there, so the job ends, and says what held it up."""
    program = f"""
import threading
from airflow_provider_raylm import job_main
from airflow_provider_raylm.spec import TeardownResult, TeardownSpec
job_main.LINGER_S = 0.5
job_main.read_job_spec = lambda cls: None
def never_ends(): threading.Event().wait()
def main(spec):
    threading.Thread(target=never_ends).start()
    return {work}
job_main.run_job(TeardownSpec, main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert (ERROR_PREFIX if code else RESULT_PREFIX) in done.stdout
    assert "has not ended" in done.stderr
    assert "in never_ends" in done.stderr

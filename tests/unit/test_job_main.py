"""The frame around every job on the cluster."""

from __future__ import annotations

import json

import pytest

from airflow_provider_raylm import job_main
from airflow_provider_raylm.exceptions import ServeError
from airflow_provider_raylm.spec import ERROR_PREFIX, RESULT_PREFIX, TeardownResult, TeardownSpec

SPEC = TeardownSpec(app_name="qwen")


@pytest.fixture(autouse=True)
def uploaded_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_main, "read_job_spec", lambda cls: SPEC)


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

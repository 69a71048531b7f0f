"""Nothing here reaches a network other than loopback, and nothing reads the Airflow or Ray set-up of the machine."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile

import pytest

from airflow_provider_raylm.job_main import end_within

_status: int | None = None  # of the tests, once they are over


def _leave() -> None:
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


# The first to be registered is the last to run. What comes after it, the destructors of Ray, Arrow and torch in one
# process and in no order, has nothing to do with the tests.
atexit.register(_leave)

for name in [name for name in os.environ if name.startswith(("AIRFLOW_", "RAY_"))]:
    del os.environ[name]
# before anything imports airflow: it reads its home once
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="raylm-test-airflow-")
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "false"
os.environ["AIRFLOW__USAGE_DATA_COLLECTION__ENABLED"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)


def pytest_sessionfinish(exitstatus: int | pytest.ExitCode) -> None:
    global _status
    _status = int(exitstatus)


def pytest_unconfigure() -> None:
    """Nothing that a test left behind keeps the process for long; it says what that was."""
    if _status is not None:
        end_within(60.0, _status)

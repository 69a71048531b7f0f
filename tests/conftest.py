"""Nothing here reaches a network other than loopback, and nothing reads the Airflow or Ray set-up of the machine."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

for name in [name for name in os.environ if name.startswith(("AIRFLOW_", "RAY_"))]:
    del os.environ[name]
# before anything imports airflow: it reads its home once
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="raylm-test-airflow-")
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "false"
os.environ["AIRFLOW__USAGE_DATA_COLLECTION__ENABLED"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)

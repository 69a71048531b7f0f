"""An Airflow of our own: its home, database and connections in one folder, nothing shared with another installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def airflow_env(home: Path, *, connections: dict[str, dict[str, Any]], deferrable: bool = False) -> dict[str, str]:
    """Variables for every Airflow process of this home.

    Args:
        home: `AIRFLOW_HOME`; holds the SQLite database and the task logs.
        connections: `{conn_id: fields}` in the JSON form of Airflow: `conn_type`, `host`, `password`, `extra`, ...
        deferrable: `[operators] default_deferrable`.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW_", "RAY_"))}
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
        # SQLite lets one process write at a time; on a busy machine the others wait for longer than its usual 5 s. Two
        # requests of one API server can wait for each other, which ends with the time and a 500 for one of them.
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db?timeout=15",
        "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": str(deferrable).lower(),
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "false",
        **{f"AIRFLOW_CONN_{conn_id.upper()}": json.dumps(fields) for conn_id, fields in connections.items()},
    }


def migrate(env: dict[str, str]) -> None:
    """Create the database.

    Raises:
        RuntimeError: `airflow db migrate` failed; the message ends with its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"airflow db migrate failed:\n{(done.stdout + done.stderr)[-3000:]}")

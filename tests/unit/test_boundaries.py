"""The Airflow side and the cluster side meet in data, never in imports.

Each module is imported in a fresh interpreter in which the other side cannot be imported at all. A linter sees only the
imports that are written down; this sees what they drag along.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_provider_raylm"

AIRFLOW_SIDE_BLOCKED = (
    "airflow_provider_raylm.ray_data",
    "airflow_provider_raylm.ray_serve",
    "ray",
    "vllm",
    "openai",
    "pyarrow",
    "pandas",
    "torch",
)
CLUSTER_SIDE_BLOCKED = (
    "airflow",
    *(f"airflow_provider_raylm.{name}" for name in ("hooks", "operators", "sensors", "triggers", "links")),
)

CODE = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        for blocked in {blocked!r}:
            if name == blocked or name.startswith(blocked + "."):
                raise ImportError(f"{{name}} is on the other side")

sys.meta_path.insert(0, Blocked())
for module in {modules!r}:
    importlib.import_module(module)
"""


def modules(*places: str) -> list[str]:
    found: list[Path] = []
    for place in places:
        path = PACKAGE / place
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in found]


def import_blocked(names: list[str], blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    code = CODE.format(blocked=blocked, modules=names)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_the_airflow_side_imports_nothing_of_the_cluster() -> None:
    """A worker has Airflow and Ray's client; a DAG is read without even importing that."""
    names = modules("hooks", "operators", "sensors", "triggers", "links.py", "provider_info.py", "job_package.py")
    done = import_blocked(names, AIRFLOW_SIDE_BLOCKED)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_cluster_side_imports_nothing_of_airflow() -> None:
    """Airflow is not installed there, and the Airflow half of this package does not travel."""
    done = import_blocked(modules("ray_data", "ray_serve", "job_main.py"), CLUSTER_SIDE_BLOCKED)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["__init__.py", "exceptions.py", "spec.py", "job_main.py", "polling.py", "outcome.py"])
def test_shared_code_needs_the_standard_library_only(name: str) -> None:
    """It runs where neither side is installed."""
    (module,) = modules(name)
    blocked = (*AIRFLOW_SIDE_BLOCKED, *CLUSTER_SIDE_BLOCKED, "aiohttp", "requests", "pydantic", "yaml")
    done = import_blocked([module], blocked)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_block_blocks() -> None:
    """The check itself can fail."""
    done = import_blocked(["airflow_provider_raylm.hooks.ray"], ("aiohttp",))
    assert done.returncode != 0
    assert "is on the other side" in done.stderr


def test_import_linter() -> None:
    """The written contracts of `pyproject.toml`."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(tool)], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_package_that_travels_imports_by_itself(tmp_path: Path) -> None:
    """What a job uploads is complete: its entrypoints import from the uploaded folder alone."""
    from airflow_provider_raylm import job_package
    from airflow_provider_raylm.spec import TeardownSpec

    with job_package.staged(TeardownSpec(app_name="a")) as folder:
        code = (
            f"import sys; sys.path[:] = [p for p in sys.path if {str(ROOT)!r} not in p or 'site-packages' in p]; "
            f"sys.path.insert(0, {str(folder.parent)!r}); "
            "import airflow_provider_raylm.spec as s, airflow_provider_raylm.job_main; "
            "print(s.__file__, s.read_job_spec(s.TeardownSpec).app_name)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.stdout.split() == [str(folder / "spec.py"), "a"], done.stderr
    assert not folder.exists()

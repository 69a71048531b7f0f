"""The DAGs that people copy: they load, and the README shows the one that `make demo` runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag

ROOT = Path(__file__).resolve().parents[2]
DAG_FILES = sorted((ROOT / "dags").glob("*.py"))


@pytest.mark.parametrize("path", DAG_FILES, ids=lambda path: path.name)
def test_dag_file_loads_without_import_errors(path: Path) -> None:
    """Each file in dags/ defines at least one DAG."""
    bag = DagBag(str(path))
    assert bag.import_errors == {}
    assert len(bag.dags) >= 1


def test_main_dag_tears_down_what_it_sets_up() -> None:
    """Airflow runs `teardown` whatever became of `label`, because it is the teardown of `deploy`."""
    dag = DagBag(str(ROOT / "dags" / "qwen_batch_inference.py")).dags["qwen_batch_inference"]
    teardown = dag.get_task("teardown")
    assert teardown.is_teardown
    assert dag.get_task("deploy").is_setup
    assert teardown.upstream_task_ids == {"deploy", "label"}


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_readme_shows_the_dag_that_the_demo_runs(readme: str) -> None:
    """The first Python block of the README is dags/qwen_batch_inference.py, from `import pendulum` on."""
    block = re.search(r"```python\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), re.DOTALL)
    source = (ROOT / "dags" / "qwen_batch_inference.py").read_text(encoding="utf-8")
    assert block is not None
    assert block[1] == source[source.index("import pendulum") :]

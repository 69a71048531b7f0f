"""The whole DAG on real parts: Airflow, Ray, vLLM on the CPU and an S3 server as strict as OSS."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset as ds
import pytest

from demo.__main__ import DAG_ID, DAY, connections, endpoint_gone, run_conf, upload_reviews
from demo.airflow_home import airflow_env, migrate
from demo.model import TINY_QWEN3_ID, cpu_llm_config, tiny_qwen3
from demo.object_store import ObjectStore, object_store
from demo.ray_head import RayNode, free_ports, ray_head

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture(params=[(True, False), (False, True)], ids=["auth on, in the worker", "auth off, deferrable"])
def airflow(
    request: pytest.FixtureRequest, store: ObjectStore, tmp_path: Path
) -> Iterator[tuple[RayNode, dict[str, str]]]:
    auth, deferrable = request.param
    with ray_head(auth=auth) as head:
        env = airflow_env(tmp_path, connections=connections(head, store), deferrable=deferrable)
        migrate(env)
        yield head, env


def run(env: dict[str, str], conf: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """The report of one DAG run, and its whole log."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "demo.run_dag", DAG_ID, "--logical-date", DAY, "--conf", json.dumps(conf)]
    done = subprocess.run([*command, "--report", str(report)], env=env, capture_output=True, text=True, timeout=600)
    log = done.stdout + done.stderr
    assert report.exists(), log[-5000:]
    return json.loads(report.read_text()), log


def engines(head: RayNode) -> list[str]:
    """Command lines of this head's vLLM engine processes."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAYLM_RAY_TEMP_DIR") == str(head.temp_dir) and "EngineCore" in process.name():
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_dag_labels_every_review_once_and_leaves_no_endpoint(
    airflow: tuple[RayNode, dict[str, str]], store: ObjectStore, tmp_path: Path
) -> None:
    """Deploy, ai_query, Parquet, teardown; the same in the worker and in the triggerer, with token auth on and off."""
    head, env = airflow
    reviews = upload_reviews(store)
    conf = run_conf(store, free_ports(1)[0])
    model = tiny_qwen3()
    conf |= {"model_id": TINY_QWEN3_ID, "model_source": str(model), "llm_config": cpu_llm_config(TINY_QWEN3_ID, model)}

    report, log = run(env, conf, tmp_path)

    assert report["state"] == "success", log[-8000:]
    assert {name: task["state"] for name, task in report["tasks"].items()} == dict.fromkeys(
        ("deploy", "label", "teardown"), "success"
    )
    deploy, manifest, teardown = (report["tasks"][name]["xcom"] for name in ("deploy", "label", "teardown"))
    assert deploy["models"] == [TINY_QWEN3_ID]
    assert deploy["base_url"].endswith("/v1")
    assert (manifest["rows_in"], manifest["rows"], manifest["errors"]) == (reviews.num_rows, reviews.num_rows, 0)
    assert manifest["completion_tokens"] > 0
    assert teardown["state"] == "removed"

    folder = store.folder / "labels" / f"dt={DAY}"
    labels = ds.dataset(folder, format="parquet").to_table()
    assert sorted(labels["id"].to_pylist()) == sorted(reviews["id"].to_pylist())
    assert (folder / "_SUCCESS").exists()
    assert all(reply["status"] == "ok" for reply in labels["generated_text"].to_pylist())

    assert endpoint_gone(head)
    assert engines(head) == []
    for secret in (store.secret_access_key, head.token):
        assert secret is None or secret not in log + json.dumps(report)

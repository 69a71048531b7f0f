"""Flow control on a real cluster: a query job with two query actors against a simulated continuous-batching server.

The server runs in a process of its own (`benchmarks/server.py`) and counts what it is asked; the rest is read where a
person would read it: in the job's progress line and in the trace beside its manifest.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_provider_raylm.spec import QuerySpec
from benchmarks.endpoint import Endpoint, serve
from benchmarks.engine import Shape
from benchmarks.server import prompt
from demo.ray_head import ray_head

pytestmark = pytest.mark.integration

ray = pytest.importorskip("ray")
ROOT = str(Path(__file__).parents[2])
FIRST_LIMIT = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_head(num_cpus=4, auth=False) as node, pytest.MonkeyPatch.context() as patch:
        for name, value in node.env.items():
            patch.setenv(name, value)
        ray.init(address=node.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
        yield
        ray.shutdown()


def run_job(endpoint: Endpoint, folder: Path, rows: int, *, answer_tokens: int) -> list[dict[str, Any]]:
    """Run a query job over `rows` rows with two actors; its trace, one row a second."""
    from airflow_provider_raylm.ray_data.job import run

    table = pa.table({"id": range(rows), "text": [prompt(30, answer_tokens)] * rows})
    pq.write_table(table, folder / "in.parquet", row_group_size=max(1, rows // 8))
    spec = QuerySpec(
        model="sim",
        base_url=endpoint.base_url,
        input_path=str(folder / "in.parquet"),
        output_path=str(folder / "out"),
        prompt_col="text",
        concurrency=2,
        batch_size=FIRST_LIMIT // 2,
    )
    manifest = run(spec)
    assert (manifest.rows, manifest.errors) == (rows, 0)
    return list(json.loads((folder / "out" / "_raylm" / "flow.json").read_text()))


@contextlib.contextmanager
def halved_at(endpoint: Endpoint, tokens: int) -> Iterator[threading.Event]:
    """Take one of two replicas away once so many tokens have been generated."""
    done, over = threading.Event(), threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            if endpoint.counters()["tokens"] >= tokens:
                endpoint.use_replicas(1)
                done.set()
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def test_two_actors_share_one_limit_that_follows_the_server(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a small start the limit grows until both replicas are full, and comes down when one is taken away.

    The two actors together never have more at the server than the one limit says.
    """
    shape = Shape(name="2 x 32", max_num_seqs=32, replicas=2, base_ms=20.0)
    with serve(shape) as endpoint, halved_at(endpoint, tokens=500 * 30) as halved:
        trace = run_job(endpoint, tmp_path, 1200, answer_tokens=30)
        highest = endpoint.counters()["highest"]
    assert halved.is_set()
    limits = [row["limit"] for row in trace]
    top = limits.index(max(limits))
    assert limits[0] <= 2 * FIRST_LIMIT < 64 < max(limits)
    assert min(limits[top:]) < 60  # one replica runs 32, two would run 64; the last rows alone may raise it again
    assert 64 < highest <= max(limits)
    assert max(row["members"] for row in trace) == 2
    assert all(row["in_flight"] <= row["limit"] for row in trace[:top])  # later some were sent under a higher limit
    reasons = {row["reason"] for row in trace}
    assert {"no queue yet: doubled", "found the queue"} <= reasons
    measured = [row for row in trace if row["signal"] == "metrics"]
    assert measured
    assert all(0.0 <= row["waiting_share"] <= 1.0 for row in measured)
    assert re.search(r"limit \d+ \([a-z :]+\), waiting \d+ % \(metrics\)", capsys.readouterr().out)

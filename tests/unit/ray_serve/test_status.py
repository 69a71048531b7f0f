"""What the status command says."""

from __future__ import annotations

import dataclasses

from airflow_provider_raylm.ray_serve.ledger import Ledger
from airflow_provider_raylm.ray_serve.status import describe


def test_status_says_what_runs_for_whom_until_when() -> None:
    """State, age, GPUs, URL, models, and each holder with the time it has left."""
    ledger = Ledger("qwen", 1000.0, leases={"run1": 1160.0}, gpus=2, gpu_seconds=120)
    ledger.result = {"base_url": "http://h:8000/qwen/v1", "models": ["Qwen3.5-4B"]}
    view = {**dataclasses.asdict(ledger), "holders": ("run1",), "now_s": 1060.0}
    assert describe("qwen", view, {"status": "RUNNING"}) == [
        "qwen: RUNNING, lives 60 s, 2 GPUs, 120 GPU-seconds, http://h:8000/qwen/v1 Qwen3.5-4B",
        "  held by run1 for 100 s more",
    ]
    assert describe("qwen", None, None) == ["qwen: not in Serve"]

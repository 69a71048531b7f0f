"""Specs and results travel as JSON and arrive as they were."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_raylm import spec as specs
from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.spec import (
    DeployResult,
    DeploySpec,
    LeaseSpec,
    Manifest,
    QuerySpec,
    StorageSpec,
    TeardownResult,
    TeardownSpec,
)

LEASE = LeaseSpec(holder="d/r", ttl_s=60.0)
SPECS: list[Any] = [
    LEASE,
    StorageSpec(endpoint_url="https://oss.example", access_key_id="id", secret_access_key="key"),
    DeploySpec(app_name="a", llm_configs=({"model_loading_config": {"model_id": "模型"}},), lease=LEASE),
    DeployResult(
        app_name="a", base_url="http://h/v1", base_urls=("http://h/v1",), models=("m",), route_prefix="/a", ready_s=1.5
    ),
    TeardownSpec(app_name="a", holder="d/r"),
    TeardownResult(app_name="a", state="removed", gpu_seconds=2.5),
    QuerySpec(
        model="m",
        base_url="http://h/v1",
        input_path=("a", "b"),
        output_path="c",
        storage=StorageSpec(anonymous=True),
        lease=LEASE,
    ),
    Manifest(
        output_path="c",
        rows_in=2,
        rows=2,
        errors=0,
        prompt_tokens=1,
        completion_tokens=1,
        seconds=1.0,
        rows_per_s=2.0,
        files=({"path": "f", "rows": 2, "bytes": 3},),
    ),
]


@pytest.mark.parametrize("value", SPECS, ids=lambda v: type(v).__name__)
def test_round_trip(value: Any) -> None:
    """Tuples, nested specs and other alphabets included; one line, because a log carries it."""
    text = specs.to_json(value)
    assert "\n" not in text
    assert specs.from_json(type(value), text) == value


@pytest.mark.parametrize("value", SPECS, ids=lambda v: type(v).__name__)
def test_secrets_are_not_in_the_repr(value: Any) -> None:
    """A spec that ends up in a traceback gives nothing away."""
    hidden = [f.name for f in dataclasses.fields(value) if any(w in f.name for w in ("key", "token", "secret"))]
    shown = {"access_key_id", "secret_access_key", "session_token", "api_key"} & set(hidden)
    assert not any(f"{name}=" in repr(value) for name in shown)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"app_name": "a", "holdr": "x"}', r"unknown fields \['holdr'\]"),
        ("{}", "app_name"),
    ],
)
def test_a_broken_spec_is_named(text: str, message: str) -> None:
    """The class and the field, before any work starts."""
    with pytest.raises(SpecError, match=f"TeardownSpec: .*{message}|{message}"):
        specs.from_json(TeardownSpec, text)


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_what_is_not_json_is_refused(value: Any) -> None:
    """A Python object in `options` fails on the worker, not on the cluster."""
    with pytest.raises(SpecError, match="cannot be written as JSON"):
        specs.to_json(QuerySpec(model="m", base_url="u", input_path="i", output_path="o", options={"x": value}))


def test_a_package_without_spec_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting an entrypoint by hand is explained; a spec beside the package is read."""
    monkeypatch.setattr(specs, "__file__", str(tmp_path / "spec.py"))
    with pytest.raises(SpecError, match="started by an operator's job"):
        specs.read_job_spec(TeardownSpec)
    (tmp_path / specs.SPEC_FILENAME).write_text('{"app_name": "a"}')
    assert specs.read_job_spec(TeardownSpec) == TeardownSpec(app_name="a")

"""Fields, versions and fingerprints of an application."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_serve.app import (
    adapters,
    fingerprint,
    llm_config_kwargs,
    pick_application,
    replicas_at_start,
    reporting_often,
    to_ask,
    without_scaling,
)
from airflow_provider_raylm.spec import DeploySpec, LeaseSpec

CONFIG: dict[str, Any] = {"model_loading_config": {"model_id": "m"}}


@pytest.mark.parametrize(
    ("raw", "known", "kwargs"),
    [
        ({"accelerator_config": {"kind": "cpu"}}, {"accelerator_config"}, {"accelerator_config": {"kind": "cpu"}}),
        ({"accelerator_config": {"kind": "cpu"}}, {"use_cpu"}, {"use_cpu": True}),
        ({"accelerator_config": {"kind": "gpu"}}, {"use_cpu"}, {}),
    ],
)
def test_cpu_is_said_in_the_words_of_the_clusters_ray(raw: Any, known: set[str], kwargs: Any) -> None:
    """Older Rays have `use_cpu` for `accelerator_config`."""
    assert llm_config_kwargs(raw, known) == kwargs


def test_a_field_this_ray_lacks_is_named() -> None:
    """The message names the field and the version, not a validation dump."""
    with pytest.raises(SpecError, match=r"Ray [\d.]+ on this cluster has no LLMConfig field 'accelerator_config'"):
        llm_config_kwargs({"accelerator_config": {"kind": "cpu"}}, {"engine_kwargs"})


def test_scaling_does_not_change_what_a_replica_is_made_of() -> None:
    """More replicas restart no engine; other actor options do."""
    one = without_scaling({**CONFIG, "deployment_config": {"num_replicas": 1}})
    assert one == without_scaling({**CONFIG, "deployment_config": {"autoscaling_config": {"max_replicas": 4}}})
    assert one != without_scaling({**CONFIG, "deployment_config": {"ray_actor_options": {"num_cpus": 2}}})


def test_fingerprint_follows_the_configuration_and_not_the_run() -> None:
    """Lease, deadline and HTTP options are not part of it; models, packages and versions are."""
    spec = DeploySpec(app_name="a", llm_configs=(CONFIG,))
    base = fingerprint(spec, {"ray": "2.60.0"}, ())
    for change in ({"lease": LeaseSpec(holder="h")}, {"start_timeout_s": 1.0}, {"http_options": {"port": 1}}):
        assert fingerprint(dataclasses.replace(spec, **change), {"ray": "2.60.0"}, ()) == base
    assert fingerprint(dataclasses.replace(spec, route_prefix="/x"), {"ray": "2.60.0"}, ()) != base
    assert fingerprint(spec, {"ray": "2.55.1"}, ()) != base
    assert fingerprint(spec, {"ray": "2.60.0"}, ("gcs://p.zip",)) != base


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"env_vars": {"RAY_metrics_report_interval_ms": "1000"}}),
        (
            {"env_vars": {"A": "1"}, "pip": ["x"]},
            {"env_vars": {"RAY_metrics_report_interval_ms": "1000", "A": "1"}, "pip": ["x"]},
        ),
        (
            {"env_vars": {"RAY_metrics_report_interval_ms": "5000"}},
            {"env_vars": {"RAY_metrics_report_interval_ms": "5000"}},
        ),
    ],
)
def test_engines_report_every_second_unless_told_otherwise(before: Any, after: Any) -> None:
    """What the runtime environment has stays in it."""
    assert reporting_often(before) == after


def test_one_application_of_a_serve_config_is_deployed() -> None:
    """The one of that name, or the only one, and never a guess."""
    a, b = SimpleNamespace(name="a"), SimpleNamespace(name="b")
    assert pick_application([a], "mine") is a
    assert pick_application([a, b], "b") is b
    with pytest.raises(SpecError, match="none of them is named 'mine'"):
        pick_application([a, b], "mine")


@pytest.mark.parametrize(
    ("num_replicas", "scaling", "replicas"),
    [(3, None, 3), (None, None, 1), (1, (0, None), 1), (1, (2, None), 2), (1, (1, 5), 5)],
)
def test_at_least_the_replica_that_answers_is_counted(num_replicas: Any, scaling: Any, replicas: int) -> None:
    """An application that may have no replica still needs one to become ready."""
    autoscaling = SimpleNamespace(min_replicas=scaling[0], initial_replicas=scaling[1]) if scaling else None
    config = SimpleNamespace(num_replicas=num_replicas, autoscaling_config=autoscaling)
    assert replicas_at_start(SimpleNamespace(_deployment_config=config)) == replicas


@pytest.mark.parametrize(
    ("listed", "found", "asked"),
    [
        (("a", "b"), (), ("a", "b")),
        (("a", "a:x", "a:y", "b", "b:x"), ("a:x", "a:y", "b:x"), ("a", "a:x", "b", "b:x")),
        (("qwen:7b", "qwen:14b"), (), ("qwen:7b", "qwen:14b")),
    ],
)
def test_each_model_is_asked_and_one_adapter_of_each(
    listed: tuple[str, ...], found: tuple[str, ...], asked: tuple[str, ...]
) -> None:
    """A colon makes an adapter only where the part before it is a model, too."""
    assert adapters(listed) == found
    assert to_ask(listed) == asked

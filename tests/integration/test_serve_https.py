"""A cluster where Serve does not run yet: what it is started with, HTTPS, and who starts it. GPUs are only counted."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_raylm.spec import DeploySpec, TeardownSpec
from demo.ray_head import free_ports, ray_head
from tests.integration.serve_jobs import ECHO_DIR, Cluster
from tests.support.certificates import Certificate, certificate

pytestmark = pytest.mark.integration

ON_A_GPU: dict[str, dict[str, Any]] = {
    "actor": {"ray_actor_options": {"num_gpus": 1}},
    "group": {"placement_group_bundles": [{"CPU": 1, "GPU": 1}]},
}


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("https") / "trusted", "127.0.0.1")


@pytest.fixture(scope="module")
def cluster(trusted: Certificate) -> Iterator[Cluster]:
    """Every process of it knows the private authority."""
    with ray_head(num_cpus=6, num_gpus=2, env={"SSL_CERT_FILE": trusted.authority}) as node:
        yield Cluster(node)


def echo(app_name: str, port: int, made: Certificate, **options: Any) -> DeploySpec:
    return DeploySpec(
        app_name=app_name,
        serve_config={
            "proxy_location": "HeadOnly",
            "http_options": {
                "host": "127.0.0.1",
                "port": port,
                "ssl_certfile": made.certfile,
                "ssl_keyfile": made.keyfile,
            },
            "applications": [
                {
                    "name": "default",
                    "import_path": "echo_app:build",
                    "args": {"model": app_name, "reply": "one", "options": options},
                }
            ],
        },
        start_timeout_s=120.0,
    )


def test_certificate_that_clients_refuse_is_refused_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Not at the start deadline, and not after Serve runs with it: Serve cannot change it any more."""
    other_host = certificate(tmp_path / "other", "localhost")
    failed = cluster.run("deploy", echo("refused", free_ports(1)[0], other_host), working_dir=ECHO_DIR)
    assert failed.error is not None
    assert failed.error["type"] == "ServeError"
    assert "certificate is not trusted here" in failed.error["message"]
    assert "starting Serve" not in failed.log


def test_deploys_that_start_serve_at_the_same_time_both_answer_over_https(
    cluster: Cluster, trusted: Certificate
) -> None:
    """One of them starts Serve, the other joins; a GPU counts whether an actor or its placement group holds it."""
    port = free_ports(1)[0]
    jobs = {
        app_name: cluster.start("deploy", echo(app_name, port, trusted, **options), working_dir=ECHO_DIR)
        for app_name, options in ON_A_GPU.items()
    }
    context = ssl.create_default_context(cafile=trusted.authority)
    for app_name, job in jobs.items():
        deployed = cluster.finish(*job).result
        assert deployed is not None
        assert deployed["base_url"] == f"https://127.0.0.1:{port}/{app_name}/v1"
        with urllib.request.urlopen(f"{deployed['base_url']}/models", context=context) as response:
            assert json.loads(response.read())["data"][0]["id"] == app_name

    removals = {app_name: cluster.start("teardown", TeardownSpec(app_name=app_name)) for app_name in jobs}
    for job in removals.values():
        removed = cluster.finish(*job).result
        assert removed is not None
        assert removed["state"] == "removed"
        assert 0 < removed["gpu_seconds"] <= removed["lived_s"]

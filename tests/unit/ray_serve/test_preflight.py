"""What is refused before anything is started."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_raylm.exceptions import ServeError, SpecError
from airflow_provider_raylm.ray_serve.preflight import (
    check_certificate,
    check_port,
    check_spec,
    cli_arguments,
    local_path,
    path_problem,
    shortage,
)
from airflow_provider_raylm.spec import DeploySpec
from tests.support.certificates import certificate

MODEL: dict[str, Any] = {"model_loading_config": {"model_id": "m", "model_source": "/mnt/m"}}
ADAPTERS = {"dynamic_lora_loading_path": "s3://bucket/adapters"}
WITH_LORA: dict[str, Any] = {**MODEL, "lora_config": ADAPTERS, "engine_kwargs": {"enable_lora": True}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "either llm_configs or a serve_config"),
        ({"llm_configs": (MODEL,), "serve_config": {"applications": []}}, "not both"),
        ({"llm_configs": ({},)}, "model_id"),
        ({"llm_configs": (MODEL,), "route_prefix": "x"}, "must start with '/'"),
        ({"llm_configs": (MODEL,), "ingress": {"replicas": 2}}, "ingress_deployment_config"),
        ({"llm_configs": (MODEL,), "app_name": "a#b"}, "app_name"),
        (
            {"llm_configs": ({**MODEL, "deployment_config": {"ray_actor_options": {"num_gpus": 1}}},)},
            "the two add up until nothing fits",
        ),
        (
            {"llm_configs": ({**MODEL, "deployment_config": {"ray_actor_options": {"resources": {"GPU": 1}}}},)},
            "num_gpus must not stand",
        ),
        ({"llm_configs": ({"model_loading_config": {"model_id": "qwen:7b"}},)}, "':' cannot stand in a model_id"),
        ({"llm_configs": ({"model_loading_config": {"model_id": "m", "model_source": "oss://b/m"}},)}, "pyarrow-s3://"),
        ({"llm_configs": ({**WITH_LORA, "lora_config": {}},)}, "needs dynamic_lora_loading_path"),
        (
            {"llm_configs": ({**WITH_LORA, "lora_config": {"dynamic_lora_loading_path": "/mnt/adapters"}},)},
            "dynamic_lora_loading_path '/mnt/adapters' cannot be read",
        ),
        ({"llm_configs": ({**WITH_LORA, "engine_kwargs": {"max_lora_rank": 8}},)}, "enable_lora: true"),
    ],
)
def test_wrong_specs_are_refused_with_the_reason(fields: dict[str, Any], words: str) -> None:
    """One sentence, before the cluster is asked anything."""
    with pytest.raises(SpecError, match=words):
        check_spec(DeploySpec(**{"app_name": "app", **fields}))


def test_several_models_with_adapters_pass() -> None:
    """What Ray can load is let through."""
    other = {"model_loading_config": {"model_id": "n", "model_source": "pyarrow-s3://bucket/n"}}
    check_spec(DeploySpec(app_name="app", llm_configs=(WITH_LORA, other)))


@pytest.mark.parametrize(
    ("host", "trusted", "words"),
    [
        ("10.0.0.1", True, None),
        ("10.0.0.2", True, "at https://10.0.0.2:8000/v1: .*IP address mismatch.*must name the host"),
        ("10.0.0.1", False, "issuer certificate.*SSL_CERT_FILE"),
    ],
)
def test_certificate_is_judged_before_serve_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, trusted: bool, words: str | None
) -> None:
    """Serve cannot change it afterwards, so a certificate that clients refuse is refused first."""
    made = certificate(tmp_path / "made", "10.0.0.1", "head.internal")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", made.authority)
    if words is None:
        check_certificate(made.certfile, made.keyfile, None, f"https://{host}:8000/v1")
        return
    with pytest.raises(ServeError, match=words):
        check_certificate(made.certfile, made.keyfile, None, f"https://{host}:8000/v1")


def test_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """A missing file, and a key that is another certificate's."""
    made, other = certificate(tmp_path / "made", "a"), certificate(tmp_path / "other", "a")
    for certfile, keyfile in ((made.certfile + "x", made.keyfile), (made.certfile, other.keyfile)):
        with pytest.raises(ServeError, match="cannot be used on this node"):
            check_certificate(certfile, keyfile, None, "https://a:8000/v1")


@pytest.mark.parametrize(
    ("needed", "total", "limit", "words"),
    [
        ({"GPU": 1}, {"GPU": 1}, None, None),
        ({"GPU": 1}, {}, None, "application 'app' needs 1 GPU, cluster has 0, autoscaler: none"),
        ({"GPU": 4}, {"GPU": 1}, {"GPU": 8}, None),
        (
            {"GPU": 16},
            {"GPU": 1},
            {"GPU": 8},
            "needs 16 GPU, cluster has 1, autoscaler: at most 8 GPU",
        ),
        ({"CPU": 3, "GPU": 1}, {"CPU": 2}, None, "needs 3 CPU, cluster has 2; 1 GPU, cluster has 0, autoscaler: none"),
        (
            {"accelerator_type:A100": 0.001},
            {"accelerator_type:T4": 1},
            None,
            "needs an accelerator of type A100, cluster has T4, autoscaler: none",
        ),
    ],
)
def test_shortage_names_what_can_never_fit(
    needed: dict[str, float], total: dict[str, float], limit: dict[str, float] | None, words: str | None
) -> None:
    """What cluster and autoscaler cannot reach is said with both figures."""
    found = shortage("app", needed, total, limit)
    assert found is None if words is None else words in str(found)


def test_model_paths(tmp_path: Path) -> None:
    """A folder needs a config; a single file does not; stores and hubs are not looked up here."""
    assert path_problem(str(tmp_path / "missing")) == "does not exist"
    assert path_problem(str(tmp_path)) == "holds no config.json"
    (tmp_path / "config.json").write_text("{}")
    assert path_problem(str(tmp_path)) is None
    (tmp_path / "m.gguf").write_bytes(b"")
    assert path_problem(str(tmp_path / "m.gguf")) is None
    assert local_path("/mnt/m") == "/mnt/m"
    for elsewhere in ("s3://b/m", "Qwen/Qwen3-4B", None, {"bucket_uri": "s3://b"}):
        assert local_path(elsewhere) is None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    made.add_argument("--max-model-len", type=int)
    made.add_argument("--sizes", type=int, nargs="+")
    made.add_argument("--compilation-config", type=str)
    return made


def test_engine_kwargs_become_the_command_line_of_the_parser() -> None:
    """Switches, numbers, lists and nested settings are written as the parser reads them; the unknown is left out."""
    kwargs = {
        "enforce_eager": False,
        "max_model_len": 4096,
        "sizes": [1, 2],
        "compilation_config": {"cudagraph_capture_sizes": [1, 2048]},
        "only_in_python": object(),
    }
    assert cli_arguments(kwargs, parser()) == [
        "--no-enforce-eager",
        *("--max-model-len", "4096"),
        *("--sizes", "1", "2"),
        *("--compilation-config", '{"cudagraph_capture_sizes": [1, 2048]}'),
    ]


def test_a_switch_takes_true_or_false_only() -> None:
    """The string "false" would otherwise count as true."""
    with pytest.raises(SpecError, match="enforce_eager must be true or false"):
        cli_arguments({"enforce_eager": "false"}, parser())


def test_taken_port_is_refused() -> None:
    """Serve's own error for it comes minutes later and names no port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} on 127.0.0.1 is taken"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)

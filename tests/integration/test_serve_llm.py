"""Deploy, break, recover and remove a real vLLM engine on the CPU, with a tiny random-weight Qwen3."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_serve.preflight import check_engine_kwargs
from airflow_provider_raylm.spec import DeploySpec, LeaseSpec, TeardownSpec
from demo.model import TINY_QWEN3_ID, cpu_llm_config, tiny_qwen3
from demo.ray_head import free_ports, ray_head
from tests.integration.serve_jobs import Cluster

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_head(num_cpus=6) as node:
        yield Cluster(node)


def spec(llm_config: dict[str, Any], *, port: int = 8000, **fields: Any) -> DeploySpec:
    return DeploySpec(
        app_name="llm",
        llm_configs=(llm_config,),
        http_options={"host": "127.0.0.1", "port": port},
        **{"start_timeout_s": 300.0, **fields},
    )


def chat(base_url: str, timeout_s: float = 30) -> dict[str, Any]:
    body = {"model": TINY_QWEN3_ID, "messages": [{"role": "user", "content": "你好"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        reply: dict[str, Any] = json.loads(response.read())
        return reply


def engines(cluster: Cluster) -> list[psutil.Process]:
    """vLLM engine processes of this cluster; others may run vLLM on the same machine."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("RAYLM_RAY_TEMP_DIR") == str(cluster.node.temp_dir)
            if ours and "EngineCore" in " ".join(process.cmdline()):
                found.append(process)
    return found


def eventually(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("engine_kwargs", "words"),
    [
        ({"max_model_length": 10}, "Did you mean 'max_model_len'"),
        ({"max_model_len": "long"}, "--max-model-len"),
        ({"dtype": "float17"}, "float17"),
        ({"enforce_eager": "yes"}, "enforce_eager must be true or false"),
    ],
)
def test_vllms_own_parser_judges_engine_kwargs(engine_kwargs: dict[str, Any], words: str) -> None:
    """A misspelt or impossible argument is refused without an engine, a GPU or a cluster."""
    from ray.serve.llm import LLMConfig

    with pytest.raises(SpecError, match=words):
        check_engine_kwargs(LLMConfig(**cpu_llm_config("m", "/mnt/m", engine_kwargs=engine_kwargs)))


def test_every_argument_the_demo_uses_is_taken() -> None:
    """Settings for throughput pass as well: CUDA graph sizes, parallelism, prefix caching."""
    from ray.serve.llm import LLMConfig

    more = {
        "compilation_config": {"cudagraph_capture_sizes": [1, 512, 2048]},
        "tensor_parallel_size": 2,
        "enable_prefix_caching": True,
        "enable_auto_tool_choice": False,
        "served_model_name": None,
    }
    check_engine_kwargs(LLMConfig(**cpu_llm_config("m", "/mnt/m", engine_kwargs=more)))


def test_endpoint_answers_recovers_from_a_killed_engine_and_is_gone_after_teardown(cluster: Cluster) -> None:
    """The whole life of an endpoint, seen from its processes."""
    before = {p.pid for p in engines(cluster)}
    port = free_ports(1)[0]
    deploy = spec(cpu_llm_config(TINY_QWEN3_ID, tiny_qwen3()), port=port, lease=LeaseSpec(holder="run", ttl_s=600))
    deployed = cluster.run("deploy", deploy).result
    assert deployed is not None
    assert deployed["models"] == [TINY_QWEN3_ID]
    assert set(deployed["versions"]) == {"ray", "vllm", "python"}
    assert chat(deployed["base_url"])["usage"]["completion_tokens"] > 0

    (engine,) = [p for p in engines(cluster) if p.pid not in before]
    config = cpu_llm_config(TINY_QWEN3_ID, tiny_qwen3(), deployment_config={"max_ongoing_requests": 64})
    changed = cluster.run("deploy", spec(config, port=port, lease=LeaseSpec(holder="run", ttl_s=600))).result
    assert changed is not None
    assert changed["changed"]
    assert [p.pid for p in engines(cluster) if p.pid not in before] == [engine.pid]  # no engine restarts to scale

    engine.kill()

    def answers() -> bool:
        try:
            return bool(chat(deployed["base_url"], timeout_s=60)["choices"])
        except OSError:
            return False

    eventually(lambda: any(p.pid not in {*before, engine.pid} for p in engines(cluster)))
    eventually(answers)
    removed = cluster.run("teardown", TeardownSpec(app_name="llm", holder="run")).result
    assert removed is not None
    assert removed["state"] == "removed"
    assert removed["lived_s"] > 0
    assert removed["gpu_seconds"] == 0
    assert {p.pid for p in engines(cluster)} <= before


def with_foreign_tokenizer(folder: Path) -> dict[str, Any]:
    """A checkpoint whose tokenizer is another model's: it knows tokens that the model does not."""
    shutil.copytree(tiny_qwen3(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: i + 100_000 for token, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return cpu_llm_config(TINY_QWEN3_ID, folder)


def test_wrong_tokenizer_fails_the_start(cluster: Cluster, tmp_path: Path) -> None:
    """An engine that comes up and cannot answer is not ready: the job says so and removes it."""
    before = {p.pid for p in engines(cluster)}
    failed = cluster.run("deploy", spec(with_foreign_tokenizer(tmp_path / "model"), port=free_ports(1)[0]))
    assert failed.error is not None
    assert failed.error["type"] == "ServeError"
    assert "index out of range" in failed.error["message"]
    assert {p.pid for p in engines(cluster)} <= before


def test_engine_without_memory_fails_the_start(cluster: Cluster) -> None:
    """The reason stands only in the engine's log; it is in the error."""
    config = cpu_llm_config(TINY_QWEN3_ID, tiny_qwen3(), env_vars={"VLLM_CPU_KVCACHE_SPACE": "100000"})
    failed = cluster.run("deploy", spec(config, port=free_ports(1)[0]))
    assert failed.error is not None
    assert "memory" in failed.error["message"].lower()


def test_missing_model_and_missing_gpu_are_said_at_once(cluster: Cluster) -> None:
    """Nothing is started for what can never start."""
    missing = cluster.run("deploy", spec(cpu_llm_config("m", "/mnt/no/model")))
    assert missing.error == {
        "type": "SpecError",
        "message": "model 'm': model_source '/mnt/no/model' does not exist on this cluster's node",
    }
    gpu = {"model_loading_config": {"model_id": "m", "model_source": str(tiny_qwen3())}}
    without_gpu = cluster.run("deploy", spec(gpu))
    assert without_gpu.error is not None
    assert without_gpu.error["message"] == "application 'llm' needs 1 GPU, cluster has 0, autoscaler: none"

"""Deploy, break, recover and remove a real vLLM engine on the CPU, with a tiny random-weight Qwen3."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.ray_data.flow import SELDOM_S
from airflow_provider_raylm.ray_data.load import LoadReader
from airflow_provider_raylm.ray_serve.preflight import check_engine_kwargs
from airflow_provider_raylm.spec import DeploySpec, LeaseSpec, TeardownSpec
from demo.model import TINY_QWEN3_ID, cpu_llm_config, tiny_qwen3, tiny_qwen3_adapter
from demo.object_store import ObjectStore, object_store
from demo.ray_head import free_ports, ray_head
from tests.integration.serve_jobs import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]


STORED_ID = "tiny-qwen3-in-the-store"
RAYS_ADAPTERS = Path("/tmp/ray/llm/lora/cache")  # where Ray keeps them, whatever the cluster's temp folder is


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """A store as strict as OSS, with a model and a LoRA adapter of it."""
    adapter = f"loud-{secrets.token_hex(4)}"
    with object_store() as made:
        shutil.copytree(tiny_qwen3(), made.folder / "models" / "tiny")
        shutil.copytree(tiny_qwen3_adapter(), made.folder / "adapters" / adapter)
        yield made
    shutil.rmtree(RAYS_ADAPTERS / adapter, ignore_errors=True)
    (RAYS_ADAPTERS / f"{adapter}.lock").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def cluster(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    role = {
        "AWS_ENDPOINT_URL_S3": store.endpoint_url,
        "AWS_S3_ADDRESSING_STYLE": "virtual",
        "AWS_REGION": store.region,
        "AWS_ACCESS_KEY_ID": store.access_key_id,
        "AWS_SECRET_ACCESS_KEY": store.secret_access_key,
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),  # where Ray downloads models to
    }
    with ray_head(num_cpus=6, env=role) as node:
        yield Cluster(node)


def spec(*llm_configs: dict[str, Any], port: int = 8000, **fields: Any) -> DeploySpec:
    return DeploySpec(
        llm_configs=llm_configs,
        http_options={"host": "127.0.0.1", "port": port},
        **{"app_name": "llm", "start_timeout_s": 700.0, **fields},
    )


def chat(base_url: str, model: str = TINY_QWEN3_ID, timeout_s: float = 30, **options: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "你好"}],
        "max_tokens": 4,
        "temperature": 0,
        **options,
    }
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


async def report_s(cluster: Cluster, base_url: str, seconds: float = 90) -> float | None:
    """Seconds between two reports of an engine at work on the metrics pages, as flow control sees it."""
    found = json.loads((cluster.node.temp_dir / "prom_metrics_service_discovery.json").read_text())
    urls = [f"http://{target}/metrics" for entry in found for target in entry["targets"]]
    reader = LoadReader(base_url, TINY_QWEN3_ID, "", lambda _: urls)
    long = {"max_tokens": 300, "ignore_eos": True}
    asked = asyncio.create_task(asyncio.to_thread(chat, base_url, timeout_s=60, **long))
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and (reader.every_s or 10) > SELDOM_S:
            await reader.read()
            await asyncio.sleep(0.2)
            if asked.done():
                asked = asyncio.create_task(asyncio.to_thread(chat, base_url, timeout_s=60, **long))
        return reader.every_s
    finally:
        await reader.close()
        await asked


ON_GPUS = {
    "model_loading_config": {"model_id": "m", "model_source": "/mnt/m"},
    "engine_kwargs": {"tensor_parallel_size": 2},
    "deployment_config": {"num_replicas": 3},
    "accelerator_config": {"kind": "gpu"},
}
SCALING = {**ON_GPUS, "deployment_config": {"autoscaling_config": {"min_replicas": 3, "max_replicas": 9}}}
FIVE = {"ingress_deployment_config": {"num_replicas": 5}}
BUILD = """
import json, sys
from airflow_provider_raylm.ray_serve.app import build, replicas_at_start
from airflow_provider_raylm.spec import DeploySpec

for llm_config, cpus, ingress in json.load(sys.stdin):
    app = build(DeploySpec(app_name="llm", llm_configs=(llm_config,), ingress=ingress), (), cpus)
    deployments = {d.name: d for d in app.built.deployments}
    version = [d._version for d in deployments.values()]
    print("built", json.dumps([replicas_at_start(deployments["OpenAiIngress"]), version]))
"""


def test_the_ingress_is_as_wide_as_its_gpus_need(cluster: Cluster) -> None:
    """Ray's default of one is full before a GPU is. What a replica is made of stays the same."""
    cases: list[tuple[dict[str, Any], float, dict[str, Any], int]] = [
        (ON_GPUS, 64.0, {}, 6),  # two for each
        (ON_GPUS, 16.0, {}, 4),  # a quarter of the CPUs
        (ON_GPUS, 3.0, {}, 1),  # few CPUs
        (ON_GPUS, 64.0, FIVE, 5),  # as was said
        (SCALING, 64.0, {}, 1),
        (cpu_llm_config("m", "/mnt/m"), 64.0, {}, 1),
    ]
    done = subprocess.run(  # Ray builds applications only in a process that is connected to a cluster
        [sys.executable, "-c", BUILD],
        input=json.dumps([case[:3] for case in cases]),
        env={**os.environ, **cluster.node.env, "RAY_ADDRESS": cluster.node.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = [json.loads(line[len("built ") :]) for line in done.stdout.splitlines() if line.startswith("built ")]
    assert [replicas for replicas, _ in built] == [case[3] for case in cases]
    assert built[0][1] == built[1][1] == built[2][1]


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


def stored_model() -> dict[str, Any]:
    """A model that lies in the store, and takes the adapters that lie there."""
    return cpu_llm_config(
        STORED_ID,
        "pyarrow-s3://lake/models/tiny",
        engine_kwargs={"enable_lora": True, "max_lora_rank": 8},
        lora_config={"dynamic_lora_loading_path": "pyarrow-s3://lake/adapters"},
    )


def test_endpoint_answers_recovers_from_a_killed_engine_and_is_gone_after_teardown(
    cluster: Cluster, store: ObjectStore
) -> None:
    """The whole life of an endpoint of two models, one with a LoRA adapter, seen from its processes."""
    before = {p.pid for p in engines(cluster)}
    port = free_ports(1)[0]
    config = cpu_llm_config(TINY_QWEN3_ID, tiny_qwen3())
    lease = LeaseSpec(holder="run", ttl_s=600)
    deployed = cluster.run("deploy", spec(config, stored_model(), port=port, lease=lease)).result
    assert deployed is not None
    assert sorted(deployed["models"]) == sorted([TINY_QWEN3_ID, STORED_ID])
    assert deployed["adapters"] == [f"{STORED_ID}:{folder.name}" for folder in (store.folder / "adapters").iterdir()]
    assert set(deployed["versions"]) == {"ray", "vllm", "python"}
    asked = [*deployed["models"], *deployed["adapters"]]
    replies = {model: chat(deployed["base_url"], model) for model in asked}
    assert all(reply["usage"]["completion_tokens"] > 0 for reply in replies.values())
    texts = {model: reply["choices"][0]["message"]["content"] for model, reply in replies.items()}
    assert texts[STORED_ID] == texts[TINY_QWEN3_ID] != texts[deployed["adapters"][0]]

    assert (asyncio.run(report_s(cluster, deployed["base_url"])) or 10) <= SELDOM_S

    running = {p.pid: p for p in engines(cluster) if p.pid not in before}
    assert len(running) == 2
    scaled = {**config, "deployment_config": {"max_ongoing_requests": 64}}
    changed = cluster.run("deploy", spec(scaled, stored_model(), port=port, lease=lease)).result
    assert changed is not None
    assert changed["changed"]
    assert {p.pid for p in engines(cluster)} - before == set(running)  # no engine restarts to scale

    killed = min(running)
    running[killed].kill()

    def answers() -> bool:
        try:
            return all(chat(deployed["base_url"], model, timeout_s=60)["choices"] for model in asked)
        except OSError:
            return False

    eventually(lambda: bool({p.pid for p in engines(cluster)} - before - set(running)))
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


def test_engines_that_cannot_answer_fail_the_start(cluster: Cluster, tmp_path: Path) -> None:
    """One comes up with a wrong tokenizer and cannot answer, one has no memory: the reason stands only in their logs.

    Both jobs say it, and remove what they started.
    """
    before = {p.pid for p in engines(cluster)}
    port = free_ports(1)[0]
    without_memory = cpu_llm_config(TINY_QWEN3_ID, tiny_qwen3(), env_vars={"VLLM_CPU_KVCACHE_SPACE": "100000"})
    reasons = {"index out of range": with_foreign_tokenizer(tmp_path / "model"), "memory": without_memory}
    jobs = {
        reason: cluster.start("deploy", spec(config, app_name=f"llm-{i}", port=port))
        for i, (reason, config) in enumerate(reasons.items())
    }
    for reason, job in jobs.items():
        failed = cluster.finish(*job)
        assert failed.error is not None
        assert failed.error["type"] == "ServeError"
        assert reason in failed.error["message"].lower()
    assert {p.pid for p in engines(cluster)} <= before


def test_missing_model_and_missing_gpu_are_said_at_once(cluster: Cluster) -> None:
    """Nothing is started for what can never start."""
    gpu = {"model_loading_config": {"model_id": "m", "model_source": str(tiny_qwen3())}}
    jobs = [cluster.start("deploy", spec(config)) for config in (cpu_llm_config("m", "/mnt/no/model"), gpu)]
    missing, without_gpu = [cluster.finish(*job).error for job in jobs]
    assert missing == {
        "type": "SpecError",
        "message": "model 'm': model_source '/mnt/no/model' does not exist on this cluster's node",
    }
    assert without_gpu is not None
    assert without_gpu["message"] == "application 'llm' needs 1 GPU, cluster has 0, autoscaler: none"

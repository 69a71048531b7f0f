"""The whole path on a GPU machine: start Ray, run our deploy, query and teardown jobs, and measure each.

    python -m benchmarks.gpu.run --models MODELS --out OUT head 'refusals&' offline:100,101 deploy:default query:100,101
    python -m benchmarks.gpu.run --models MODELS --out OUT fixed:256:1500:200,1024:4000:201 http teardown

Jobs go through `JobSubmissionClient` with the specs that the operators make; Airflow is not needed. A stage is
`NAME[:ARGUMENT]`; with `&` at its end it runs beside the ones after it. The Ray head outlives the command, so stages
can be spread over several commands (`--work` holds what they share); `end` stops it. Every figure is one line of
`OUT/results.jsonl`, written as soon as it is known; `benchmarks.gpu.report` makes one JSON, the table and the plot of
them. A stage is left out when less of `--budget-s` is left than it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from airflow_provider_raylm.job_package import staged
from airflow_provider_raylm.spec import (
    ERROR_PREFIX,
    RESULT_PREFIX,
    DeploySpec,
    QuerySpec,
    TeardownSpec,
)
from benchmarks.gpu.rows import make_rows, write_batch_files
from benchmarks.gpu.watch import Watch, gpu_mib, gpu_snapshot
from demo.ray_head import start_head

MODEL_ID = "qwen"
APP = "qwen"
TRACE_COLUMNS = (
    "elapsed_s",
    "limit",
    "in_flight",
    "waiting_share",
    "signal",
    "completion_tokens",
    "rows",
    "loop_lag_s",
    "reason",
)

# what a machine without internet, and without FlashInfer's compiler, needs
MACHINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
GPU_ENGINE = {
    "load_format": "dummy",
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.9,
    "max_num_batched_tokens": 8192,
}
CPU_ENGINE = {"load_format": "dummy", "max_model_len": 2048, "max_num_seqs": 16, "enforce_eager": True}
ONE_INGRESS = {"ingress_deployment_config": {"num_replicas": 1, "autoscaling_config": None}}


@dataclass
class Variant:
    """One way to deploy: more engine arguments, ingress settings, and the checkpoint folder."""

    engine: dict[str, Any] = field(default_factory=dict)
    ingress: dict[str, Any] = field(default_factory=dict)
    model: str | None = None


VARIANTS = {
    "default": Variant(),
    "ingress1": Variant(ingress=ONE_INGRESS),
    "graphs": Variant(engine={"max_cudagraph_capture_size": 2048}),
    "qwen3_5": Variant(
        engine={"additional_config": {"gdn_prefill_backend": "triton"}, "language_model_only": True}, model="qwen3_5-4b"
    ),
}


class Bench:
    """What the stages share: arguments, the state that outlives a command, and the results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = time.monotonic() + args.budget_s
        self.out: Path = args.out
        self.work: Path = args.work
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._state_file = self.work / "state.json"
        self.state: dict[str, Any] = json.loads(self._state_file.read_text()) if self._state_file.is_file() else {}

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def remember(self, **values: Any) -> None:
        with self._lock:
            self.state.update(values)
            self._state_file.write_text(json.dumps(self.state))

    def emit(self, stage: str, **figures: Any) -> None:
        """Keep one line of results, and show it without its long parts."""
        line = {"stage": stage, "at": round(time.time(), 1), **figures}
        with self._lock, (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        short = {k: v for k, v in line.items() if k not in ("watch", "trace", "log", "manifest", "at")}
        print(json.dumps(short)[:1500], flush=True)

    def model(self, variant: Variant) -> str:
        return str((self.args.models / (variant.model or self.args.model)).resolve())

    def engine(self, variant: Variant) -> dict[str, Any]:
        return {**(GPU_ENGINE if self.args.device == "cuda" else CPU_ENGINE), **variant.engine}

    def http_options(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.args.port}

    def llm_config(self, variant: Variant, **changes: Any) -> dict[str, Any]:
        """Arguments of `LLMConfig`; `changes` win, `engine_kwargs` among them is added to the variant's."""
        engine = {**self.engine(variant), **changes.pop("engine_kwargs", {})}
        config: dict[str, Any] = {
            "model_loading_config": {"model_id": MODEL_ID, "model_source": self.model(variant)},
            "deployment_config": {"num_replicas": 1},
            "engine_kwargs": engine,
        }
        if self.args.device == "cpu":
            config["accelerator_config"] = {"kind": "cpu"}
            config["placement_group_config"] = {"bundles": [{"CPU": 1}]}
            config["runtime_env"] = {"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
        return {**config, **changes}


@dataclass
class Job:
    """One job that ended.

    Attributes:
        result: What its result line says; `None` when it failed.
        error: What its error line says, or the end of its log.
        wall_s: Seconds from the submission to the end as seen from here.
    """

    status: str
    result: dict[str, Any] | None
    error: str
    wall_s: float
    log: str


def run_job(bench: Bench, module: str, spec: Any, *, timeout_s: float) -> Job:
    """Submit one of our jobs as an operator does, wait for its end (or stop it at the deadline), read its answer."""
    from ray.job_submission import JobSubmissionClient

    head = bench.state["head"]
    client = JobSubmissionClient(head["dashboard_url"], headers={"Authorization": f"Bearer {head['token']}"})
    begun = time.monotonic()
    with staged(spec) as package:
        job_id = client.submit_job(
            entrypoint=f"python -m airflow_provider_raylm.{module}", runtime_env={"py_modules": [str(package)]}
        )
    while not (status := client.get_job_status(job_id)).is_terminal():
        if time.monotonic() - begun > timeout_s:
            client.stop_job(job_id)
            break
        time.sleep(0.25)
    wall_s = time.monotonic() - begun
    log = client.get_job_logs(job_id)
    (bench.out / "jobs.log").open("a").write(f"=== {module} {job_id} {status.value} {wall_s:.1f} s\n{log[-20000:]}\n")
    answers = {prefix: _last_line(log, prefix) for prefix in (RESULT_PREFIX, ERROR_PREFIX)}
    error = answers[ERROR_PREFIX] or client.get_job_info(job_id).message or "\n".join(log.splitlines()[-15:])
    result = json.loads(answers[RESULT_PREFIX]) if answers[RESULT_PREFIX] else None
    return Job(status.value, result, "" if result else error[:1500], round(wall_s, 2), log)


def _last_line(log: str, prefix: str) -> str:
    lines = [line[len(prefix) :] for line in log.splitlines() if line.startswith(prefix)]
    return lines[-1] if lines else ""


# ---------------------------------------------------------------- stages


def head(bench: Bench, _: str) -> None:
    """Start the Ray head; it outlives this command."""
    bench.emit("machine", **_machine())
    bench.emit("memory", when="before", **gpu_snapshot())
    begun = time.monotonic()
    gpus = bench.args.gpus if bench.args.device == "cuda" else 0
    node = start_head(
        num_cpus=bench.args.cpus,
        num_gpus=gpus,
        object_store_mib=bench.args.object_store_mib,
        env={"RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "120"},  # the first import on a machine is slow
    )
    bench.remember(
        head={
            "dashboard_url": node.dashboard_url,
            "token": node.token,
            "address": node.address,
            "env": node.env,
            "pid": node.process.pid,
            "temp_dir": str(node.temp_dir),
        }
    )
    bench.emit("head", start_s=round(time.monotonic() - begun, 1))


def refusals(bench: Bench, _: str) -> None:
    """Deploys that must fail before any GPU is taken, and say why."""
    more = bench.args.gpus + 1
    cases: dict[str, dict[str, Any]] = {
        "more GPUs than there are": bench.llm_config(Variant(), engine_kwargs={"tensor_parallel_size": more}),
        "num_gpus in ray_actor_options": bench.llm_config(
            Variant(), deployment_config={"num_replicas": 1, "ray_actor_options": {"num_gpus": 1}}
        ),
    }
    for case, config in cases.items():
        spec = DeploySpec(
            app_name="refused", llm_configs=(config,), http_options=bench.http_options(), start_timeout_s=120.0
        )
        job = run_job(bench, "ray_serve.deploy", spec, timeout_s=150)
        bench.emit("refusal", case=case, status=job.status, wall_s=job.wall_s, error=job.error)


def memory(bench: Bench, _: str) -> None:
    """A deploy that the engine refuses: less GPU memory than the weights need. The GPU must be free afterwards."""
    config = bench.llm_config(Variant(), engine_kwargs={"gpu_memory_utilization": 0.05, "enforce_eager": True})
    before = gpu_mib()
    job = run_job(
        bench,
        "ray_serve.deploy",
        DeploySpec(app_name="too-big", llm_configs=(config,), start_timeout_s=240.0),
        timeout_s=260,
    )
    bench.emit(
        "refusal",
        case="gpu_memory_utilization that cannot fit",
        status=job.status,
        wall_s=job.wall_s,
        error=job.error,
        gpu_mib_before=before,
        gpu_mib_after=gpu_mib(),
        after=gpu_snapshot(),
    )


def offline(bench: Bench, seeds: str) -> None:
    """vLLM without HTTP. It must have the GPU to itself."""
    command = [
        *(sys.executable, "-m", "benchmarks.gpu.offline"),
        *("--model", bench.model(Variant()), "--engine", json.dumps(bench.engine(Variant()))),
        *("--rows", str(bench.args.rows), "--seeds", seeds or "100"),
    ]
    for line in _lines(bench, command, timeout_s=420):
        bench.emit("offline", **line)
    _await_free_gpu(30)


def deploy(bench: Bench, name: str) -> None:
    """Our deploy job: from the submission to the first answered request."""
    variant = VARIANTS[name or "default"]
    before = gpu_snapshot()
    spec = DeploySpec(
        app_name=APP,
        llm_configs=(bench.llm_config(variant),),
        ingress=variant.ingress,
        http_options=bench.http_options(),
        start_timeout_s=min(400.0, bench.left_s()),
    )
    job = run_job(bench, "ray_serve.deploy", spec, timeout_s=min(420.0, bench.left_s()))
    bench.emit(
        "deploy",
        variant=name or "default",
        status=job.status,
        submit_to_answer_s=job.wall_s,
        result=job.result,
        error=job.error,
        before=before,
        after=gpu_snapshot(),
    )
    if job.result:
        bench.remember(base_url=job.result["base_url"], variant=name or "default")
        return
    bench.remember(base_url=None)
    _keep_serve_logs(bench)


def query(bench: Bench, argument: str) -> None:
    """Our query job with defaults, once for each seed. `SEED@ROWS` sets another number of rows."""
    for item in argument.split(","):
        seed, _, rows = item.partition("@")
        _query(bench, int(seed), int(rows or bench.args.rows))


def _query(bench: Bench, seed: int, count: int) -> None:
    if bench.left_s() < 30 + count / 60:
        bench.emit("query", seed=seed, rows=count, skipped="time")
        return
    rows = make_rows(count, seed)
    folder = bench.work / f"rows-{seed}-{count}"
    output = bench.work / f"answers-{seed}-{count}-{time.time_ns()}"
    spec = QuerySpec(
        model=MODEL_ID,
        base_url=bench.state["base_url"],
        input_path=str(write_batch_files(folder, rows, MODEL_ID)),
        input_format="openai_batch",
        output_path=str(output),
        labels={"benchmark": "gpu"},
    )
    watch = Watch(_metrics_urls(bench))
    watch.start()
    begun = time.time()
    job = run_job(bench, "ray_data.job", spec, timeout_s=max(20.0, bench.left_s() - 10))
    figures = watch.figures()
    manifest = job.result or {}
    bench.emit(
        "query",
        variant=bench.state.get("variant"),
        seed=seed,
        rows=count,
        status=job.status,
        error=job.error,
        submitted_at=round(begun, 2),
        job_s=job.wall_s,
        asked_tokens=sum(row.max_tokens for row in rows),
        **{
            k: manifest.get(k)
            for k in ("seconds", "rows_per_s", "completion_tokens_per_s", "completion_tokens", "errors")
        },
        flow=manifest.get("flow"),
        trace=_trace(output),
        manifest=manifest,
        log=job.log[-6000:],
        during=gpu_snapshot(),
        **figures,
    )


def _trace(output: Path) -> dict[str, list[Any]]:
    """The job's own per-second trace, as columns."""
    columns: dict[str, list[Any]] = {name: [] for name in TRACE_COLUMNS}
    for path in output.glob("_raylm/**/flow.json"):
        for row in json.loads(path.read_text()):
            for name in TRACE_COLUMNS:
                columns[name].append(row.get(name))
    return columns


def fixed(bench: Bench, plan: str) -> None:
    """The static sweep: a fixed number of requests in flight."""
    command = [
        *(sys.executable, "-m", "benchmarks.gpu.fixed", "--base-url", bench.state["base_url"], "--model", MODEL_ID),
        *("--plan", plan, "--max-s", str(max(1.0, min(300.0, bench.left_s() - 70)))),
    ]
    watch = Watch(_metrics_urls(bench))
    watch.start()
    for line in _lines(bench, command, timeout_s=max(20.0, bench.left_s() - 10)):
        figures = watch.figures()
        bench.emit("fixed", variant=bench.state.get("variant"), **line, **figures)
        watch = Watch(_metrics_urls(bench))
        watch.start()
    watch.figures()


def http(bench: Bench, argument: str) -> None:
    """Ray's own HTTP stage on the same rows: `ACTORS:ROWS:SEED`, comma separated."""
    for item in (argument or "1:24:300,64:512:301").split(","):
        actors, rows, seed = item.split(":")
        command = [
            *(
                sys.executable,
                "-m",
                "benchmarks.gpu.http_stage",
                "--base-url",
                bench.state["base_url"],
                "--model",
                MODEL_ID,
            ),
            *("--actors", actors, "--rows", rows, "--seed", seed),
        ]
        head_state = bench.state["head"]
        env = {**head_state["env"], "RAY_ADDRESS": head_state["address"]}
        for line in _lines(bench, command, timeout_s=max(20.0, min(100.0, bench.left_s() - 10)), env=env):
            bench.emit("http", variant=bench.state.get("variant"), **line)


def teardown(bench: Bench, _: str) -> None:
    """Our teardown job; the GPU must be back to where it was before the deploy."""
    before = gpu_snapshot()
    job = run_job(bench, "ray_serve.teardown", TeardownSpec(app_name=APP, timeout_s=120.0), timeout_s=150)
    bench.emit(
        "teardown",
        variant=bench.state.get("variant"),
        status=job.status,
        wall_s=job.wall_s,
        result=job.result,
        error=job.error,
        before=before,
        after=gpu_snapshot(),
    )
    _await_free_gpu(30)


def end(bench: Bench, _: str) -> None:
    """Stop the Ray head, and remove what it wrote."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(bench.state["head"]["pid"], signal.SIGTERM)
    for _second in range(30):
        if not Path(f"/proc/{bench.state['head']['pid']}").exists():
            break
        time.sleep(1)
    shutil.rmtree(bench.state["head"]["temp_dir"], ignore_errors=True)
    bench.emit("memory", when="after", **gpu_snapshot())


@dataclass(frozen=True)
class Stage:
    """A stage, the seconds it needs at least to be worth starting, and whether it asks the endpoint."""

    run: Callable[[Bench, str], None]
    needs_s: float
    asks: bool = False

    def __call__(self, bench: Bench, name: str, argument: str) -> None:
        """Run it; when it breaks, say so and let the others run."""
        try:
            self.run(bench, argument)
        except Exception as exc:
            bench.emit(
                "failed", of=name, error=f"{type(exc).__name__}: {exc}"[:1000], log=traceback.format_exc()[-3000:]
            )


STAGES = {
    "head": Stage(head, 20),
    "refusals": Stage(refusals, 30),
    "memory": Stage(memory, 90),
    "offline": Stage(offline, 180),
    "deploy": Stage(deploy, 90),
    "query": Stage(query, 40, asks=True),
    "fixed": Stage(fixed, 30, asks=True),
    "http": Stage(http, 30, asks=True),
    "teardown": Stage(teardown, 15),
    "end": Stage(end, 5),
}

# ---------------------------------------------------------------- parts of stages


def _machine() -> dict[str, Any]:
    versions = {}
    for package in ("ray", "vllm", "torch", "transformers", "openai", "aiohttp", "pyarrow", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False) if _has_gpu() else None
    return {
        "versions": {"python": platform.python_version(), **versions},
        "cpus": os.cpu_count(),
        "gpus": gpu.stdout.splitlines() if gpu else [],
    }


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def _metrics_urls(bench: Bench) -> list[str]:
    """Ray's metrics pages of this machine's node."""
    folder = Path(bench.state["head"]["temp_dir"])
    found = folder / "prom_metrics_service_discovery.json"
    try:
        return [f"http://{target}/metrics" for entry in json.loads(found.read_text()) for target in entry["targets"]]
    except (OSError, ValueError):
        return []


def _await_free_gpu(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while gpu_mib() > 2000 and time.monotonic() < deadline:
        time.sleep(0.5)


def _lines(
    bench: Bench, command: list[str], *, timeout_s: float, env: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Run a command, ended at the latest after `timeout_s`, and yield the JSON objects it prints."""
    name = command[2].rsplit(".", 1)[-1]
    with (bench.out / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        ended = threading.Timer(timeout_s, lambda: os.killpg(process.pid, signal.SIGKILL))
        ended.start()
        try:
            for line in process.stdout or ():
                with contextlib.suppress(ValueError):
                    yield json.loads(line)
        finally:
            ended.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if (code := process.wait()) != 0:
                bench.emit("failed", command=name, exit_code=code, log=(bench.out / f"{name}.log").read_text()[-3000:])


def _keep_serve_logs(bench: Bench) -> None:
    """The ends of Serve's replica logs, where an engine says why it did not start."""
    logs = Path(bench.state["head"]["temp_dir"]).glob("session_latest/logs/serve/*.log")
    with (bench.out / "serve.log").open("a") as out:
        for path in sorted(logs):
            out.write(f"=== {path.name}\n{path.read_text(errors='replace')[-8000:]}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE", help=f"one of {', '.join(STAGES)}")
    parser.add_argument("--models", type=Path, required=True, help="folder of checkpoint folders")
    parser.add_argument("--model", default="qwen3-4b", help="checkpoint folder in it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/raylm-gpu"), help="what several commands share")
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--port", type=int, default=8000, help="of Serve, on loopback")
    parser.add_argument("--object-store-mib", type=int, default=2048)
    args = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in MACHINE_ENV.items()})
    bench = Bench(args)
    beside: list[threading.Thread] = []
    for item in args.stages:
        name, _, argument = item.removesuffix("&").partition(":")
        stage = STAGES[name]
        if bench.left_s() < stage.needs_s:
            bench.emit(name, argument=argument, skipped="time", left_s=round(bench.left_s()))
        elif stage.asks and not bench.state.get("base_url"):
            bench.emit(name, argument=argument, skipped="no endpoint")
        elif item.endswith("&"):
            beside.append(threading.Thread(target=stage, args=(bench, name, argument), daemon=True))
            beside[-1].start()
        else:
            stage(bench, name, argument)
    for thread in beside:
        thread.join(max(0.0, bench.left_s()))


if __name__ == "__main__":
    main()

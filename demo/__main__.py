"""`make demo`: deploy, ai_query, Parquet, teardown on this machine, every part real. `--ui` opens Airflow's web page.

Exit code 0 only if every row went in and came out once, without an error, into the store, and the endpoint is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from airflow_provider_raylm.hooks.jobs_client import Cluster
from airflow_provider_raylm.hooks.submission import submission_client
from demo.airflow_home import ROOT, airflow_env, migrate
from demo.model import SMOLLM2_ID, cpu_llm_config, smollm2_checkpoint
from demo.object_store import ObjectStore, object_store
from demo.ray_head import RayNode, free_ports, ray_head

DAG_ID = "qwen_batch_inference"
DAY = "2026-12-01"
RESULTS = ROOT / ".demo"
REVIEWS = Path(__file__).with_name("data") / "reviews.jsonl"


def say(text: str) -> None:
    print(text, flush=True)


def connections(head: RayNode, store: ObjectStore) -> dict[str, dict[str, Any]]:
    """The two connections of the DAG, as a user would enter them."""
    return {
        "ray_default": {"conn_type": "ray", "host": head.dashboard_url, "password": head.token or ""},
        "aliyun_oss": {
            "conn_type": "aws",
            "login": store.access_key_id,
            "password": store.secret_access_key,
            "extra": {
                "endpoint_url": store.endpoint_url,
                "region_name": store.region,
                "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            },
        },
    }


def run_conf(store: ObjectStore, serve_port: int) -> dict[str, Any]:
    """What differs from production: the model, where it runs, and the bucket."""
    return {
        "lake": f"oss://{store.bucket}",
        "model_id": SMOLLM2_ID,
        "model_source": str(smollm2_checkpoint()),
        "llm_config": cpu_llm_config(SMOLLM2_ID, smollm2_checkpoint()),
        "http_options": {"host": "127.0.0.1", "port": serve_port},
    }


def upload_reviews(store: ObjectStore) -> pa.Table:
    """Put the reviews into the bucket as one Parquet file. Columns: id, lang, text, expected (all string)."""
    rows = [json.loads(line) for line in REVIEWS.read_text(encoding="utf-8").splitlines()]
    table = pa.Table.from_pylist(rows)
    folder = store.folder / "reviews" / f"dt={DAY}"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "reviews.parquet")
    return table


def run_dag(env: dict[str, str], conf: dict[str, Any], log: Path) -> dict[str, Any]:
    """Run the DAG in a process of its own; show its progress, keep its whole log.

    Returns:
        `{"state": ..., "tasks": {task_id: {"state": ..., "xcom": ...}}}`.
    """
    report = log.with_name("report.json")
    command = [sys.executable, "-m", "demo.run_dag", DAG_ID, "--logical-date", DAY]
    command += ["--conf", json.dumps(conf), "--report", str(report)]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                out.write(line)
                if shown := progress(line):
                    say(shown)
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.communicate(timeout=20)  # read on: one that cannot write its last lines never ends
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if not report.exists():
        raise SystemExit(f"the DAG did not run:\n{''.join(log.read_text().splitlines(keepends=True)[-40:])}")
    result: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return result


TASK_STARTS = re.compile(r"\[DAG TEST\] starting task_id=(\w+)")
JOB_SAYS = re.compile(
    r"\[info +\] (?!::|\[?\d{4}-\d\d-\d\d |Running entrypoint)(\S.*?) *\[airflow_provider_raylm\.triggers"
)


def progress(line: str) -> str | None:
    """The part of an Airflow log line that a person waiting for the demo wants to see; `None` for the rest."""
    if match := TASK_STARTS.search(line):
        return match[1]
    if (match := JOB_SAYS.search(line)) and not match[1].startswith(("raylm.result", "(", "WARNING", "\x1b")):
        return "  " + match[1]
    return None


def endpoint_gone(head: RayNode) -> bool:
    """Whether Ray Serve knows no application any more. Asked of Ray itself, not of our teardown."""
    headers = {"Authorization": f"Bearer {head.token}"} if head.token else {}
    client = submission_client(Cluster(url=head.dashboard_url, headers=headers))
    applications = client._do_request("GET", "/api/serve/applications/").json().get("applications", {})
    return not applications


def keep_page_open(env: dict[str, str], conf: dict[str, Any], home: Path) -> int:
    """Run the DAG on `airflow standalone`, say which page to open, and stay until Ctrl-C."""
    port = free_ports(1)[0]
    page = f"http://127.0.0.1:{port}"
    env = env | {
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": page,
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{page}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "true",
        "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": "true",
        "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "false",  # only the run of this demo, not those its schedule owes
    }
    airflow = [sys.executable, "-m", "airflow"]
    with (home / "standalone.log").open("w") as out:
        standalone = subprocess.Popen(
            [*airflow, "standalone"], env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(f"{page}/api/v2/monitor/health", standalone)
        trigger = [*airflow, "dags", "trigger", DAG_ID, "--logical-date", DAY, "--conf", json.dumps(conf)]
        for command in ([*airflow, "dags", "unpause", DAG_ID], trigger):
            subprocess.run(command, env=env, check=True, capture_output=True)
        say(f"\nopen {page}/dags/{DAG_ID} (no password); Ctrl-C ends everything")
        standalone.wait()
    except KeyboardInterrupt:
        say("ending Airflow, Ray and the store")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(standalone.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            standalone.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(standalone.pid, signal.SIGKILL)
    return 0


def wait_for(url: str, process: subprocess.Popen[bytes], *, timeout_s: float = 180.0) -> None:
    """Return when `url` answers 200."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(1)
    raise SystemExit(f"nothing answered at {url} within {timeout_s:.0f} s")


def show(report: dict[str, Any], reviews: pa.Table, store: ObjectStore, gone: bool) -> int:
    """Print a few answers and the last line; 0 only if every part of it is as it should be."""
    tasks = report["tasks"]
    manifest = tasks["label"]["xcom"] or {}
    if report["state"] != "success" or not manifest:
        say("the DAG run failed: " + ", ".join(f"{name} {task['state']}" for name, task in tasks.items()))
        return 1
    output = store.folder / "labels" / f"dt={DAY}"
    labels = ds.dataset(output, format="parquet").to_table().sort_by("id")
    rows = labels.to_pylist()
    answers = [str(row["generated_text"]["content"]).strip() for row in rows]
    say("")
    for row, answer in list(zip(rows, answers, strict=True))[:8]:
        say(f"  {row['id']}  {row['expected']:<9} {answer:<9} {row['text'][:60]}")
    right = sum(answer.lower().startswith(row["expected"]) for row, answer in zip(rows, answers, strict=True))
    say(f"  {right} of {len(rows)} answers as expected (a 135M model; Qwen does better)")
    say("")
    errors = sum(row["generated_text"]["error"] is not None for row in rows)
    complete = sorted(labels["id"].to_pylist()) == sorted(reviews["id"].to_pylist())
    finished = (output / "_SUCCESS").exists()
    say(
        f"rows in {reviews.num_rows}, rows out {labels.num_rows}, errors {errors}, "
        f"tokens {manifest['prompt_tokens']} + {manifest['completion_tokens']}, {manifest['rows_per_s']:.1f} rows/s, "
        f"output {manifest['output_path']} ({output.relative_to(ROOT)}), endpoint {'gone' if gone else 'STILL THERE'}"
    )
    return 0 if complete and finished and gone and errors == 0 and tasks["teardown"]["state"] == "success" else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo")
    parser.add_argument("--ui", action="store_true", help="run it on `airflow standalone` and keep the web page open")
    parser.add_argument("--auth", choices=("on", "off"), default="on", help="Ray token authentication")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started is ended then, too

    started = time.monotonic()
    say("model: SmolLM2-135M-Instruct (converted once, about half a minute)")
    smollm2_checkpoint()
    shutil.rmtree(RESULTS, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raylm-airflow-")))
        store = stack.enter_context(object_store(folder=RESULTS))
        say(f"object store: {store.endpoint_url}, bucket {store.bucket}")
        head = stack.enter_context(ray_head(auth=args.auth == "on"))
        say(f"Ray: {head.dashboard_url}, token auth {args.auth}")
        env = airflow_env(home, connections=connections(head, store))
        migrate(env)
        say(f"Airflow: home {home}; {time.monotonic() - started:.0f} s so far")
        reviews = upload_reviews(store)
        conf = run_conf(store, free_ports(1)[0])
        if args.ui:
            return keep_page_open(env, conf, home)
        report = run_dag(env, conf, home / "dag.log")
        status = show(report, reviews, store, endpoint_gone(head))
        if status:
            kept = RESULTS / "dag.log"
            shutil.copy(home / "dag.log", kept)
            say(f"the whole log: {kept}")
        return status


if __name__ == "__main__":
    sys.exit(main())

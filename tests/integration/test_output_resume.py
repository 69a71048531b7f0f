"""The query job on a real cluster and a strict store: killed anywhere and started again, each row is there once.

Kills are SIGKILL to real processes at seeded points. The endpoint answers a seeded number of rows and holds the
others, so a kill meets rows that are stored, finished but not stored, in flight and not asked yet. The rows that
were stored at that moment are read from the store itself.

`RAYLM_KILL_SEEDS=20` repeats each kill test with so many seeds, `RAYLM_KILL_FIRST_SEED` says where they begin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import secrets
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from airflow_provider_raylm.job_package import staged
from airflow_provider_raylm.ray_data import storage
from airflow_provider_raylm.spec import ERROR_PREFIX, RESULT_PREFIX, QuerySpec, StorageSpec
from demo.object_store import Faults, ObjectStore, object_store
from demo.ray_head import RayNode, start_head
from tests.support.mock_endpoint import Answer, Ask, MockEndpoint, refusal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

FIRST_SEED = int(os.environ.get("RAYLM_KILL_FIRST_SEED", "6"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("RAYLM_KILL_SEEDS", "1")))
KINDS = ("head", "actor", "driver and store", "driver")
ANY_SEEDS = range(SEEDS.start + 4, SEEDS.stop + 4)  # the kinds take turns; the first is a driver on a faulty store
ROWS = 400
FEW = 120
MOST_REQUESTS = 40  # what a run over `FEW` rows sends to the store, about
CPUS = 8
ROLE_LIFETIME_S = 5.0
POSTPROCESS = """
def keep_even(batch):
    return batch[batch["id"] % 2 == 0].assign(length=lambda rows: rows["text"].str.len())
"""


class Lab:
    """One head, which may be replaced, one store, and jobs on them."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store = store
        self.api_key, self.wrong_key = f"sk-{secrets.token_hex(16)}", f"sk-{secrets.token_hex(16)}"
        self.wrong_secret = secrets.token_hex(16)
        self.token_key_id = ""
        self.storage = StorageSpec(
            endpoint_url=store.endpoint_url,
            region=store.region,
            access_key_id=store.access_key_id,
            secret_access_key=store.secret_access_key,
        )
        self.fs, _ = storage.open_filesystem("oss://lake", self.storage)
        self.module = folder / "lab_functions"
        self.module.mkdir()
        (self.module / "__init__.py").write_text(POSTPROCESS)
        self.node: RayNode = start_head(num_cpus=CPUS)

    def write_input(self, name: str, rows: int) -> str:
        table = pa.table({"id": pa.array(range(rows), pa.int64()), "text": [f"row {i}" for i in range(rows)]})
        pq.write_table(table, f"lake/in/{name}.parquet", filesystem=self.fs, row_group_size=100)
        return f"oss://lake/in/{name}.parquet"

    def write_batch(self, name: str, rows: int) -> str:
        for i in range(rows):
            body = {"model": "m", "messages": [{"role": "user", "content": f"row {i}"}]}
            line = {"custom_id": f"c-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            storage.write_bytes(self.fs, f"lake/in/{name}/{i:02d}.jsonl", json.dumps(line).encode())
        return f"oss://lake/in/{name}/"

    def spec(self, endpoint: MockEndpoint, input_path: str, output: str, **changes: Any) -> QuerySpec:
        values: dict[str, Any] = {
            "model": "m",
            "base_url": endpoint.base_url,
            "api_key": self.api_key,
            "input_path": input_path,
            "output_path": f"oss://lake/out/{output}",
            "prompt_col": "text",
            "concurrency": 1,
            "storage": self.storage,
            "labels": {"dag": "resume", "task": output},
        }
        return QuerySpec(**{**values, **changes})

    def client(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        return JobSubmissionClient(self.node.dashboard_url, headers={"Authorization": f"Bearer {self.node.token}"})

    def submit(self, spec: QuerySpec) -> str:
        with staged(spec) as package:
            return str(
                self.client().submit_job(
                    entrypoint="python -m airflow_provider_raylm.ray_data.job",
                    runtime_env={"py_modules": [str(package), str(self.module)]},
                )
            )

    def ended(self, job_id: str, *, timeout_s: float = 240.0) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Wait for a job's end; its result line, its error line."""
        client = self.client()
        wait_until(lambda: client.get_job_status(job_id).is_terminal(), timeout_s, lambda: client.get_job_logs(job_id))
        lines = client.get_job_logs(job_id).splitlines()
        found = [
            next((json.loads(line[len(prefix) :]) for line in lines if line.startswith(prefix)), None)
            for prefix in (RESULT_PREFIX, ERROR_PREFIX)
        ]
        assert any(found) or client.get_job_status(job_id).value == "FAILED"
        return found[0], found[1]

    def is_over(self, job_id: str) -> bool:
        """`False` also when the head is being killed."""
        with contextlib.suppress(Exception):
            return bool(self.client().get_job_status(job_id).is_terminal())
        return False

    def succeeded(self, job_id: str) -> dict[str, Any]:
        result, error = self.ended(job_id)
        assert result is not None, error or self.client().get_job_logs(job_id)[-3000:]
        return result

    def get(self, path: str) -> bytes:
        """What Ray's dashboard answers."""
        headers = {"Authorization": f"Bearer {self.node.token}"}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(self.node.dashboard_url + path, headers=headers), timeout=30) as answer:
            return bytes(answer.read())

    def driver(self, job_id: str) -> int:
        return int(self.client().get_job_info(job_id).driver_info.pid)

    def query_actors(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.node.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "AiQuery" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill_processes(self) -> None:
        """Everything at once, as when the machine goes."""
        with contextlib.suppress(psutil.Error):
            head = psutil.Process(self.node.process.pid)
            for process in [*head.children(recursive=True), head]:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def kill_head(self) -> None:
        self.kill_processes()
        self.node.stop()

    def stored(self, output: str) -> set[str]:
        """Prompts of the rows whose replies are in the run's journal."""
        found = set()
        for path in (self.store.folder / "out" / output / "_raylm" / "runs").glob("*/journal/*/*.parquet"):
            # one that is being written or was just replaced
            with contextlib.suppress(OSError, pa.ArrowInvalid):
                replies = pq.read_table(path, partitioning=None)["reply"].to_pylist()
                found |= {json.loads(reply)["content"].removeprefix("re: ") for reply in replies}
        return found

    def output(self, output: str) -> pa.Table:
        """What a reader sees who knows nothing of this package."""
        assert self.fs.get_file_info(f"lake/out/{output}/_SUCCESS").is_file
        return pads.dataset(f"lake/out/{output}", filesystem=self.fs, format="parquet").to_table()


def wait_until(condition: Any, timeout_s: float, explain: Any = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {explain()[-3000:]}"
        time.sleep(0.1)


class Held:
    """Answers `count` requests and keeps the others waiting."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.answered = 0

    def __call__(self, ask: Ask) -> Answer:
        if self.answered >= self.count:
            return Answer(delay_s=300.0)
        self.answered += 1
        return Answer(content=f"re: {ask.text}", delay_s=0.2)


def answer(ask: Ask) -> Answer:
    return Answer(content=f"re: {ask.text}", delay_s=0.05)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with object_store() as store:
        lab = Lab(store, tmp_path_factory.mktemp("lab"))
        try:
            yield lab
        finally:
            lab.kill_head()  # its orderly end takes half a minute


def texts(ids: Any) -> set[str]:
    return {f"row {i}" for i in ids}


def wait_for_the_kill(lab: Lab, rng: random.Random, held: Held, output: str, job_id: str) -> None:
    """Until the endpoint has answered its number of rows and some of them are newly stored, and a moment longer."""
    seen = len(lab.stored(output))

    def log() -> str:
        return str(lab.client().get_job_logs(job_id))

    wait_until(lambda: held.answered >= held.count, 60, log)
    wait_until(lambda: len(lab.stored(output)) > seen, 30, log)
    time.sleep(rng.uniform(0, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_driver_and_then_a_killed_head_cost_only_what_was_not_stored(lab: Lab, seed: int) -> None:
    """After each kill the next attempt asks for the rows that were not stored, all of them and once.

    The last attempt does so on a store that says SlowDown to every seventh request and cuts every fifth download.
    """
    rng = random.Random(seed)
    name = f"kill{seed}"
    path = lab.write_input(name, ROWS)
    with MockEndpoint() as endpoint:
        spec = lab.spec(endpoint, path, name)
        for kill in ("driver", "head"):
            endpoint.script = held = Held(rng.randint(60, 150))
            begun, stored_before = len(endpoint.asks), lab.stored(name)
            job_id = lab.submit(spec)
            wait_for_the_kill(lab, rng, held, name, job_id)
            if kill == "driver":
                os.kill(lab.driver(job_id), signal.SIGKILL)
                assert lab.ended(job_id) == (None, None)
            else:
                lab.kill_head()
                lab.node = start_head(num_cpus=CPUS)
            asks = [ask.text for ask in endpoint.asks[begun:]]
            assert len(asks) == len(set(asks)) <= held.count + endpoint.most_in_flight
            assert not stored_before & set(asks), "a stored row was asked again"
            assert not lab.fs.get_file_info(f"lake/out/{name}/_SUCCESS").is_file
        begun, stored = len(endpoint.asks), lab.stored(name)
        endpoint.script = answer
        lab.store.faults.slow_down_every, lab.store.faults.truncate_every = 7, 5
        result = lab.succeeded(lab.submit(spec))
        lab.store.faults.slow_down_every = lab.store.faults.truncate_every = 0
        asks = [ask.text for ask in endpoint.asks[begun:]]
        assert sorted(asks) == sorted(texts(range(ROWS)) - stored)
        assert (result["rows_in"], result["rows"], result["errors"]) == (ROWS, ROWS, 0)
        assert result["rows_resumed"] == len(stored) > 0
        assert result["flow"]["rows"] == ROWS
    check_rows(lab, name, ROWS)


def check_rows(lab: Lab, output: str, count: int) -> None:
    """Each row once, with its own answer."""
    rows = lab.output(output).to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(count))
    assert all(row["generated_text"]["content"] == f"re: {row['text']}" for row in rows)


@pytest.mark.parametrize("seed", ANY_SEEDS)
def test_a_run_killed_at_any_request_to_the_store_is_completed_by_the_next_attempt(lab: Lab, seed: int) -> None:
    """Before the plan, while replies are stored, in the middle of the commit: no row is lost, doubled or paid twice.

    The kill comes with a request that the store has not answered yet.
    """
    rng = random.Random(seed)
    kind, last = KINDS[seed % len(KINDS)], rng.randint(1, MOST_REQUESTS)
    name = f"any{seed}"
    path = lab.write_input(name, FEW)
    killed: list[str] = []
    with MockEndpoint(answer) as endpoint:
        spec = lab.spec(endpoint, path, name)
        if kind == "driver and store":
            faults = {f"{what}_every": rng.randint(4, 15) for what in ("slow_down", "error", "lose", "truncate")}
            lab.store.faults.__dict__.update(faults)
        job_id = lab.submit(spec)
        wait_until(lambda: lab.client().get_job_info(job_id).driver_info is not None, 60)
        driver, begun = lab.driver(job_id), len(lab.store.requests)

        def kill(method: str, what: str) -> None:
            if killed or len(lab.store.requests) - begun < last:
                return
            if kind == "head":
                killed.append(f"{method} {what}")
                lab.kill_processes()
                return
            if kind == "actor":
                if not (actors := lab.query_actors()):
                    return
                actors[0].kill()
            else:
                os.kill(driver, signal.SIGKILL)
            killed.append(f"{method} {what}")

        lab.store.watch = kill
        if kind == "head":
            wait_until(lambda: killed or lab.is_over(job_id), 90)
        result = None if killed and kind == "head" else lab.ended(job_id)[0]
        lab.store.watch = lambda method, what: None
        print(f"seed {seed}: {kind} at request {last}: {killed or 'it was over before'}")
        if kind == "head" and killed:
            lab.node.stop()
            lab.node = start_head(num_cpus=CPUS)
        wait_until(lambda: not lab.query_actors(), 30)
        asked = [ask.text for ask in endpoint.asks]
        assert len(asked) <= FEW * (1 + (kind == "actor"))
        if result is None:
            begun_commit = lab.fs.get_file_info(f"lake/out/{name}/_raylm/commit.json").is_file
            stored = lab.stored(name)
            result = lab.succeeded(lab.submit(spec))
            again = [ask.text for ask in endpoint.asks[len(asked) :]]
            finished = begun_commit or not again
            assert sorted(again) == ([] if finished else sorted(texts(range(FEW)) - stored))
        lab.store.faults.__dict__.update(Faults().__dict__)
        assert (result["rows_in"], result["rows"], result["errors"]) == (FEW, FEW, 0), killed
    check_rows(lab, name, FEW)
    left = [entry.path for entry in storage.list_files(lab.fs, f"lake/out/{name}/_raylm", hidden=True)]
    assert sorted(path.rpartition("/")[2] for path in left) == ["flow.json", "manifest.json"], killed


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_query_actor_is_replaced_within_the_job(lab: Lab, seed: int) -> None:
    """The job goes on by itself, asks no stored row again, and `postprocess` and the size of files are as asked."""
    rng = random.Random(seed)
    name = f"actor{seed}"
    path = lab.write_input(name, ROWS)
    with MockEndpoint() as endpoint:
        endpoint.script = held = Held(rng.randint(60, 150))
        job_id = lab.submit(lab.spec(endpoint, path, name, max_rows_per_file=64, postprocess="lab_functions:keep_even"))
        wait_for_the_kill(lab, rng, held, name, job_id)
        actors = lab.query_actors()
        assert len(actors) == 1
        endpoint.script = answer
        actors[0].kill()
        begun, stored = len(endpoint.asks), lab.stored(name)
        result = lab.succeeded(job_id)
        again = [ask.text for ask in endpoint.asks[begun:]]
    assert sorted(again) == sorted(texts(range(ROWS)) - stored)
    assert (result["rows_in"], result["rows"], result["rows_filtered"]) == (ROWS, ROWS // 2, ROWS // 2)
    table = lab.output(name)
    assert sorted(table["id"].to_pylist()) == list(range(0, ROWS, 2))
    assert table["length"].to_pylist() == [len(text) for text in table["text"].to_pylist()]
    assert len(result["files"]) >= ROWS // 64
    assert max(file["rows"] for file in result["files"]) <= 64


@pytest.fixture(scope="module")
def ended(lab: Lab) -> Iterator[dict[str, Any]]:
    """Jobs that run side by side: `(job id, result line, error line)` of each."""

    def script(ask: Ask) -> Answer:
        if ask.headers["authorization"] != f"Bearer {lab.api_key}":
            # as hosted endpoints do
            return refusal(401, f"Incorrect API key provided: {ask.headers['authorization']}")
        return refusal(400, "no") if ask.text in ("row 3", "row 4") else answer(ask)

    lab.write_input("ids/a", 5)
    lab.write_input("ids/b", 3)
    few, none, batch = lab.write_input("few", 40), lab.write_input("none", 0), lab.write_batch("batch", 6)
    wrong = dataclasses.replace(lab.storage, secret_access_key=lab.wrong_secret)
    keys = lab.store.issue(3600.0)
    lab.token_key_id = keys.access_key_id
    token = dataclasses.replace(
        lab.storage,
        access_key_id=keys.access_key_id,
        secret_access_key=keys.secret_access_key,
        session_token=keys.session_token,
        conn_id="lake",
    )

    role = dataclasses.replace(
        lab.storage, role_arn="acs:ram::1:role/lake-writer", sts_endpoint_url=lab.store.endpoint_url
    )
    lab.store.role_lifetime_s = ROLE_LIFETIME_S

    def until_some_are_stored(ask: Ask) -> Answer:
        if lab.stored("token"):
            lab.store.expire(keys.access_key_id)
        return Answer(content=f"re: {ask.text}", delay_s=0.5)

    with MockEndpoint(script) as endpoint, MockEndpoint(until_some_are_stored) as slow:
        specs = {
            "empty": lab.spec(endpoint, none, "empty"),
            "batch": lab.spec(endpoint, batch, "batch", input_format="openai_batch", prompt_col=None, max_errors=2),
            "policy": lab.spec(endpoint, few, "policy", max_errors=1, id_col="id", input_columns=("text",)),
            "ids": lab.spec(endpoint, "oss://lake/in/ids/", "ids", id_col="id"),
            "refused": lab.spec(endpoint, few, "refused", api_key=lab.wrong_key),
            "store": lab.spec(endpoint, few, "store", storage=wrong),
            "token": lab.spec(slow, lab.write_input("token", ROWS), "token", storage=token),
            "role": lab.spec(slow, lab.write_input("role", ROWS), "role", storage=role),
        }
        jobs = {name: lab.submit(spec) for name, spec in specs.items()}
        yield {name: (job_id, *lab.ended(job_id)) for name, job_id in jobs.items()}


def test_no_row_is_a_finished_output_with_its_columns(lab: Lab, ended: dict[str, Any]) -> None:
    """Zero rows in: zero rows out, `_SUCCESS`, and a schema for readers."""
    assert ended["empty"][1]["rows_in"] == ended["empty"][1]["rows"] == 0
    table = lab.output("empty")
    assert (table.num_rows, table.column_names) == (0, ["id", "text", "generated_text"])


def test_batch_files_give_results_in_their_own_format_too(lab: Lab, ended: dict[str, Any]) -> None:
    """Each request has its result line by `custom_id`; readers of the folder see the Parquet rows only."""
    assert lab.output("batch").num_rows == ended["batch"][1]["rows"] == 6
    lines = []
    for entry in storage.list_files(lab.fs, "lake/out/batch/_raylm/results"):
        lines += [json.loads(line) for line in (storage.read_bytes(lab.fs, entry.path) or b"").splitlines()]
    assert {line["custom_id"]: line["response"]["status_code"] for line in lines} == {
        f"c-{i}": 400 if i in (3, 4) else 200 for i in range(6)
    }
    assert lines[0]["response"]["body"]["choices"][0]["message"]["content"] == "re: row 0"


def test_too_many_failed_rows_fail_the_job_and_leave_no_output(lab: Lab, ended: dict[str, Any]) -> None:
    """Two rows fail where one may: the policy says so, and readers see nothing."""
    assert ended["batch"][1]["errors"] == 2
    assert ended["policy"][2]["type"] == "PartialFailureError"
    assert ended["policy"][2]["message"].startswith("2 rows failed, max_errors is 1")
    assert storage.list_files(lab.fs, "lake/out/policy") == []
    assert not lab.fs.get_file_info("lake/out/policy/_SUCCESS").is_file


def test_an_id_that_comes_twice_fails_the_job_before_anything_is_asked(ended: dict[str, Any]) -> None:
    """It says how many, and shows none."""
    assert ended["ids"][2]["type"] == "SpecError"
    assert "0 of them have none and 3 have one that another row has" in ended["ids"][2]["message"]


def test_a_token_that_expires_ends_the_job_with_a_sentence_and_keeps_its_rows(lab: Lab, ended: dict[str, Any]) -> None:
    """It says what has expired and what to use instead; the replies so far are stored for the next attempt."""
    error = ended["token"][2]
    assert error["type"] == "StorageError"
    assert "the session token of the connection 'lake' has expired; the finished rows are stored" in error["message"]
    assert 0 < len(lab.stored("token")) < ROWS


def test_a_job_that_outlives_the_keys_of_its_role_gets_new_ones(lab: Lab, ended: dict[str, Any]) -> None:
    """Its driver, which reads the input and commits the output, is there from the first keys to the last."""
    assert ended["role"][1]["rows"] == ROWS
    check_rows(lab, "role", ROWS)
    ends = [keys.expires_s for name, keys in lab.store.issued.items() if name != lab.token_key_id]
    assert max(ends) - ROLE_LIFETIME_S > min(ends), "none were asked for after the first had expired"


def test_keys_are_nowhere_to_be_read(lab: Lab, ended: dict[str, Any]) -> None:
    """After a full run and runs that failed over each key: not in Ray's answers, its logs, or the output folder."""
    assert ended["batch"][1] is not None
    assert ended["refused"][2]["type"] == "TerminalEndpointError"
    assert ended["store"][2]["type"] == "StorageError"
    texts = {path: lab.get(path) for path in ("/api/jobs/", "/api/v0/actors?detail=1", "/api/v0/tasks?detail=1")}
    for name, (job_id, *_) in ended.items():
        texts[f"log of {name}"] = lab.client().get_job_logs(job_id).encode()
        texts[f"info of {name}"] = lab.get(f"/api/jobs/{job_id}")
    for folder in (lab.node.temp_dir / "session_latest" / "logs", lab.store.folder / "out"):
        texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any("manifest.json" in name for name in texts)
    assert b"raylm.error" in texts["log of refused"]
    assert b"finished rows are stored" in texts["log of refused"]
    assert b"py_modules" in texts["info of batch"]
    keys = [lab.api_key, lab.wrong_key, lab.store.secret_access_key, lab.wrong_secret]
    keys += [secret for given in lab.store.issued.values() for secret in (given.secret_access_key, given.session_token)]
    shown = [name for name, text in texts.items() if any(key.encode() in text for key in keys)]
    assert shown == []

"""Deploy, query and teardown: what their jobs are told, and what the tasks return."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import zipfile
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_provider_raylm import spec as specs
from airflow_provider_raylm.exceptions import RayJobFailedError, SpecError
from airflow_provider_raylm.operators.ai_query import STORE_ENV, AiQueryBatchOperator, owner_labels, storage_of
from airflow_provider_raylm.operators.deploy import DeployQwenServeOperator, lease_of
from airflow_provider_raylm.operators.ray import RaySubmitJobOperator
from airflow_provider_raylm.operators.teardown import TeardownServeOperator
from airflow_provider_raylm.spec import DeploySpec, LeaseSpec, QuerySpec, StorageSpec, TeardownSpec
from tests.support.airflow_task import context
from tests.support.fake_dashboard import FakeDashboard

SECRET = "do-not-show-me"
RUN = "label_reviews/scheduled__2026-12-01T00:00:00+00:00"
DEPLOYED = {
    "app_name": "qwen",
    "base_url": "http://10.0.0.1:8000/qwen/v1",
    "models": ["Qwen3.5-4B"],
    "lease": {"holder": "h", "ttl_s": 60.0},
}


def deploy(**arguments: Any) -> DeployQwenServeOperator:
    return DeployQwenServeOperator(**{"task_id": "deploy", "poll_interval": 0.02, "deferrable": False, **arguments})


def query(**arguments: Any) -> AiQueryBatchOperator:
    given = {"task_id": "label", "input_path": "oss://a/in/", "output_path": "oss://a/out/", "prompt_col": "text"}
    return AiQueryBatchOperator(
        **{**given, "deploy": DEPLOYED, "poll_interval": 0.02, "deferrable": False, **arguments}
    )


def teardown(**arguments: Any) -> TeardownServeOperator:
    return TeardownServeOperator(**{"task_id": "teardown", "poll_interval": 0.02, "deferrable": False, **arguments})


def uploaded(dashboard: FakeDashboard) -> tuple[dict[str, Any], list[str]]:
    """The spec in the package that was uploaded, and all its files."""
    (package,) = dashboard.packages.values()
    with zipfile.ZipFile(io.BytesIO(package)) as files:
        spec = json.loads(files.read("airflow_provider_raylm/job_spec.json"))
        return spec, files.namelist()


# --- deploy -----------------------------------------------------------------------------------------------------------


def test_deploy_builds_one_llm_config() -> None:
    """The convenience arguments become one `LLMConfig`, one CPU for the actor and the GPUs left to the engine."""
    made = deploy(
        model_id="Qwen3.5-4B",
        model_source="/mnt/Qwen3.5-4B",
        engine_kwargs={"tensor_parallel_size": 2},
        deployment_config={"max_ongoing_requests": 64},
        autoscaling_config={"min_replicas": 1},
        accelerator_type="L20",
        llm_config={"runtime_env": {"env_vars": {"A": "b"}}},
    )
    assert made.spec(context()).llm_configs == (
        {
            "model_loading_config": {"model_id": "Qwen3.5-4B", "model_source": "/mnt/Qwen3.5-4B"},
            "engine_kwargs": {"tensor_parallel_size": 2},
            "deployment_config": {
                "max_ongoing_requests": 64,
                "autoscaling_config": {"min_replicas": 1},
                "ray_actor_options": {"num_cpus": 1},
            },
            "accelerator_type": "L20",
            "runtime_env": {"env_vars": {"A": "b"}},
        },
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"model_id": "m", "deployment_config": {"ray_actor_options": {"num_gpus": 1}}},
        {"model_id": "m", "llm_config": {"deployment_config": {"ray_actor_options": {"num_gpus": 0.5}}}},
        {"llm_configs": [{"deployment_config": {"ray_actor_options": {"num_gpus": 1}}}]},
        {
            "serve_config": {
                "applications": [
                    {"args": {"llm_configs": [{"deployment_config": {"ray_actor_options": {"num_gpus": 1}}}]}}
                ]
            }
        },
    ],
)
def test_num_gpus_is_refused_when_the_dag_is_read(arguments: dict[str, Any]) -> None:
    """Not minutes later on a cluster where nothing fits, and with the reason and the way out."""
    with pytest.raises(SpecError, match=r"add up until nothing fits.*tensor_parallel_size"):
        deploy(**arguments)


def test_num_gpus_is_refused_after_rendering() -> None:
    """A value that comes from a template is checked when it is known."""
    made = deploy(model_id="m", deployment_config="{{ params.deployment }}")
    made.deployment_config = {"ray_actor_options": {"num_gpus": 1}}
    with pytest.raises(SpecError, match="num_gpus"):
        made.spec(context())


@pytest.mark.parametrize(
    ("arguments", "app_name"),
    [
        ({"model_id": "Qwen/Qwen3.5-4B"}, "qwen3-5-4b"),
        ({"model_id": "m", "app_name": "mine"}, "mine"),
        (
            {"llm_configs": [{"model_loading_config": {"model_id": "a"}}, {"model_loading_config": {"model_id": "b"}}]},
            "llm",
        ),
        ({"serve_config": {"applications": [{"name": "theirs"}]}}, "theirs"),
        ({"serve_config": "applications:\n- name: from-a-file\n"}, "from-a-file"),
    ],
)
def test_app_name(arguments: dict[str, Any], app_name: str) -> None:
    """Given, or made from what is deployed."""
    assert deploy(**arguments).spec(context()).app_name == app_name


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"model_id": "m", "llm_configs": [{}]},
        {"serve_config": "serve_config.yaml"},
        {"llm_configs": [{}], "engine_kwargs": {"max_model_len": 1}},
        {"serve_config": {"applications": [{}]}, "accelerator_type": "L20"},
        {"llm_configs": {"model_id": "m"}},
        {"llm_configs": "{{ params.configs }}"},
        {"model_id": "m", "llm_config": "{'engine_kwargs': {}}"},
        {"model_id": "m", "engine_kwargs": "{}"},
        {"model_id": "m", "autoscaling_config": "{}"},
        {"model_id": "m", "http_options": "{}"},
    ],
)
def test_what_to_deploy_must_be_clear(arguments: dict[str, Any]) -> None:
    """One way of saying it, not none and not two, and nothing that would be dropped or is text in place of a dict."""
    with pytest.raises(SpecError):
        deploy(**arguments).spec(context())


@pytest.mark.parametrize(
    ("lease", "expected"),
    [
        (None, None),
        (False, None),
        (True, LeaseSpec(holder=RUN)),
        (600, LeaseSpec(holder=RUN, ttl_s=600)),
        ("me", LeaseSpec(holder="me")),
        ({"ttl_s": 5.0}, LeaseSpec(holder=RUN, ttl_s=5.0)),
        ({"holder": "me", "ttl_s": 5.0}, LeaseSpec(holder="me", ttl_s=5.0)),
    ],
)
def test_lease(lease: Any, expected: LeaseSpec | None) -> None:
    """Every form of the argument; the holder is the DAG run unless somebody names one."""
    assert lease_of(lease, context()) == expected


@pytest.mark.parametrize(
    "lease",
    [0, -1, "", {"who": "me"}, ["me"], "True", " none", "3600", {"ttl_s": -5}, {"holder": ""}],
)
def test_a_wrong_lease_is_refused(lease: Any) -> None:
    """A lease that would never be released, or never held, is an error before anything is sent."""
    with pytest.raises(SpecError, match="lease is True"):
        lease_of(lease, context())


def test_deploy_hands_on_what_the_next_tasks_need(dashboard: FakeDashboard) -> None:
    """Plain JSON: the job's answer, its id, and the lease."""
    dashboard.on_submit = lambda job: job.succeed(log=f"raylm.result {json.dumps({'app_name': 'qwen'})}\n")
    result = deploy(model_id="m", lease=60).execute(context())
    (submission_id,) = dashboard.jobs
    assert result == {"app_name": "qwen", "submission_id": submission_id, "lease": {"holder": RUN, "ttl_s": 60.0}}
    assert uploaded(dashboard)[0]["lease"] == {"holder": RUN, "ttl_s": 60.0}
    (job,) = dashboard.jobs.values()
    assert job.entrypoint == "python -m airflow_provider_raylm.ray_serve.deploy"


def test_durations_may_be_text(dashboard: FakeDashboard) -> None:
    """As a template or a variable gives them; what is no number is refused before there is a job."""
    made = deploy(model_id="m", start_timeout="60")
    assert (made.spec(context()).start_timeout_s, made.timeout) == (60.0, 360.0)
    assert deploy(model_id="m", start_timeout=None).spec(context()).start_timeout_s == 1800.0
    with pytest.raises(AirflowFailException, match="timeout is a number of seconds, got 'soon'"):
        query(timeout="soon").execute(context())
    assert not dashboard.jobs


# --- all three --------------------------------------------------------------------------------------------------------


def test_the_job_carries_its_own_code_and_nothing_of_airflow(dashboard: FakeDashboard) -> None:
    """The cluster needs neither this package nor Airflow."""
    dashboard.on_submit = lambda job: job.succeed(log="raylm.result {}\n")
    teardown(app_name="qwen").execute(context())
    spec, names = uploaded(dashboard)
    top = {name.split("/")[1] for name in names if name.count("/")}
    assert spec["app_name"] == "qwen"
    assert {"__init__.py", "spec.py", "exceptions.py", "job_main.py", "ray_data", "ray_serve"} <= top
    assert not top & {"hooks", "operators", "sensors", "triggers", "links.py", "polling.py"}
    assert not any("__pycache__" in name for name in names)


@pytest.mark.parametrize("made", [deploy(model_id="m"), query(), teardown(app_name="a")], ids=lambda m: m.task_id)
def test_succeeded_without_an_answer_is_an_error(dashboard: FakeDashboard, made: RaySubmitJobOperator) -> None:
    """A job that did not say what it did has not done it."""
    dashboard.on_submit = lambda job: job.succeed(log="bye\n")
    with pytest.raises(RayJobFailedError, match=r"holds no 'raylm.result' line"):
        made.execute(context())


@pytest.mark.parametrize("cls", [DeployQwenServeOperator, TeardownServeOperator])
def test_what_succeeded_once_says_nothing_about_now(dashboard: FakeDashboard, cls: Any) -> None:
    """A deploy or teardown is never answered by an older one; both are cheap when nothing is to be done."""
    dashboard.on_submit = lambda job: job.succeed(log="raylm.result {}\n")
    for try_number in (1, 2):
        argument = {"model_id": "m"} if cls is DeployQwenServeOperator else {"app_name": "a"}
        cls(task_id="t", deferrable=False, **argument).execute(context(try_number=try_number))
    assert len(dashboard.jobs) == 2


@pytest.mark.parametrize(
    "cls", [RaySubmitJobOperator, DeployQwenServeOperator, AiQueryBatchOperator, TeardownServeOperator]
)
def test_every_template_field_is_an_argument(cls: Any) -> None:
    """Airflow renders attributes of these names, set from arguments of the same names."""
    arguments = {name for klass in cls.__mro__ for name in inspect.signature(klass.__init__).parameters}
    assert set(cls.template_fields) <= arguments


# --- query ------------------------------------------------------------------------------------------------------------

RENAMED = {"stall_timeout_s": "stall_timeout", "storage": "storage_conn_id"}


def test_every_field_of_the_spec_can_be_said() -> None:
    """A field that cluster code reads and no user can set is dead."""
    arguments = set(inspect.signature(AiQueryBatchOperator.__init__).parameters)
    fields = {RENAMED.get(f.name, f.name) for f in dataclasses.fields(QuerySpec)} - {"labels"}
    assert fields <= arguments
    arguments = set(inspect.signature(DeployQwenServeOperator.__init__).parameters)
    assert {f.name for f in dataclasses.fields(DeploySpec)} - {"start_timeout_s"} <= arguments


def test_query_takes_the_endpoint_from_the_deploy() -> None:
    """URL, application, lease, and the model if there is but one."""
    spec = query().spec(context())
    assert (spec.base_url, spec.model, spec.app_name) == (DEPLOYED["base_url"], "Qwen3.5-4B", "qwen")
    assert spec.lease == LeaseSpec(holder="h", ttl_s=60.0)
    spec = query(model="other", base_url="http://x/v1", app_name="a", lease="me").spec(context())
    assert (spec.base_url, spec.model, spec.app_name, spec.lease) == (
        "http://x/v1",
        "other",
        "a",
        LeaseSpec(holder="me"),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deploy": None}, "base_url and model"),
        ({"deploy": {**DEPLOYED, "models": ["a", "b"]}}, "models"),
        ({"deploy": "text"}, "what the deploy task returned"),
        ({"prompt_col": None}, "exactly one of prompt_col"),
        ({"messages_col": "m"}, "exactly one of prompt_col"),
        ({"output_path": ""}, "output_path"),
        ({"options": "{'temperature': 0}"}, "options.*dictionary, got str.*render_template_as_native_obj"),
        ({"concurrency": "many"}, "concurrency.*integer"),
        ({"max_error_rate": "5%"}, "max_error_rate.*number"),
        ({"api_key": 123}, "api_key.*string, got int"),
        ({"image_cols": "img"}, "image_cols is a list of column names"),
        ({"input_columns": "id,text"}, "input_columns is a list of column names"),
    ],
)
def test_a_wrong_query_is_refused_before_anything_is_sent(arguments: dict[str, Any], message: str) -> None:
    """The message names the task and the arguments."""
    with pytest.raises(SpecError, match=message) as caught:
        query(**arguments).spec(context())
    assert "label" in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value", "known"),
    [
        ("endpoint", "embedding", "'chat', 'completions' or 'embeddings'"),
        ("input_format", "CSV", "'parquet', 'jsonl', 'csv' or 'openai_batch'"),
        ("on_error", "ignore", "'raise', 'keep' or 'null'"),
        ("write_mode", "replace", "'error_if_exists', 'overwrite' or 'append'"),
        ("priority", "urgent", "'low', 'normal' or 'high'"),
        ("reuse_succeeded", "alway", "'never'"),
    ],
)
def test_a_wrong_word_is_refused_when_the_dag_is_read(argument: str, value: str, known: str) -> None:
    """With the words there are; a word that nobody knows must not mean one of them."""
    with pytest.raises(SpecError, match=f"{argument}: expected .*{known}.* got '{value}'"):
        query(**{argument: value})


def test_numbers_may_be_text() -> None:
    """As templates without native rendering make them."""
    spec = query(concurrency="2", batch_size="16", max_error_rate="0.1", image_cols=None).spec(context())
    assert (spec.concurrency, spec.batch_size, spec.max_error_rate, spec.image_cols) == (2, 16, 0.1, ())


def test_a_missing_connection_of_the_endpoint_is_named() -> None:
    """Nobody retries what is not there."""
    with pytest.raises(SpecError, match="no connection 'nope' for llm_conn_id"):
        query(llm_conn_id="nope").spec(context())


def test_a_pydantic_class_becomes_its_schema() -> None:
    """On the worker: the cluster has no such class."""

    class Label(pydantic.BaseModel):
        label: str

    assert query(response_format=Label).spec(context()).response_format == Label.model_json_schema()
    assert query(response_format="label STRING").spec(context()).response_format == "label STRING"
    with pytest.raises(SpecError, match="pydantic"):
        query(response_format=int)


def test_secrets_are_in_the_spec_file_and_nowhere_else(
    dashboard: FakeDashboard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in entrypoint, runtime_env, labels, XCom or log; and they are no part of the input's fingerprint."""
    fingerprints = []
    for number, secret in enumerate((SECRET, f"{SECRET}-2")):
        monkeypatch.setenv(
            "AIRFLOW_CONN_OSS",
            json.dumps(
                {"conn_type": "aws", "login": f"{SECRET}-id", "password": secret, "extra": {"region_name": "r"}}
            ),
        )
        dashboard.packages.clear()
        dashboard.on_submit = lambda job: job.succeed(log="raylm.result {}\n")
        ctx = context(run_id=str(number))
        result = query(storage_conn_id="oss", api_key=secret, runtime_env={"env_vars": {"A": "b"}}).execute(ctx)
        spec, _ = uploaded(dashboard)
        assert (spec["storage"]["secret_access_key"], spec["api_key"]) == (secret, secret)
        job = list(dashboard.jobs.values())[-1]
        assert SECRET not in json.dumps([job.details(), result, ctx["ti"].pushed]) + caplog.text
        assert job.runtime_env["env_vars"] == {**STORE_ENV, "A": "b"}
        fingerprints.append({**job.metadata, "run_id": ""}["fingerprint"])
    # the labels in the spec hold the run, so only equal runs compare
    made = [query(api_key=key) for key in ("a", "b")]
    assert len({m._fingerprint(m.spec(context()), {}) for m in made}) == 1


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        (
            {"login": "id", "password": "key", "extra": {"endpoint_url": "https://oss.example", "region_name": "cn"}},
            StorageSpec(endpoint_url="https://oss.example", region="cn", access_key_id="id", secret_access_key="key"),
        ),
        (
            {"login": "id", "password": "key", "extra": {"aws_session_token": "t", "verify": False}},
            StorageSpec(access_key_id="id", secret_access_key="key", session_token="t", verify=False),
        ),
        (
            {"extra": {"config_kwargs": {"s3": {"addressing_style": "path"}}}},
            StorageSpec(addressing_style="path"),
        ),
        (
            {
                "login": "id",
                "password": "key",
                "extra": {
                    "role_arn": "acs:ram::1:role/r",
                    "assume_role_kwargs": {"RoleSessionName": "s", "ExternalId": "e"},
                    "service_config": {"sts": {"endpoint_url": "https://sts.example"}},
                },
            },
            StorageSpec(
                access_key_id="id",
                secret_access_key="key",
                role_arn="acs:ram::1:role/r",
                role_session_name="s",
                external_id="e",
                sts_endpoint_url="https://sts.example",
            ),
        ),
        ({"extra": {"role_arn": "acs:ram::1:role/r"}}, StorageSpec(role_arn="acs:ram::1:role/r")),
        ({"extra": {"config_kwargs": {"signature_version": "unsigned"}}}, StorageSpec(anonymous=True)),
    ],
)
def test_storage(monkeypatch: pytest.MonkeyPatch, connection: dict[str, Any], expected: StorageSpec) -> None:
    """Each form of an `aws` connection. The worker's own credentials are never handed on."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-worker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-worker")
    monkeypatch.setenv("AIRFLOW_CONN_OSS", json.dumps({"conn_type": "aws", **connection}))
    assert storage_of("oss") == dataclasses.replace(expected, conn_id="oss")


@pytest.mark.parametrize(
    ("login", "assume"), [({}, {}), ({"login": "id", "password": "key"}, {"Policy": "{}"})], ids=["no keys", "policy"]
)
def test_a_role_that_the_cluster_cannot_assume_is_assumed_on_the_worker(
    monkeypatch: pytest.MonkeyPatch, login: dict[str, str], assume: dict[str, str]
) -> None:
    """It is left to the worker's own credentials, or asks for more than the cluster's side knows: short-lived keys."""
    from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook
    from botocore.credentials import ReadOnlyCredentials

    extra = {"role_arn": "arn:aws:iam::1:role/r", "assume_role_kwargs": assume}
    monkeypatch.setenv("AIRFLOW_CONN_OSS", json.dumps({"conn_type": "aws", **login, "extra": extra}))
    assumed = ReadOnlyCredentials("short", "lived", "token")
    monkeypatch.setattr(AwsBaseHook, "get_credentials", lambda self: assumed)
    assert storage_of("oss") == StorageSpec(
        access_key_id="short", secret_access_key="lived", session_token="token", conn_id="oss"
    )


def test_a_missing_storage_connection_is_named() -> None:
    """Silence would mean the cluster's own role, and that was not asked for."""
    with pytest.raises(SpecError, match="no connection 'nope'"):
        storage_of("nope")


def test_the_spec_survives_the_journey() -> None:
    """What the cluster reads is what the operator said."""
    spec = query(lease=True, options={"temperature": 0, "max_tokens": 8}, image_cols=["a"]).spec(context())
    assert specs.from_json(QuerySpec, specs.to_json(spec)) == spec


# --- teardown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"app_name": "a"}, TeardownSpec(app_name="a")),
        ({"deploy": DEPLOYED}, TeardownSpec(app_name="qwen", holder="h")),
        ({"deploy": {**DEPLOYED, "lease": None}}, TeardownSpec(app_name="qwen")),
        ({"deploy": DEPLOYED, "holder": "me"}, TeardownSpec(app_name="qwen", holder="me")),
        ({"deploy": None, "app_name": "a"}, TeardownSpec(app_name="a")),
    ],
)
def test_teardown_spec(arguments: dict[str, Any], expected: TeardownSpec) -> None:
    """Whose claim on what; also when the deploy task left nothing."""
    assert teardown(**arguments).spec(context()) == expected


@pytest.mark.parametrize("deployed", [None, "text", {}])
def test_teardown_must_know_what(deployed: Any) -> None:
    """Never a guess at what to take down."""
    with pytest.raises(SpecError):
        teardown(deploy=deployed).spec(context())


def test_teardown_that_does_not_know_its_lease_does_not_take_everybodys() -> None:
    """A deploy that failed returned nothing; releasing all leases would remove the endpoint under other runs."""
    operator = teardown(app_name="qwen", deploy={"app_name": "qwen"})
    operator.deploy = None  # as rendered from a task without XCom
    with pytest.raises(SpecError, match="whose lease to release is unknown"):
        operator.spec(context())


@pytest.mark.parametrize(("index", "more"), [(-1, {}), (3, {"map_index": "3"})])
def test_mapped_tasks_own_their_own_rows(index: int, more: dict[str, str]) -> None:
    """With `append`, the tasks of one mapped operator must not replace each other's files."""
    ti = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=index)
    assert owner_labels(ti) == {"dag_id": "d", "task_id": "t", "run_id": "r", **more}

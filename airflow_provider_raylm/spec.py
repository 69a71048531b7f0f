"""The words both sides share: what a job is told (a spec) and what it answers (a result). Standard library only.

A spec is written by an operator as `SPEC_FILENAME` beside the cluster-side source files and uploaded with them as one
`py_module`, so a job always runs the code its operator was written for. It is the only place that may hold a secret:
`runtime_env` variables, the entrypoint and the job's metadata are shown in clear by Ray's dashboard.

A job answers with one line on its log, because the Jobs API is all that a gateway lets through:

    raylm.result {"rows": 200, ...}      the job did what it was told; it exits 0
    raylm.error {"type": "ServeError", "message": "..."}     it could not; it exits 1
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from airflow_provider_raylm.exceptions import SpecError

SPEC_FILENAME = "job_spec.json"
RESULT_PREFIX = "raylm.result "
ERROR_PREFIX = "raylm.error "

InputFormat = Literal["parquet", "jsonl", "csv", "openai_batch"]
WriteMode = Literal["error_if_exists", "overwrite", "append"]
OnError = Literal["raise", "keep", "null"]
Endpoint = Literal["chat", "completions", "embeddings"]
Priority = Literal["low", "normal", "high"]
TeardownState = Literal["removed", "absent", "leased"]

Spec = TypeVar("Spec")


@dataclass(frozen=True, kw_only=True)
class StorageSpec:
    """How the cluster reaches an S3-compatible store such as OSS.

    Attributes:
        endpoint_url: `https://oss-cn-hangzhou-internal.aliyuncs.com`; `None` for AWS itself.
        region: Region name, also part of the signature.
        addressing_style: OSS takes only `virtual`; `path` is for stores without host names.
        access_key_id, secret_access_key, session_token: `None` lets the cluster's own role answer.
        role_arn: Role that the cluster assumes with these keys, or with its own role, again and again as long as the
            job runs: `acs:ram::<account>:role/<name>` or `arn:aws:iam::<account>:role/<name>`.
        role_session_name, external_id: As the role's trust policy and the audit log want them.
        sts_endpoint_url: Where the role is assumed; `None` goes by the kind of role and the region.
        anonymous: Send unsigned requests.
        verify: `False` turns TLS verification off; a string is a CA bundle on the cluster.
        conn_id: The connection it came from, for messages.
    """

    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: Literal["virtual", "path"] = "virtual"
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    role_arn: str | None = None
    role_session_name: str = "airflow-raylm"
    external_id: str | None = None
    sts_endpoint_url: str | None = None
    anonymous: bool = False
    verify: bool | str = True
    conn_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class LeaseSpec:
    """One run's claim on a shared endpoint.

    Attributes:
        holder: Who holds it, for example `label_reviews/scheduled__2026-12-01`.
        ttl_s: Seconds without renewal after which the claim is void.
    """

    holder: str
    ttl_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class DeploySpec:
    """Deploy one Serve application and prove that each of its models answers.

    Attributes:
        app_name: Serve application name; other applications are left alone.
        llm_configs: Keyword arguments of `ray.serve.llm.LLMConfig`, one dict per model.
        route_prefix: Path under the proxy; `None` means `/<app_name>`.
        ingress: `ingress_deployment_config` and `ingress_cls_config` of `build_openai_app`.
        http_options: Serve HTTP options, used only if Serve does not run on the cluster yet.
        serve_config: Content of a `serve_config.yaml` for people who have a Serve application; `llm_configs` is
            empty then.
        start_timeout_s: Seconds until every model must have answered; afterwards everything started is removed.
        lease: Claim on the endpoint; `None` for an endpoint that stays until torn down.
    """

    app_name: str
    llm_configs: tuple[dict[str, Any], ...] = ()
    route_prefix: str | None = None
    ingress: dict[str, Any] = field(default_factory=dict)
    http_options: dict[str, Any] = field(default_factory=dict)
    serve_config: dict[str, Any] | None = None
    start_timeout_s: float = 1800.0
    lease: LeaseSpec | None = None


@dataclass(frozen=True, kw_only=True)
class DeployResult:
    """What a deploy job answers.

    Attributes:
        base_url: OpenAI base URL, ends in `/v1`, reachable from every node of the cluster.
        base_urls: One per proxy, `base_url` first.
        models: Model ids that have answered a request at `base_url`.
        adapters: LoRA adapters that the endpoint lists, under the names to ask for: `<model id>:<folder>`. The first of
            each model has answered.
        ready_s: Seconds from the start of the job to the last model's first answer.
        changed: `False` when the same application was running already.
        versions: `{"ray": ..., "vllm": ..., "python": ...}` of the cluster.
        leases: Holders after this deploy.
    """

    app_name: str
    base_url: str
    base_urls: tuple[str, ...]
    models: tuple[str, ...]
    route_prefix: str
    ready_s: float
    changed: bool = True
    adapters: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    leases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TeardownSpec:
    """Release a claim on an application, and remove the application when nobody holds one.

    Attributes:
        holder: Lease to release; `None` removes the application whoever holds it.
        timeout_s: Seconds until replicas, engine processes and reservations must be gone.
    """

    app_name: str
    holder: str | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class TeardownResult:
    """What a teardown job answers.

    Attributes:
        state: `removed` now, `absent` already, or still `leased` by others.
        leases: Holders that are left.
        lived_s: Seconds the endpoint lived; `None` when unknown.
        gpu_seconds: GPUs held × seconds; `None` when unknown.
    """

    app_name: str
    state: TeardownState
    leases: tuple[str, ...] = ()
    lived_s: float | None = None
    gpu_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class QuerySpec:
    """Run `ai_query` over files and write Parquet.

    Attributes:
        model, base_url, api_key, endpoint: The OpenAI-compatible endpoint.
        input_path: File, folder or list of them: `oss://`, `s3://` or a path every node sees.
        input_format: `None` goes by the files' suffix.
        input_columns: Columns to keep; `None` keeps all.
        output_path: Folder the run owns.
        prompt_col, prompt_template, messages_col: Exactly one says where the prompt is.
        image_cols: Columns with image URLs or bytes, added to the user message.
        system_prompt: Put before every prompt.
        output_col: Struct column added to each row.
        options: Request parameters: `temperature`, `max_tokens`, `extra_body`, `enable_thinking`, ...
        response_format: JSON schema object, or a DDL string such as `label STRING, score DOUBLE`.
        concurrency: Query actors; `None` chooses from the cluster's CPUs.
        batch_size: With `concurrency`, where the adaptive limit starts.
        on_error, max_error_rate, max_errors: What failed rows mean for the task. `null` sets the whole struct to null.
        max_attempts: Requests per row that fail for a passing reason before the row counts as failed.
        stall_timeout_s: Seconds without one finished row, while the endpoint refuses, after which the job fails.
        postprocess: `module:function`, a batch (`pandas.DataFrame`) in and out, before the write.
        write_mode: `error_if_exists`, `overwrite`, `append`.
        resume: Take up an unfinished run of the same fingerprint instead of starting over.
        id_col: Column whose values name the rows: none is null and none comes twice, or nothing is asked. Rows are told
            apart by file and position whether there is one or not.
        max_rows_per_file: Most rows in one output file.
        priority: Share of a contended endpoint: 4, 16 or 64 waiting requests.
        group_by_prefix: Send rows with a common prompt prefix together; the output order stays.
        storage: `None` lets the cluster's own role and environment answer.
        app_name, lease: The endpoint claim to renew while the job lives.
        labels: dag, task, run: written to the manifest.
    """

    model: str
    base_url: str
    input_path: str | tuple[str, ...]
    output_path: str
    api_key: str = field(default="EMPTY", repr=False)
    endpoint: Endpoint = "chat"
    input_format: InputFormat | None = None
    input_columns: tuple[str, ...] | None = None
    prompt_col: str | None = None
    prompt_template: str | None = None
    messages_col: str | None = None
    image_cols: tuple[str, ...] = ()
    system_prompt: str | None = None
    output_col: str = "generated_text"
    options: dict[str, Any] = field(default_factory=dict)
    response_format: dict[str, Any] | str | None = None
    concurrency: int | None = None
    batch_size: int = 8
    on_error: OnError = "keep"
    max_error_rate: float | None = None
    max_errors: int | None = None
    max_attempts: int = 5
    stall_timeout_s: float = 900.0
    postprocess: str | None = None
    write_mode: WriteMode = "overwrite"
    resume: bool = True
    id_col: str | None = None
    max_rows_per_file: int = 100_000
    priority: Priority = "normal"
    group_by_prefix: bool = False
    storage: StorageSpec | None = None
    app_name: str | None = None
    lease: LeaseSpec | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("endpoint", self.endpoint, Endpoint)
        if self.input_format is not None:
            one_of("input_format", self.input_format, InputFormat)
        one_of("on_error", self.on_error, OnError)
        one_of("write_mode", self.write_mode, WriteMode)
        one_of("priority", self.priority, Priority)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a query job answers, and what it writes to `<output_path>/_raylm/manifest.json`.

    Attributes:
        rows_in: Rows read. Equals `rows` + `rows_filtered`, or the job fails.
        rows: Rows written.
        errors: Rows written whose status is not `ok`.
        errors_by_type: `{"bad_request": 3, ...}`.
        prompt_tokens, completion_tokens: Sums over the rows, as the server reported them.
        seconds: From the start of the query to the commit.
        rows_per_s, completion_tokens_per_s: Over `seconds`.
        rows_resumed: Rows whose reply was stored by an earlier attempt.
        files: `{"path", "rows", "bytes"}` of each data file, path relative to `output_path`.
        kept_files: Files of earlier runs that `append` left in place; only in the stored manifest, which then lists all
            files that belong to the folder.
        inputs: `{"path", "rows", "bytes"}` of each input file.
        schema: `{"column": "arrow type"}` in order.
        fingerprint: Hash of what decides the replies; equal fingerprints may be resumed.
        run_id: Names this run's files.
        flow: The last state of flow control: `limit`, `signal`, `waiting_share`, ...
        versions: `{"ray": ..., "airflow_provider_raylm": ..., "python": ...}`.
    """

    output_path: str
    rows_in: int
    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    rows_per_s: float
    completion_tokens_per_s: float = 0.0
    rows_filtered: int = 0
    rows_resumed: int = 0
    errors_by_type: dict[str, int] = field(default_factory=dict)
    files: tuple[dict[str, Any], ...] = ()
    kept_files: tuple[dict[str, Any], ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()
    schema: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    run_id: str = ""
    flow: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def one_of(name: str, value: Any, words: Any) -> None:
    """Refuse a word that a `Literal` does not have.

    Raises:
        SpecError: Naming those it has.
    """
    known = get_args(words)
    if value not in known:
        raise SpecError(f"{name}: expected {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got {value!r}")


def to_json(value: Any) -> str:
    """Write a spec or result as one line of JSON.

    Raises:
        SpecError: A value in it is not JSON, for example a Python object in `options`.
    """
    try:
        return json.dumps(dataclasses.asdict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise SpecError(f"{type(value).__name__} cannot be written as JSON: {exc}") from exc


def from_json(cls: type[Spec], text: str) -> Spec:
    """Rebuild a spec or result of class `cls` from `to_json`'s text.

    Raises:
        SpecError: The text is not JSON, or holds fields that `cls` does not have.
    """
    try:
        raw = json.loads(text)
    except ValueError as exc:
        raise SpecError(f"{cls.__name__}: not JSON: {exc}") from exc
    return _build(cls, raw)


_NESTED: dict[str, type[Any]] = {"storage": StorageSpec, "lease": LeaseSpec}


def _build(cls: type[Spec], raw: Any) -> Spec:
    if not isinstance(raw, dict):
        raise SpecError(f"{cls.__name__}: expected an object, got {type(raw).__name__}")
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(raw) - known):
        raise SpecError(f"{cls.__name__}: unknown fields {unknown}; known are {sorted(known)}")
    values = {
        name: _build(_NESTED[name], value)
        if name in _NESTED and value is not None
        else (tuple(value) if isinstance(value, list) else value)
        for name, value in raw.items()
    }
    try:
        return cls(**values)
    except TypeError as exc:
        raise SpecError(f"{cls.__name__}: {exc}") from exc


def read_job_spec(cls: type[Spec]) -> Spec:
    """Read the spec that was uploaded beside this package. Called on the cluster.

    Raises:
        SpecError: This copy of the package carries no spec: it was not started by an operator.
    """
    path = Path(__file__).with_name(SPEC_FILENAME)
    if not path.is_file():
        raise SpecError(f"no {SPEC_FILENAME} beside {path.parent}: this entrypoint is started by an operator's job")
    return from_json(cls, path.read_text(encoding="utf-8"))

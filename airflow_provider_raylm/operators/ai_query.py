"""Label files with a language model: read, ask, write Parquet, return the manifest.

The work is done by a job on the cluster (`ray_data.job`); what travels there is a `QuerySpec`. Storage credentials come
from an Airflow connection of type `aws` and go only into the uploaded spec. Keys with a role go along with the role:
the cluster assumes it, again and again, as long as the job lasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider_raylm.exceptions import SpecError
from airflow_provider_raylm.hooks.ray import connection_of
from airflow_provider_raylm.operators.deploy import lease_of
from airflow_provider_raylm.operators.ray import (
    NATIVE_HINT,
    RaySubmitJobOperator,
    checked,
    map_index,
    required_result,
)
from airflow_provider_raylm.outcome import Outcome
from airflow_provider_raylm.spec import (
    Endpoint,
    InputFormat,
    OnError,
    Priority,
    QuerySpec,
    StorageSpec,
    WriteMode,
    one_of,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

WORDS = {
    "endpoint": Endpoint,
    "input_format": InputFormat,
    "on_error": OnError,
    "write_mode": WriteMode,
    "priority": Priority,
}
QUERY_ENTRYPOINT = "python -m airflow_provider_raylm.ray_data.job"
STORE_ENV = {
    # OSS rejects the trailing checksums that AWS clients send by default; read when a process first loads its client
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}


def owner_labels(ti: Any) -> dict[str, str]:
    """Whose rows these are: with `append`, a cleared task replaces its own files and no others."""
    labels = {"dag_id": ti.dag_id, "task_id": ti.task_id, "run_id": ti.run_id}
    return labels if (index := map_index(ti)) < 0 else {**labels, "map_index": str(index)}


class AiQueryBatchOperator(RaySubmitJobOperator):
    """Run `ai_query` over files and write Parquet.

    Returns the fields of `spec.Manifest` (rows, errors, tokens, rates, files, ...) and `submission_id`, all plain JSON.

    Args:
        input_path: File, folder or list of them: `oss://`, `s3://`, or a path that every node sees.
        output_path: Folder that this run owns.
        deploy: What a deploy task returned (`deploy.output`). Gives `base_url`, `app_name`, `lease`, and the model if
            there is one only.
        model: Model to ask.
        base_url: OpenAI base URL of the endpoint, ends in `/v1`, as the cluster sees it.
        api_key: Of the endpoint. Prefer `llm_conn_id`.
        llm_conn_id: Connection whose password is the key; its host is the `base_url` if none is given.
        endpoint: `chat`, `completions` or `embeddings`.
        input_format: `parquet`, `jsonl`, `csv`, `openai_batch`. Default: by the files' suffix.
        input_columns: Columns to keep. Default: all.
        prompt_col, prompt_template, messages_col: Exactly one says where the prompt is.
        image_cols: Columns with image URLs or bytes.
        system_prompt: Put before every prompt.
        output_col: Name of the struct column added to each row.
        options: Request parameters: `temperature`, `max_tokens`, `extra_body`, `enable_thinking`, ...
        response_format: What the reply must look like: a JSON schema, a DDL string (`label STRING, score DOUBLE`), or a
            pydantic model class.
        concurrency: Query actors. Default: from the cluster's CPUs.
        batch_size: With `concurrency`, where the adaptive limit starts.
        on_error: `keep` (default) keeps failed rows with their error, `null` sets their struct to null, `raise` fails
            the task at the first.
        max_error_rate, max_errors: More failed rows than this fail the task.
        max_attempts: Requests per row that fail for a passing reason before the row counts as failed.
        stall_timeout: Seconds without one finished row, while the endpoint refuses, after which the job fails.
        postprocess: `module:function`, run on each batch before it is written.
        write_mode: `overwrite` (default), `error_if_exists`, `append`.
        resume: Take up an unfinished run of the same input instead of starting over.
        id_col: Column whose values name the rows: a null or a value that comes twice fails the task before anything is
            asked. Rows are told apart by file and position whether there is one or not.
        max_rows_per_file: Most rows in one output file.
        priority: `low`, `normal` or `high` share of a contended endpoint.
        group_by_prefix: Send rows with a common prompt prefix together.
        storage_conn_id: Connection of type `aws`: key, secret, session token, `endpoint_url`, `region_name`,
            `role_arn`. Without keys in it, or without a connection, the cluster's own role answers. A session token is
            not renewed: for jobs that outlive one, use keys with a `role_arn`, or no keys.
        app_name: Serve application whose lease is renewed while the job lives. Default: from `deploy`.
        lease: See `DeployQwenServeOperator`. Default: from `deploy`.
        **kwargs: See `RaySubmitJobOperator`.
    """

    template_fields: Sequence[str] = (
        *RaySubmitJobOperator.template_fields,
        "input_path",
        "output_path",
        "deploy",
        "model",
        "base_url",
        "api_key",
        "llm_conn_id",
        "input_columns",
        "prompt_col",
        "prompt_template",
        "messages_col",
        "image_cols",
        "system_prompt",
        "output_col",
        "options",
        "response_format",
        "concurrency",
        "batch_size",
        "postprocess",
        "id_col",
        "storage_conn_id",
        "app_name",
        "lease",
    )
    template_ext: Sequence[str] = (".j2", ".md", ".sql")  # not what the name of a data file may end in
    ui_color = "#fff8e1"

    def __init__(
        self,
        *,
        input_path: str | Sequence[str],
        output_path: str,
        deploy: dict[str, Any] | None = None,
        model: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        llm_conn_id: str | None = None,
        endpoint: Endpoint = "chat",
        input_format: InputFormat | None = None,
        input_columns: Sequence[str] | None = None,
        prompt_col: str | None = None,
        prompt_template: str | None = None,
        messages_col: str | None = None,
        image_cols: Sequence[str] = (),
        system_prompt: str | None = None,
        output_col: str = "generated_text",
        options: dict[str, Any] | None = None,
        response_format: dict[str, Any] | str | type[Any] | None = None,
        concurrency: int | None = None,
        batch_size: int = 8,
        on_error: OnError = "keep",
        max_error_rate: float | None = None,
        max_errors: int | None = None,
        max_attempts: int = 5,
        stall_timeout: float = 900.0,
        postprocess: str | None = None,
        write_mode: WriteMode = "overwrite",
        resume: bool = True,
        id_col: str | None = None,
        max_rows_per_file: int = 100_000,
        priority: Priority = "normal",
        group_by_prefix: bool = False,
        storage_conn_id: str | None = None,
        app_name: str | None = None,
        lease: bool | str | float | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("entrypoint", QUERY_ENTRYPOINT)
        super().__init__(**kwargs)
        self.input_path = input_path
        self.output_path = output_path
        self.deploy = deploy
        self.model = model
        self.base_url = base_url
        self.api_key = api_key
        self.llm_conn_id = llm_conn_id
        self.endpoint = endpoint
        self.input_format = input_format
        self.input_columns = input_columns
        self.prompt_col = prompt_col
        self.prompt_template = prompt_template
        self.messages_col = messages_col
        self.image_cols = image_cols
        self.system_prompt = system_prompt
        self.output_col = output_col
        self.options = options
        self.response_format = response_format
        self.concurrency = concurrency
        self.batch_size = batch_size
        self.on_error = on_error
        self.max_error_rate = max_error_rate
        self.max_errors = max_errors
        self.max_attempts = max_attempts
        self.stall_timeout = stall_timeout
        self.postprocess = postprocess
        self.write_mode = write_mode
        self.resume = resume
        self.id_col = id_col
        self.max_rows_per_file = max_rows_per_file
        self.priority = priority
        self.group_by_prefix = group_by_prefix
        self.storage_conn_id = storage_conn_id
        self.app_name = app_name
        self.lease = lease
        for name, words in WORDS.items():
            if (value := getattr(self, name)) is not None or name != "input_format":
                one_of(name, value, words)
        if isinstance(self.response_format, type):  # a class survives neither serialization nor rendering
            self.response_format = _json_schema(self.response_format)

    def job_runtime_env(self) -> dict[str, Any]:
        env = super().job_runtime_env()
        return {**env, "env_vars": {**STORE_ENV, **(env.get("env_vars") or {})}}

    def spec(self, context: Context) -> QuerySpec:
        deploy = self.deploy or {}
        if not isinstance(deploy, Mapping):
            raise SpecError(f"{self.task_id}: deploy is what the deploy task returned, got {type(deploy).__name__}")
        api_key, host = self._endpoint_connection()
        base_url = self.base_url or deploy.get("base_url") or host
        models = list(deploy.get("models") or [])
        model = self.model or (models[0] if len(models) == 1 else None)
        if not base_url or not model:
            raise SpecError(
                f"{self.task_id}: base_url and model say whom to ask (or deploy, which knows both); got base_url="
                f"{base_url!r}, model={model!r}" + (f" and deploy with the models {models}" if models else "")
            )
        given = [n for n in ("prompt_col", "prompt_template", "messages_col") if getattr(self, n)]
        if len(given) != 1 and self.input_format != "openai_batch":
            raise SpecError(
                f"{self.task_id}: exactly one of prompt_col, prompt_template and messages_col says where the "
                f"prompt is, got {given or 'none'}"
            )
        if not self.output_path or not self.input_path:
            raise SpecError(f"{self.task_id}: input_path and output_path are needed")
        ti = context["ti"]
        spec = QuerySpec(
            model=model,
            base_url=base_url,
            api_key=api_key or "EMPTY",
            input_path=self.input_path if isinstance(self.input_path, str) else tuple(self.input_path),
            output_path=self.output_path,
            endpoint=self.endpoint,
            input_format=self.input_format,
            input_columns=self._columns("input_columns"),
            prompt_col=self.prompt_col,
            prompt_template=self.prompt_template,
            messages_col=self.messages_col,
            image_cols=self._columns("image_cols") or (),
            system_prompt=self.system_prompt,
            output_col=self.output_col,
            options=self.options or {},
            response_format=self.response_format,  # type: ignore[arg-type]  # a class became its schema
            concurrency=self.concurrency,
            batch_size=self.batch_size,
            on_error=self.on_error,
            max_error_rate=self.max_error_rate,
            max_errors=self.max_errors,
            max_attempts=self.max_attempts,
            stall_timeout_s=self.stall_timeout,
            postprocess=self.postprocess,
            write_mode=self.write_mode,
            resume=self.resume,
            id_col=self.id_col,
            max_rows_per_file=self.max_rows_per_file,
            priority=self.priority,
            group_by_prefix=self.group_by_prefix,
            storage=storage_of(self.storage_conn_id) if self.storage_conn_id else None,
            app_name=self.app_name or deploy.get("app_name"),
            lease=lease_of(deploy.get("lease") if self.lease is None else self.lease, context),
            labels=owner_labels(ti),
        )
        return checked(spec, self.task_id)

    def _columns(self, name: str) -> tuple[str, ...] | None:
        names = getattr(self, name)
        if isinstance(names, str):
            raise SpecError(f"{self.task_id}: {name} is a list of column names, got the text {names!r}{NATIVE_HINT}")
        return None if names is None else tuple(names)

    def result(self, outcome: Outcome, context: Context) -> dict[str, Any]:
        return {**required_result(outcome), "submission_id": outcome.submission_id}

    def _endpoint_connection(self) -> tuple[str | None, str | None]:
        if not self.llm_conn_id:
            return self.api_key, None
        connection = connection_of(self.llm_conn_id, "llm_conn_id")
        return self.api_key or connection.password, connection.host


def storage_of(aws_conn_id: str) -> StorageSpec:
    """What the cluster needs to know of an Airflow connection of type `aws`.

    Keys of the connection go along as they are, and so does its role, which the cluster assumes with them, or with its
    own role where it is one of Alibaba's. A role of AWS without keys, a profile, or a role that is assumed in another
    way, is turned into short-lived keys here. A connection with neither leaves it to the cluster's own role: this
    worker's own credentials are never handed on.

    Raises:
        SpecError: There is no such connection.
    """
    from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook
    from botocore import UNSIGNED

    hook = AwsBaseHook(aws_conn_id=aws_conn_id, client_type="s3")
    connection = hook.conn_config
    if not connection:
        raise SpecError(f"there is no connection {aws_conn_id!r} for storage_conn_id")
    config = hook.config
    s3 = config.s3 or {}
    anonymous = config.signature_version is UNSIGNED
    key, secret, token = (
        connection.aws_access_key_id,
        connection.aws_secret_access_key,
        connection.aws_session_token,
    )
    role, assume = connection.role_arn, connection.assume_role_kwargs
    travels = (
        role
        and connection.assume_role_method == "assume_role"
        and set(assume) <= {"RoleSessionName", "ExternalId", "DurationSeconds"}
        and (role.startswith("acs:") or (key and secret))
    )
    if not anonymous and not travels and (role or connection.profile_name):
        resolved = hook.get_credentials()
        key, secret, token = resolved.access_key, resolved.secret_key, resolved.token
    style = s3.get("addressing_style")
    return StorageSpec(
        endpoint_url=connection.get_service_endpoint_url("s3"),
        region=connection.region_name or config.region_name,
        addressing_style="path" if style == "path" else "virtual",
        access_key_id=None if anonymous else key,
        secret_access_key=None if anonymous else secret,
        session_token=None if anonymous else token,
        role_arn=role if travels and not anonymous else None,
        role_session_name=assume.get("RoleSessionName") or "airflow-raylm",
        external_id=assume.get("ExternalId"),
        sts_endpoint_url=connection.get_service_endpoint_url("sts", sts_connection_assume=True),
        anonymous=anonymous,
        verify=True if connection.verify is None else connection.verify,
        conn_id=aws_conn_id,
    )


def _json_schema(model: type[Any]) -> dict[str, Any]:
    schema = getattr(model, "model_json_schema", None)
    if schema is None:
        raise SpecError(f"response_format is a JSON schema, a DDL string or a pydantic model class, got {model!r}")
    return dict(schema())

"""The query job: `python -m airflow_provider_raylm.ray_data.job`, started by an operator with a `QuerySpec` beside it.

    list the input → take up an unfinished run of the same fingerprint, or plan a new one → read → ai_query → stage →
    check that every row is there once, and the error policy → commit

Rows that came from batch files are written twice: as Parquet like all others, and as lines of the batch format to
`_raylm/results/`, where readers of the folder do not see them.

Until the commit nothing in the output folder changes but `_raylm/`. The fingerprint covers what decides the
replies: the input files as listed, and the request. It covers neither the endpoint's address (a model that is
deployed again gives the same answers elsewhere) nor what happens to the rows afterwards.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import re
import socket
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

import airflow_provider_raylm
from airflow_provider_raylm.exceptions import EndpointError, RaylmError, SpecError
from airflow_provider_raylm.job_main import run_job, say
from airflow_provider_raylm.ray_data import storage as store
from airflow_provider_raylm.ray_data.batch_files import result_lines
from airflow_provider_raylm.ray_data.commit import (
    PRIVATE,
    RESULTS,
    OutputFolder,
    check_complete,
    owner_of,
    settle_schema,
)
from airflow_provider_raylm.ray_data.ids import check_ids
from airflow_provider_raylm.ray_data.journal import Journal
from airflow_provider_raylm.ray_data.keeper import start_keeper
from airflow_provider_raylm.ray_data.lock import folder_lock
from airflow_provider_raylm.ray_data.policy import check_totals
from airflow_provider_raylm.ray_data.progress import Reporter
from airflow_provider_raylm.ray_data.query import START_CONCURRENCY, actor_count, ai_query, cluster_cpus, root_error
from airflow_provider_raylm.ray_data.requests import Query, Secret
from airflow_provider_raylm.ray_data.rows import output_schema
from airflow_provider_raylm.ray_data.sink import StagingSink, WrittenFile, apply_postprocess, load_postprocess
from airflow_provider_raylm.ray_data.source import (
    InputFile,
    Plan,
    PlannedSource,
    check_columns,
    list_input,
    make_plan,
    read_counts,
)
from airflow_provider_raylm.spec import InputFormat, Manifest, QuerySpec, StorageSpec

log = logging.getLogger(__name__)

_NUMBERING = 1
"""Raised when the same plan would number rows differently, so that older runs are not taken up."""
_BLOCK_BYTES = 2**19
"""A query actor holds some thirty blocks at once, with a few times their size in objects for rows and replies."""
_IO_CPUS = 0.25
"""Reading and writing wait for the store; they must find room beside the query actors and the model's engines."""
_IO_TASKS_PER_ACTOR = 4
"""Reads and writes at once, of each. Every one is a process of some 150 MiB, and the endpoint is slower than a few."""
_RAYS_ADVICE = re.compile(r"^Failed to .+ after \d+/\d+ attempts", re.MULTILINE)
"""Ray Data adds to the words of any error how often it tried and how to change that."""


def run(spec: QuerySpec) -> Manifest:
    """Ask the endpoint for every input row that has no stored reply, and commit the output.

    Raises:
        SpecError: The spec does not fit the input or the cluster.
        OutputError: The output folder cannot be used as asked, or rows went missing.
        StorageError: The store refused.
        EndpointError: The endpoint refused, or was away for too long.
        PartialFailureError: More rows failed than the policy allows.
    """
    query = _query(spec)
    if spec.postprocess is not None:
        load_postprocess(spec.postprocess)
    if spec.max_rows_per_file < 1:
        raise SpecError(f"max_rows_per_file: expected 1 or more, got {spec.max_rows_per_file!r}")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    with store.explained(spec.output_path, spec.storage):
        output = OutputFolder(spec.output_path, spec.storage)
        store.check_bucket(output.fs, output.root)
        lock = folder_lock(
            f"{spec.output_path.rstrip('/')}/{PRIVATE}/lock.json",
            spec.storage,
            folder=spec.output_path,
            owner={**spec.labels, "host": socket.gethostname()},
        )
        output.check = lock.check
        with lock:
            return _run_locked(spec, query, output)


def _run_locked(spec: QuerySpec, query: Query, output: OutputFolder) -> Manifest:
    started_s = time.monotonic()
    paths = _paths(spec.input_path)
    input_format, files = list_input(paths, spec.storage, spec.input_format)
    _check_apart(paths, spec.storage, files, output)
    fingerprint = fingerprint_of(spec, input_format, files)
    settings = settings_of(spec)
    begun = output.finish_begun()
    if begun is not None:
        say(f"an earlier attempt had asked every row; its commit to {spec.output_path} is complete now")
        if spec.resume and begun[:2] == (fingerprint, settings):
            return begun[2]
    standing = output.standing(spec.write_mode, spec.labels)
    actors = actor_count(spec.concurrency, cluster_cpus())
    plan, run_id, resumed = _take_up(spec, output, fingerprint, query, (input_format, files), actors)
    check_columns(query.columns, plan.schema)
    query.check_columns(plan.schema.names)
    rows = f"{plan.rows} rows" if plan.rows is not None else f"{plan.size} bytes"
    say(f"{'taking up' if resumed else 'starting'} run {run_id}: {rows} in {len(plan.files)} {input_format} files")

    staging = f"{PRIVATE}/runs/{fingerprint}/staging/{uuid.uuid4().hex[:8]}"
    written, flow = _execute(
        spec, query, output, plan, fingerprint=fingerprint, run_id=run_id, staging=staging, actors=actors
    )
    rows_in = check_complete(written, read_counts(_uri(spec, fingerprint, "read"), spec.storage), len(plan.units))
    errors_by_type = sum((Counter(file.errors_by_type) for file in written), Counter())
    errors = errors_by_type.total()
    check_totals(
        rows=rows_in,
        errors=errors,
        on_error=spec.on_error,
        max_error_rate=spec.max_error_rate,
        max_errors=spec.max_errors,
        errors_by_type=errors_by_type,
    )
    empty = output_schema(plan.schema, query).empty_table().drop_columns(_extra_columns(spec, query, plan))
    if spec.postprocess is not None and not written:
        empty = apply_postprocess(load_postprocess(spec.postprocess), empty, spec.postprocess)
    settled, schema = settle_schema(output, staging, written, empty=empty, empty_name=f"part-{run_id}-empty.parquet")
    seconds = time.monotonic() - started_s
    rows_out = sum(file.rows for file in settled)
    completion_tokens = sum(file.completion_tokens for file in written)
    manifest = Manifest(
        output_path=spec.output_path,
        rows_in=rows_in,
        rows=rows_out,
        rows_filtered=rows_in - rows_out,
        rows_resumed=int(flow.get("resumed", 0)),
        errors=errors,
        errors_by_type=dict(errors_by_type),
        prompt_tokens=sum(file.prompt_tokens for file in written),
        completion_tokens=completion_tokens,
        seconds=round(seconds, 3),
        rows_per_s=round(rows_in / seconds, 3),
        completion_tokens_per_s=round(completion_tokens / seconds, 3),
        files=tuple({"path": file.name, "rows": file.rows, "bytes": file.size} for file in settled),
        inputs=tuple({"path": file.path, "rows": file.rows, "bytes": file.size} for file in plan.files),
        schema={field.name: str(field.type) for field in schema},
        fingerprint=fingerprint,
        run_id=run_id,
        flow=flow,
        versions={
            "ray": ray.__version__,
            "pyarrow": pa.__version__,
            "python": platform.python_version(),
            "airflow_provider_raylm": airflow_provider_raylm.__version__,
        },
        labels=spec.labels,
    )
    if input_format == "openai_batch" and {"custom_id", spec.output_col} <= set(schema.names):
        store.each(lambda file: _write_results(spec, output, staging, file.name), settled)
    output.delete_abandoned(except_run=fingerprint)
    output.commit(fingerprint, staging, manifest, standing, settings=settings)
    say(f"committed {rows_out} rows to {spec.output_path}")
    return manifest


def _write_results(spec: QuerySpec, output: OutputFolder, staging: str, name: str) -> None:
    """A staged file's rows once more, as the hosted batch APIs give results."""
    target = output.path(staging, RESULTS, f"{name.removesuffix('.parquet')}.jsonl")
    if store.is_local(output.fs):
        output.fs.create_dir(target.rpartition("/")[0], recursive=True)
    with (
        pq.ParquetFile(store.open_object(output.fs, output.path(staging, name))) as parquet,
        output.fs.open_output_stream(target) as stream,
    ):
        for batch in parquet.iter_batches(batch_size=1024, columns=["custom_id", spec.output_col]):
            rows = pa.Table.from_batches([batch])
            for line in result_lines(rows, output_col=spec.output_col, model=spec.model, endpoint=spec.endpoint):
                stream.write(f"{line}\n".encode())


def fingerprint_of(spec: QuerySpec, input_format: str, files: Sequence[InputFile]) -> str:
    """Hash of what decides the replies."""
    decides = {
        "numbering": _NUMBERING,
        "files": [(file.path, file.size, file.changed_s, file.keys) for file in files],
        "input_format": input_format,
        **{
            name: getattr(spec, name)
            for name in (
                "model",
                "endpoint",
                "input_columns",
                "prompt_col",
                "prompt_template",
                "messages_col",
                "image_cols",
                "system_prompt",
                "output_col",
                "options",
                "response_format",
            )
        },
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:20]


def settings_of(spec: QuerySpec) -> str:
    """Hash of what decides the output besides the replies: for whom it is, and what is made of them."""
    decides = {
        "owner": owner_of(spec.labels),
        **{
            name: getattr(spec, name)
            for name in (
                "postprocess",
                "write_mode",
                "on_error",
                "max_error_rate",
                "max_errors",
                "max_rows_per_file",
                "id_col",
            )
        },
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _take_up(
    spec: QuerySpec,
    output: OutputFolder,
    fingerprint: str,
    query: Query,
    listing: tuple[InputFormat, tuple[InputFile, ...]],
    actors: int,
) -> tuple[Plan, str, bool]:
    """The plan and id of the unfinished run of this fingerprint, or of a new one."""
    begun = output.read_json("runs", fingerprint, "run.json") if spec.resume else None
    if begun is not None:
        store.delete_folder(output.fs, output.path(PRIVATE, "runs", fingerprint, "staging"))
        return Plan.from_json(json.dumps(begun["plan"])), begun["run_id"], True
    store.delete_folder(output.fs, output.path(PRIVATE, "runs", fingerprint))
    columns = None
    if spec.input_columns is not None:
        ids = [spec.id_col] if spec.id_col is not None else []
        columns = list(dict.fromkeys([*spec.input_columns, *query.columns, *ids]))
    plan = make_plan(
        spec.input_path,
        spec.storage,
        columns=columns,
        text_columns=query.columns,
        actors=actors,
        listing=listing,
    )
    if spec.id_col is not None:
        check_columns([spec.id_col], plan.schema)
        check_ids(plan, spec.id_col, _paths(spec.input_path)[0], spec.storage, cpus=_IO_CPUS)
    run_id = uuid.uuid4().hex[:8]
    output.write_json({"run_id": run_id, "plan": json.loads(plan.to_json())}, "runs", fingerprint, "run.json")
    return plan, run_id, False


def _execute(
    spec: QuerySpec,
    query: Query,
    output: OutputFolder,
    plan: Plan,
    *,
    fingerprint: str,
    run_id: str,
    staging: str,
    actors: int,
) -> tuple[list[WrittenFile], dict[str, Any]]:
    """Read, ask and stage. The staged files, and the last state of flow control."""
    if not plan.units:
        return [], {}
    _set_up_ray_data()
    source = PlannedSource(
        plan, _paths(spec.input_path)[0], spec.storage, _uri(spec, fingerprint, "read"), spec.storage
    )
    sink = StagingSink(
        f"{spec.output_path.rstrip('/')}/{staging}",
        spec.storage,
        run_id=run_id,
        output_col=spec.output_col,
        max_rows_per_file=spec.max_rows_per_file,
        dropped=_extra_columns(spec, query, plan),
        postprocess=spec.postprocess,
    )
    keeper = start_keeper(
        base_url=spec.base_url,
        model=spec.model,
        api_key=spec.api_key,
        concurrency=spec.concurrency or START_CONCURRENCY,
        batch_size=spec.batch_size,
        priority=spec.priority,
        stall_timeout_s=spec.stall_timeout_s,
    )
    reporter = Reporter(plan.rows, say, interactive=False)
    try:
        io_tasks = _IO_TASKS_PER_ACTOR * actors
        ds = ray.data.read_datasource(
            source, override_num_blocks=len(plan.units), num_cpus=_IO_CPUS, concurrency=io_tasks
        )
        ds = ai_query(
            ds,
            spec.model,
            **{name: getattr(spec, name) for name in _QUERY_ARGUMENTS},
            concurrency=spec.concurrency,
            batch_size=spec.batch_size,
            body_col=query.body_col,
            priority=spec.priority,
            limiter_factory=keeper.connect,
            store_factory=functools.partial(Journal, _uri(spec, fingerprint, "journal"), spec.storage),
        )
        with (
            _every(_lease_interval_s(spec), "lease", lambda: _renew_lease(spec)),
            _every(1.0, "progress", lambda: reporter.update(keeper.status())),
        ):
            ds.write_datasink(sink, ray_remote_args={"num_cpus": _IO_CPUS}, concurrency=io_tasks)
        flow = keeper.status()
        reporter.close(flow)
        output.write_json(keeper.trace(), "flow.json")
        return sink.written, flow
    except Exception as exc:
        error = _plain(exc)
        if isinstance(error, EndpointError):
            say("finished rows are stored; the next attempt asks only for the others")
        # Ray raises a class of its own that is also the class of ours: both, and with a traceback for a message
        if error is exc:
            raise
        raise error from exc
    finally:
        keeper.stop()


def _set_up_ray_data() -> None:
    # a small input has fewer blocks than there may be tasks: nothing that its owner could change
    warnings.filterwarnings("ignore", message="The maximum number of concurrent tasks for")
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = _BLOCK_BYTES
    # what Ray versions name differently or lack
    for name, value in {
        "execution_no_progress_timeout_s": -1,  # `stall_timeout_s` decides, and knows an endpoint that is away
        "print_on_execution_start": False,
    }.items():
        if hasattr(context, name):
            setattr(context, name, value)


_QUERY_ARGUMENTS = (
    "base_url",
    "api_key",
    "endpoint",
    "prompt_col",
    "prompt_template",
    "messages_col",
    "image_cols",
    "system_prompt",
    "output_col",
    "options",
    "response_format",
    "on_error",
    "max_error_rate",
    "max_errors",
    "max_attempts",
    "stall_timeout_s",
    "group_by_prefix",
)


def _query(spec: QuerySpec) -> Query:
    values = {name: getattr(spec, name) for name in _QUERY_ARGUMENTS}
    body_col = "body" if spec.input_format == "openai_batch" else None
    return Query(model=spec.model, body_col=body_col, **{**values, "api_key": Secret(spec.api_key)})


def _plain(exc: BaseException) -> RaylmError:
    """One sentence for an error that came through Ray."""
    error = root_error(exc)
    if isinstance(error, RaylmError):
        return error
    cause = getattr(error, "cause", None) or error
    words = cause.args[0] if cause.args and isinstance(cause.args[0], str) else str(cause)
    lines = [line for line in _RAYS_ADVICE.split(words)[0].splitlines() if line.strip()]
    return RaylmError(f"the query job failed: {type(cause).__name__}: {lines[-1].strip() if lines else ''}"[:500])


def _paths(input_path: str | Sequence[str]) -> list[str]:
    paths = [input_path] if isinstance(input_path, str) else list(input_path)
    if not paths:
        raise SpecError("input_path is empty; expected a file, a folder or a list of them")
    return paths


def _uri(spec: QuerySpec, fingerprint: str, *parts: str) -> str:
    return "/".join((spec.output_path.rstrip("/"), PRIVATE, "runs", fingerprint, *parts))


def _extra_columns(spec: QuerySpec, query: Query, plan: Plan) -> list[str]:
    """Columns that are read for the query and its checks only; an older plan may lack the one of `id_col`."""
    kept = spec.input_columns
    read = [*query.columns, *([spec.id_col] if spec.id_col is not None else [])]
    return [] if kept is None else [name for name in plan.schema.names if name in read and name not in kept]


def _check_apart(
    paths: Sequence[str], storage: StorageSpec | None, files: Sequence[InputFile], output: OutputFolder
) -> None:
    inside = [file.path for file in files if file.path.startswith(output.root + "/")]
    if inside:
        raise SpecError(
            f"the input file {inside[0]!r} lies in output_path {output.name!r}; a run owns its output folder, so it "
            "must be another one"
        )
    for path in paths:
        root = store.open_filesystem(path, storage)[1].rstrip("/")
        below = store.relative(output.root, root)
        if f"{output.root}/".startswith(f"{root}/") and not store.is_hidden(below):
            raise SpecError(
                f"output_path {output.name!r} lies in the input folder {path!r}; the next run would read its rows, so "
                "it must be another one"
            )


def _lease_interval_s(spec: QuerySpec) -> float | None:
    return None if spec.lease is None or spec.app_name is None else max(1.0, spec.lease.ttl_s / 4)


def _renew_lease(spec: QuerySpec) -> None:
    from airflow_provider_raylm.ray_serve.leases import renew

    if spec.lease is not None and spec.app_name is not None:
        renew(spec.app_name, spec.lease.holder, spec.lease.ttl_s)


@contextmanager
def _every(interval_s: float | None, name: str, work: Callable[[], object]) -> Iterator[None]:
    """Call `work` at once and then every so many seconds, on a thread. Its errors are logged; they end nothing."""
    if interval_s is None:
        yield
        return
    stop = threading.Event()

    def loop() -> None:
        while True:
            try:
                work()
            except Exception as exc:
                log.warning("%s: %s: %s", name, type(exc).__name__, exc)
            if stop.wait(interval_s):
                return

    thread = threading.Thread(target=loop, name=f"raylm-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


if __name__ == "__main__":
    run_job(QuerySpec, run)

"""`ai_query`: ask an OpenAI-compatible endpoint once per row of a Ray Dataset.

How rows reach the endpoint. Tiny blocks are joined to at least `_ROWS_PER_CALL` rows, and each query actor works on
`_CALLS_PER_ACTOR` blocks at once: the calls share the actor's engine (`engine.py`), which keeps as many rows in flight
as the job's limiter grants, and refills row by row. A block waits for its own slowest row; the rows of the other blocks
do not. So neither one huge block nor a thousand tiny ones decide how many rows are in flight.

Rows keep their order within a block, and carry their identity (`contracts.BLOCK_COL`, `ROW_COL`) through.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data

from airflow_provider_raylm.exceptions import RaylmError, SpecError
from airflow_provider_raylm.ray_data.client import EndpointClient, most_connections
from airflow_provider_raylm.ray_data.contracts import BLOCK_COL, ROW_COL, Limiter, ReplyStore
from airflow_provider_raylm.ray_data.engine import Engine, EngineThread
from airflow_provider_raylm.ray_data.keeper import start_keeper
from airflow_provider_raylm.ray_data.requests import Query, Secret
from airflow_provider_raylm.ray_data.rows import Reply, reply_column, reply_type, row_keys, with_parsed
from airflow_provider_raylm.spec import Endpoint, OnError, Priority, one_of

if TYPE_CHECKING:
    from ray.data import Dataset

log = logging.getLogger(__name__)

LimiterFactory = Callable[[], Any]
"""Makes an actor's `Limiter`, on the actor's event loop; may be a coroutine function."""
StoreFactory = Callable[[], ReplyStore]

_ROWS_PER_CALL = 128
_CALLS_PER_ACTOR = 32
_ROWS_PER_SORTED_CALL = 4096  # prefixes meet only inside a call
_SORTED_CALLS_PER_ACTOR = 4
_ROWS_PER_PART = 1024  # of a call's result; finished parts need not wait in memory for the rest
_MOST_CONNECTIONS = 4096
_PIECES_CPUS = 0.1  # of the step before the actors, where it runs apart from them
START_CONCURRENCY = 32  # where the limit starts when nobody says: 32 × 8 rows; the number of actors says nothing of it


def ai_query(
    ds: Dataset,
    model: str,
    *,
    prompt_col: str | None = None,
    base_url: str,
    api_key: str = "EMPTY",
    output_col: str = "generated_text",
    options: Mapping[str, Any] | None = None,
    concurrency: int | None = None,
    batch_size: int = 8,
    endpoint: Endpoint = "chat",
    prompt_template: str | None = None,
    messages_col: str | None = None,
    body_col: str | None = None,
    image_cols: Sequence[str] = (),
    system_prompt: str | None = None,
    response_format: Any = None,
    on_error: OnError = "keep",
    max_error_rate: float | None = None,
    max_errors: int | None = None,
    max_attempts: int = 5,
    stall_timeout_s: float = 900.0,
    priority: Priority = "normal",
    group_by_prefix: bool = False,
    limiter_factory: LimiterFactory | None = None,
    store_factory: StoreFactory | None = None,
) -> Dataset:
    """Add a column with the endpoint's reply to each row. Lazy: nothing is sent before the result is consumed.

    One row out per row in, with all its columns. The output column is a struct of one fixed type: `content`,
    `reasoning_content`, `finish_reason`, `tool_calls`, `prompt_tokens`, `completion_tokens`, `latency_s`, `attempts`,
    `status` (`ok` or `error`), `error` (`type`, `message`, `http_status`); and `embedding`, `logprobs` or `parsed` if
    asked for.

    Args:
        ds: The rows.
        model: Model id at the endpoint.
        prompt_col: Column with the prompt: text, a number or a date.
        base_url: The OpenAI base URL, usually ending in `/v1`.
        api_key: Its key.
        output_col: Name of the new column.
        options: Request parameters (`temperature`, `max_tokens`, `extra_body`, ...), `enable_thinking`, and `timeout`
            (seconds per row; otherwise derived from `max_tokens` and what is seen).
        concurrency: Query actors. `None` chooses from the cluster's CPUs; one holds 1,000 requests in flight.
        batch_size: With `concurrency`, where the adaptive limit on requests in flight starts.
        endpoint: `chat`, `completions` or `embeddings`.
        prompt_template: Prompt with columns in it, `"{title}: {body}"`; instead of `prompt_col`.
        messages_col: Column with chat messages (list of structs, or its JSON); instead of `prompt_col`.
        body_col: Column with a whole request as JSON, as in a batch file; instead of `prompt_col`.
        image_cols: Columns with image URLs or bytes, added to the user message.
        system_prompt: System message for rows that bring none.
        response_format: JSON schema, pydantic model or DDL (`label STRING, score DOUBLE`): `parsed` has that type, and
            a reply that does not fit is an error row that keeps its text.
        on_error: `keep` failed rows with their error, make the whole struct `null`, or `raise` at the first one.
        max_error_rate, max_errors: The job fails when more rows fail; see `policy.py` for what is judged when.
        max_attempts: Requests per row that fail for a passing reason before the row has failed.
        stall_timeout_s: Seconds without an answer, while the endpoint refuses or is away, after which the job fails.
        priority: Share of a contended endpoint.
        group_by_prefix: Send rows with a common beginning one after the other, for the server's prefix cache; their
            order in the output stays.
        limiter_factory: Flow control; `None` for the job's own adaptive limit.
        store_factory: Finished replies to reuse, and where to keep new ones, by `BLOCK_COL` and `ROW_COL`.

    Raises:
        SpecError: An argument is wrong. If the dataset's columns are not known yet, a wrong column name is found by the
            first block instead.
    """
    query = Query(
        model=model,
        base_url=base_url,
        api_key=Secret(api_key),
        endpoint=endpoint,
        prompt_col=prompt_col,
        prompt_template=prompt_template,
        messages_col=messages_col,
        body_col=body_col,
        image_cols=tuple(image_cols),
        system_prompt=system_prompt,
        output_col=output_col,
        options=dict(options or {}),
        response_format=response_format,
        on_error=on_error,
        max_error_rate=max_error_rate,
        max_errors=max_errors,
        max_attempts=max_attempts,
        stall_timeout_s=stall_timeout_s,
        group_by_prefix=group_by_prefix,
    )
    one_of("priority", priority, Priority)
    if batch_size < 1:
        raise SpecError(f"batch_size: expected 1 or more, got {batch_size!r}")
    if (schema := ds.schema(fetch_if_missing=False)) is not None:
        query.check_columns(schema.names)
    actors = actor_count(concurrency, cluster_cpus())
    if concurrency is not None and actors < concurrency:
        log.warning("concurrency=%s: %s query actors, one for each CPU that reading leaves", concurrency, actors)
    if limiter_factory is None:
        limiter_factory = _job_limiter(
            query, concurrency=concurrency or START_CONCURRENCY, batch_size=batch_size, priority=priority
        )
    rows, calls = (
        (_ROWS_PER_SORTED_CALL, _SORTED_CALLS_PER_ACTOR) if group_by_prefix else (_ROWS_PER_CALL, _CALLS_PER_ACTOR)
    )
    num_cpus = cpus_per_actor(actors, ray.available_resources().get("CPU", 0.0))
    pool = _actor_pool(actors, calls)
    # Ray runs steps that ask for the same as one: these two in the actor, where it can, and none of the user's with it
    pieces = ds.map_batches(
        _as_it_is,
        batch_size=rows,
        batch_format="pyarrow",
        zero_copy_batch=True,
        num_cpus=_PIECES_CPUS if "max_concurrency" in pool else num_cpus,
    )
    return pieces.map_batches(
        AiQuery,
        fn_constructor_args=(_Sealed(query, limiter_factory, store_factory),),
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        num_cpus=num_cpus,
        **pool,
    )


def cluster_cpus() -> int:
    """CPUs of the cluster; starts or joins one if there is none yet."""
    if not ray.is_initialized():
        ray.init()
    return int(ray.cluster_resources().get("CPU", 1))


def actor_count(concurrency: int | None, cpus: int) -> int:
    """How many query actors a cluster of `cpus` gets.

    They only move bytes, and one holds 1,000 requests in flight: one for every four CPUs, at most eight. What is asked
    for is granted as far as there is a CPU for each, and one for reading.
    """
    if concurrency is not None and concurrency < 1:
        raise SpecError(f"concurrency: expected 1 or more, got {concurrency!r}")
    most = max(1, cpus - 1)
    return min(most, concurrency or max(1, min(8, cpus // 4)))


def cpus_per_actor(actors: int, free_cpus: float) -> float:
    """CPUs that Ray sets aside for each actor: about one, or less where the model's own processes leave less.

    Actors hold their share until the end. Reading must find some beside it, or neither ever starts. It is never exactly
    one, because that is what other steps ask for.
    """
    room = max(free_cpus - 1, free_cpus / 2)
    return min(0.99, math.floor(100 * room / actors) / 100)


def root_error(exc: BaseException) -> BaseException:
    """The error of ours inside what Ray raises for a failed dataset; `exc` itself if there is none."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [exc]
    while queue:
        error = queue.pop(0)
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        if isinstance(error, RaylmError) and not hasattr(error, "as_instanceof_cause"):
            return error
        queue += [getattr(error, "cause", None), error.__cause__, error.__context__]
    return exc


class _Sealed:
    """Constructor arguments as Ray's exports of a dataset should see them: not at all."""

    def __init__(self, query: Query, limiter_factory: LimiterFactory, store_factory: StoreFactory | None) -> None:
        self.query = query
        self.limiter_factory = limiter_factory
        self.store_factory = store_factory

    def __repr__(self) -> str:
        return f"<query of {self.query.model!r}>"


class AiQuery:
    """The query actor. Ray calls it from several threads at once, with one block each."""

    def __init__(self, sealed: _Sealed) -> None:
        # Arrow's own pool keeps what each of the many threads has freed: with it this process grows with the rows
        pa.set_memory_pool(pa.system_memory_pool())
        self._query = query = sealed.query
        self._store = sealed.store_factory() if sealed.store_factory is not None else None

        async def make() -> Engine:
            limiter = sealed.limiter_factory()
            if inspect.isawaitable(limiter):
                limiter = await limiter
            self._limiter: Limiter = limiter
            return Engine(query, EndpointClient(query, connections=most_connections(_MOST_CONNECTIONS)), limiter)

        self._engine = EngineThread(make)

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Ask the rows of one block. Parts of it come out in order, as soon as all their rows are there."""
        self._query.check_columns(table.column_names)
        size = table.num_rows if self._query.group_by_prefix else _ROWS_PER_PART
        parts = [table.slice(start, size) for start in range(0, table.num_rows, size)]
        asked = deque((part, self._ask(part)) for part in parts)
        kind = reply_type(self._query)
        while asked:
            part, replies = asked.popleft()
            try:
                column = reply_column(replies(), self._query)
            except RaylmError:
                if self._store is not None:
                    self._store.flush()  # what is finished is kept, whatever ended the job
                raise
            yield part.append_column(pa.field(self._query.output_col, kind), column)
        self._engine.run(self._limiter.flush)  # Ray may end this actor as soon as its last block is done

    def _ask(self, table: pa.Table) -> Callable[[], list[Reply]]:
        """Hand the rows that have no stored reply to the engine; the replies are there when the result returns."""
        columns = {name: table.column(name).combine_chunks() for name in self._query.columns}

        def values(index: int) -> dict[str, Any]:
            return {name: column[index].as_py() for name, column in columns.items()}

        store = self._store
        keys = row_keys(table) if store is not None else None
        stored = {} if store is None or keys is None else self._stored(store, keys)
        asked = [index for index in range(table.num_rows) if index not in stored]

        def keep(position: int, reply: Reply) -> None:
            if store is not None and keys is not None:
                store.append(*keys[asked[position]], {name: v for name, v in reply.items() if name != "parsed"})

        fresh = self._engine.ask(
            len(asked),
            lambda position: self._query.body(values(asked[position])),
            order=self._prefix_order(len(asked), lambda position: values(asked[position]))
            if self._query.group_by_prefix
            else None,
            on_reply=keep,
        )

        def replies() -> list[Reply]:
            answered = {**stored, **dict(zip(asked, fresh(), strict=True))}
            return [answered[index] for index in range(table.num_rows)]

        return replies

    def _stored(self, store: ReplyStore, keys: Sequence[tuple[int, int]]) -> dict[int, Reply]:
        """Stored replies by position in the table."""
        blocks = {block: store.load(block) for block in {block for block, _ in keys}}
        found = {
            index: with_parsed(reply, self._query)
            for index, (block, row) in enumerate(keys)
            if (reply := blocks[block].get(row)) is not None
        }
        if found:
            errors = sum(reply["status"] != "ok" for reply in found.values())
            self._engine.call(self._limiter.count, rows=len(found), errors=errors, resumed=len(found))
        return found

    def _prefix_order(self, count: int, row: Callable[[int], Mapping[str, Any]]) -> list[int]:
        """Positions of the rows, those with a common beginning next to each other."""

        def beginning(position: int) -> str:
            with contextlib.suppress(Exception):  # a row that cannot be read has no beginning; asking it says why
                if self._query.messages_col is not None:
                    return str(row(position)[self._query.messages_col])
                return self._query.prompt(row(position))
            return ""

        keys = [beginning(position) for position in range(count)]
        return sorted(range(count), key=keys.__getitem__)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._engine.close()
            if self._store is not None:
                self._store.flush()


def _as_it_is(table: pa.Table) -> pa.Table:
    """Only there for its `batch_size`: Ray joins blocks that have fewer rows."""
    return table


def _actor_pool(actors: int, calls: int) -> dict[str, Any]:
    """A fixed pool whose actors work on `calls` blocks at once, as arguments of `map_batches`."""
    known = inspect.signature(ray.data.ActorPoolStrategy.__init__).parameters
    options: dict[str, Any] = {"size": actors, "max_tasks_in_flight_per_actor": calls + 4}
    if "enable_true_multi_threading" in known:
        options["enable_true_multi_threading"] = True
    if "max_concurrent_calls_per_actor" in known:
        return {"compute": ray.data.ActorPoolStrategy(**options, max_concurrent_calls_per_actor=calls)}
    return {"compute": ray.data.ActorPoolStrategy(**options), "max_concurrency": calls}  # before Ray 2.60


def _job_limiter(query: Query, *, concurrency: int, batch_size: int, priority: Priority) -> LimiterFactory:
    """The job's own adaptive limit, kept by one actor for all query actors."""
    return start_keeper(
        base_url=query.base_url,
        model=query.model,
        api_key=query.api_key.reveal(),
        concurrency=concurrency,
        batch_size=batch_size,
        priority=priority,
        stall_timeout_s=query.stall_timeout_s,
    ).connect


__all__ = ["BLOCK_COL", "ROW_COL", "actor_count", "ai_query", "root_error"]

"""The query actor's own decisions; what it does on Ray is tested there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
import ray

from airflow_provider_raylm.ray_data.contracts import BLOCK_COL, ROW_COL
from airflow_provider_raylm.ray_data.query import AiQuery, _actor_pool, _Sealed
from airflow_provider_raylm.ray_data.requests import Query
from airflow_provider_raylm.ray_data.rows import Reply, error_reply
from tests.support.fixed_limiter import FixedLimiter


def test_a_row_that_cannot_be_read_is_sorted_all_the_same() -> None:
    """Whatever reading its cells raises, its neighbours are put next to their like."""
    actor = AiQuery.__new__(AiQuery)
    actor._query = Query(model="m", base_url="http://h/v1", prompt_col="text", group_by_prefix=True)

    def row(position: int) -> Mapping[str, Any]:
        if position == 1:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")
        return {"text": ["b", "", "a"][position]}

    assert actor._prefix_order(3, row) == [1, 2, 0]


def test_an_actor_works_on_many_blocks_at_once_on_every_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray 2.60 has an argument of the pool for it; before, it is an option of the actor, and one block without it."""

    class Before260:
        def __init__(self, *, size: int, max_tasks_in_flight_per_actor: int, enable_true_multi_threading: bool) -> None:
            self.enable_true_multi_threading = enable_true_multi_threading

    assert _actor_pool(2, 32)["compute"].max_concurrent_calls_per_actor == 32
    monkeypatch.setattr(ray.data, "ActorPoolStrategy", Before260)
    pool = _actor_pool(2, 32)
    assert (pool["max_concurrency"], pool["compute"].enable_true_multi_threading) == (32, True)


def test_stored_rows_are_counted_before_the_block_is_done() -> None:
    """They need no request, so nothing else would keep Ray from ending the actor before it has told of them."""
    told: list[tuple[int, int]] = []

    class Limiter(FixedLimiter):
        async def flush(self) -> None:
            told.append((self.rows, self.resumed))

    class Stored:
        def load(self, block: int) -> dict[int, Reply]:
            return {row: error_reply("server_error", "no", http_status=500, attempts=1) for row in range(3)}

        def append(self, block: int, row: int, reply: Reply) -> None:
            raise AssertionError

        def flush(self) -> None:
            pass

    query = Query(model="m", base_url="http://127.0.0.1:9/v1", prompt_col="text")
    actor = AiQuery(_Sealed(query, lambda: Limiter(1), Stored))
    table = pa.table({"text": ["a", "b", "c"], BLOCK_COL: [7, 7, 7], ROW_COL: [0, 1, 2]})
    assert sum(part.num_rows for part in actor(table)) == 3
    assert told == [(3, 3)]


def test_the_actor_keeps_no_memory_that_its_threads_have_freed() -> None:
    """Arrow's own pool keeps it for each of them, and a query actor grew with the rows."""
    before = pa.default_memory_pool()
    try:
        pa.set_memory_pool(pa.mimalloc_memory_pool())
        query = Query(model="m", base_url="http://127.0.0.1:9/v1", prompt_col="text")
        AiQuery(_Sealed(query, lambda: FixedLimiter(1), None))
        assert pa.default_memory_pool().backend_name == "system"
    finally:
        pa.set_memory_pool(before)

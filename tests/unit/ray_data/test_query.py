"""The query actor's own decisions; what it does on Ray is tested there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from airflow_provider_raylm.ray_data.contracts import BLOCK_COL, ROW_COL
from airflow_provider_raylm.ray_data.query import AiQuery, _Sealed
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
